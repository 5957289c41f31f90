"""`ntp run` as a user types it, on the recipe of the plain adapter."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.command import NTP, PAUSED, RECIPES, Command, last_line, wait_until


def job(folder, *flags, script=RECIPES / "train.py", **environment):
    return Command([*NTP, "run", "--standalone", *flags, str(script)], folder / "log", **environment)


def paused_job(folder, *flags, recipe="train.py", **environment):
    """A job that trains slowly until it may continue."""
    variables = {"RECIPE": str(RECIPES / recipe), "STEPS": "200", "PAUSE_S": "0.5"} | environment
    return job(folder, *flags, script=PAUSED, **variables)


def end_with_back(running, slot):
    """End the job without pauses once a slot's second process has joined; (exit code, output)"""
    running.wait_for(rf"slot {slot} is pid (.|\n)*slot {slot} is pid")
    running.go_on()
    return running.end()


@pytest.fixture(params=[(), ("--ntp-fork",)], ids=["started", "forked"])
def how_workers_come(request):
    return request.param


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_killed_worker_is_restarted_and_the_result_is_undisturbed(tmp_path, how_workers_come):
    (tmp_path / "calm").mkdir()
    calm = job(tmp_path / "calm", *how_workers_come, "--nproc-per-node=3", STEPS="200", PAUSE_S="0")
    code, output = calm.end()
    assert code == 0
    loss, weights, members = last_line(output)
    assert members == "(0, 1, 2)"

    running = paused_job(tmp_path, *how_workers_come, "--nproc-per-node=3", "--ntp-respawn=1")
    os.kill(int(running.wait_for(r"slot 1 is pid (\d+)")[1]), signal.SIGKILL)
    code, output = end_with_back(running, 1)
    assert code == 0
    assert "ntp run: slot 1 is lost: its process ended with code -9\n" in output
    assert "ntp run: slot 1 starts anew" in output
    assert last_line(output) == (pytest.approx(loss, rel=1e-10), pytest.approx(weights, rel=1e-10), "(0, 1, 2)")


def test_a_warm_spare_takes_the_place_at_once_in_a_tensor_parallel_job(tmp_path):
    (tmp_path / "calm").mkdir()
    script = RECIPES / "train_tp.py"
    code, output = job(tmp_path / "calm", "--nproc-per-node=4", script=script, STEPS="200", PAUSE_S="0").end()
    assert code == 0, output
    loss = re.search(r"step 200: loss (\S+), members \(0, 1, 2, 3\)", output)[1]

    running = paused_job(tmp_path, "--nproc-per-node=4", "--ntp-spares=1", recipe="train_tp.py")
    os.kill(int(running.wait_for(r"slot 1 is pid (\d+)")[1]), signal.SIGKILL)
    code, output = end_with_back(running, 1)
    assert code == 0, output
    assert "slot 1 comes back in a warm spare" in output
    assert float(re.search(r"step 200: loss (\S+), members \(0, 1, 2, 3\)", output)[1]) == pytest.approx(
        float(loss), rel=1e-10
    )


def test_losing_the_only_holder_of_state_ends_the_job(tmp_path):
    """Slots 1 and 3 hold the same features of their replicas."""
    running = job(tmp_path, "--nproc-per-node=4", script=RECIPES / "train_tp.py", STEPS="10000", PAUSE_S="0.05")
    pids = [int(running.wait_for(rf"slot {slot} is pid (\d+)")[1]) for slot in (1, 3)]
    running.wait_for("slot 0: step 1,")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    code, output = running.end()
    assert code == 4, output
    assert re.search(r"ntp: slot [02]: state of r0\.s0\.t1 is held by no living slot", output)
    assert "restart from the last checkpoint" in output


def test_a_job_without_a_wide_enough_replica_ends_with_a_code_of_its_own(tmp_path):
    settings = {"MIN_WIDTH": "2", "STEPS": "10000", "PAUSE_S": "0.05"}
    running = job(tmp_path, "--nproc-per-node=4", script=RECIPES / "train_tp.py", **settings)
    pids = [int(running.wait_for(rf"slot {slot} is pid (\d+)")[1]) for slot in (1, 2)]
    running.wait_for("slot 0: step 1,")
    os.kill(pids[0], signal.SIGKILL)
    running.wait_for(r"slot [23]: step \d+, members \(2, 3\)")
    os.kill(pids[1], signal.SIGKILL)
    code, output = running.end()
    assert code == 3, output
    assert "no replica is left: the best of 2 has a stage with 1 of 2 TP slots, and min_tp_width is 2" in output


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_signal_ends_everything(tmp_path, how, how_workers_come):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does that starts a job in the background
    running = job(tmp_path, *how_workers_come, "--nproc-per-node=2", STEPS="100000")
    signal.signal(signal.SIGINT, before)
    pids = [int(running.wait_for(rf"slot {slot} is pid (\d+)")[1]) for slot in range(2)]
    pids += {parent_of(pid) for pid in pids} - {running.process.pid}
    running.process.send_signal(how)
    code, output = running.end()
    assert code == 128 + how
    assert f"ntp run: ended by {how.name}\n" in output
    assert "SignalException" not in output, "no traceback of ours"
    assert "forcefully" not in output, "torch kills processes that have not ended after 30 s"
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def catches(pid, number):
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1]
    return bool(int(caught, 16) >> (number - 1) & 1)


def test_a_signal_ends_importing_processes_at_once(tmp_path):
    """Requests that came in the meantime are not forked afterwards."""
    pid_file = tmp_path / "pid"
    (tmp_path / "slow.py").write_text(
        f"import os, time\nopen({str(pid_file)!r}, 'w').write(f'{{os.getpid()}}\\n')\ntime.sleep(60)"
    )
    preload = {"NTP_PRELOAD": "slow", "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    running = job(tmp_path, "--ntp-fork", "--nproc-per-node=1", **preload)
    pid = wait_until(lambda: pid_file.exists() and pid_file.read_text().strip(), lambda: running.output)
    wait_until(lambda: catches(running.process.pid, signal.SIGTERM), lambda: running.output)
    running.process.send_signal(signal.SIGTERM)
    code, output = running.end()
    assert code == 128 + signal.SIGTERM, output
    assert not Path("/proc", pid).exists()


def commands_with(word):
    """Command lines of all processes with this word."""
    found = []
    for words in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # one that ends meanwhile
            found += [words.read_bytes()]
    return [words for words in found if word.encode() in words]


@pytest.mark.parametrize("fault_point", ["as it is started", "as it trains"])
def test_a_campaign_that_is_ended_ends_its_job(tmp_path, fault_point):
    recipe, broken = tmp_path / "recipe.toml", tmp_path / "out/broken"
    words = ["--standalone", "--nproc-per-node=2", str(RECIPES / "train.py")]
    recipe.write_text(f"[job]\nrun = {words}\n[[fault]]\nwhat = 'kill'\nslot = 'r0.s0.t0'\nat_step = 100000\n")
    campaign = Command([*NTP, "chaos", recipe, "--out", tmp_path / "out"], tmp_path / "log", STEPS="100000")
    if fault_point == "as it trains":
        wait_until(lambda: (broken / "log.txt").exists() and "slot 1 is pid" in (broken / "log.txt").read_text(), str)
    wait_until(broken.exists, lambda: campaign.output)
    campaign.process.send_signal(signal.SIGTERM)
    assert campaign.end()[0] == 128 + signal.SIGTERM
    assert not commands_with(str(broken))


def test_a_job_that_has_ended_is_not_run_again_under_its_name(tmp_path):
    store = Command([*NTP, "store", "--port", "0"], tmp_path / "store")
    port = store.wait_for(r"ntp store: 127\.0\.0\.1:(\d+)")[1]
    flags = ["--nnodes=1", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=job", "--rdzv-conf", "is_host=0"]
    words = [*NTP, "run", *flags, f"--rdzv-endpoint=127.0.0.1:{port}", str(RECIPES / "train.py")]
    job_of = {"STEPS": "3", "PAUSE_S": "0", "NTP_TOKEN": "the same for both jobs"}
    code, output = Command(words, tmp_path / "first", **job_of).end()
    assert code == 0, output
    code, output = Command(words, tmp_path / "second", **job_of).end()
    store.process.send_signal(signal.SIGTERM)
    assert store.end()[0] == 0
    assert code == 2, output
    assert "a job with this --rdzv-id has already ended. Fix: use another --rdzv-id" in output
    assert "Traceback" not in output


def test_a_job_whose_workers_all_fail_has_failed(tmp_path, how_workers_come):
    script = tmp_path / "fails.py"
    script.write_text("import atexit\natexit.register(lambda: print('at the end'))\nraise SystemExit(77)")
    words = [*how_workers_come, "--ntp-on-error=evict", "--nproc-per-node=2"]
    code, output = job(tmp_path, *words, script=script).end()
    assert code == 1
    assert re.search("slot [01] is lost: its process ended with code 77", output)
    assert "at the end" in output
    assert "RuntimeWarning" not in output
    assert re.search("slot [01] was lost before all others had begun to train|no worker ended well", output)


def test_a_lost_fork_server_ends_no_worker_and_is_replaced_when_needed(tmp_path):
    running = paused_job(tmp_path, "--ntp-fork", "--nproc-per-node=3", "--ntp-respawn=1")
    pids = [int(running.wait_for(rf"slot {slot} is pid (\d+)")[1]) for slot in range(3)]
    fork_server = {parent_of(pid) for pid in pids}
    assert len(fork_server) == 1
    os.kill(fork_server.pop(), signal.SIGKILL)
    os.kill(pids[1], signal.SIGKILL)
    code, output = end_with_back(running, 1)
    assert code == 0, output
    assert "slot 1 starts anew" in output
    assert "members (0, 1, 2)" in output


def test_an_import_error_of_the_fork_server_is_reported_before_a_worker_starts(tmp_path):
    code, output = job(tmp_path, "--ntp-fork", "--nproc-per-node=2", NTP_PRELOAD="no.such.module").end()
    assert code == 2, output
    assert "No module named 'no'" in output
    assert "exited with 1 before it forked this worker. Fix: see its output above" in output


def test_a_script_started_outside_ntp_run_says_so(tmp_path):
    done = subprocess.run(
        [sys.executable, str(RECIPES / "train.py")], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode != 0
    assert "this process was not started by `ntp run`" in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nproc-per-node=1", "--max-restarts=3"], "--max-restarts = 3 would restart all workers"),
        (["--nproc-per-node=1", "--ntp-respawn=many"], "argument --ntp-respawn: 'many' is not a whole number from 0"),
    ],
)
def test_invalid_flags_are_one_line_and_exit_code_2(tmp_path, flags, message):
    code, output = job(tmp_path, *flags).end()
    assert code == 2
    assert [line for line in output.splitlines() if message in line]
