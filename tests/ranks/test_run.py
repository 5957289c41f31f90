"""`ntp run` as somebody types it, on the recipe of the plain adapter."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "plain" / "train.py"


class Job:
    """A running `ntp run`; what it says is read line by line from a file."""

    def __init__(self, folder, *flags, script=RECIPE, **environment):
        self.log = folder / "log"
        command = [sys.executable, "-m", "ntp_plugin.cli.main", "run", "--standalone", *flags, str(script)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | environment | {"OMP_NUM_THREADS": "1"}
            )

    def wait_for(self, pattern, timeout_s=90.0):
        deadline = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.log.read_text())):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, f"{pattern} was not said within {timeout_s} s: {self.log.read_text()}"
            time.sleep(0.02)
        return found

    def end(self, timeout_s=90.0):
        try:
            code = self.process.wait(timeout_s)
        finally:
            self.process.kill()
        return code, self.log.read_text()


def last_line(said):
    """(loss, weights, members) of the recipe's last line."""
    loss, weights, members = re.search(r"loss (\S+), weights (\S+), members (\(.*\))", said).groups()
    return float(loss), float(weights), members


def test_a_killed_worker_is_started_anew_and_the_result_is_that_of_an_undisturbed_run(tmp_path):
    (tmp_path / "calm").mkdir()
    calm = Job(tmp_path / "calm", "--nproc-per-node=3", STEPS="60", PAUSE_S="0.01")
    code, said = calm.end()
    assert code == 0
    loss, weights, members = last_line(said)
    assert members == "(0, 1, 2)"

    job = Job(tmp_path, "--nproc-per-node=3", "--ntp-respawn=1", STEPS="60", PAUSE_S="0.5")
    os.kill(int(job.wait_for(r"slot 1 is pid (\d+)")[1]), signal.SIGKILL)
    code, said = job.end()
    assert code == 0
    assert "ntp run: slot 1 is lost: its process ended with code -9\n" in said
    assert "ntp run: slot 1 starts anew" in said
    assert last_line(said) == (pytest.approx(loss, rel=1e-10), pytest.approx(weights, rel=1e-10), "(0, 1, 2)")


def test_ctrl_c_ends_everything_within_seconds(tmp_path):
    job = Job(tmp_path, "--nproc-per-node=2", STEPS="100000")
    pids = [int(job.wait_for(rf"slot {slot} is pid (\d+)")[1]) for slot in range(2)]
    struck = time.monotonic()
    job.process.send_signal(signal.SIGINT)
    code, _ = job.end()
    assert code != 0
    assert time.monotonic() - struck < 10
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_job_whose_workers_all_fail_has_failed(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(7)")
    code, said = Job(tmp_path, "--nproc-per-node=2", script=script).end()
    assert code == 1
    assert "ntp run: no worker ended well" in said


def test_a_script_of_ours_outside_of_ntp_run_says_so(tmp_path):
    done = subprocess.run([sys.executable, str(RECIPE)], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode != 0
    assert "this process was not started by `ntp run`" in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nproc-per-node=1", "--max-restarts=3"], "--max-restarts = 3 would start all workers anew"),
        (["--nproc-per-node=1", "--ntp-respawn=many"], "argument --ntp-respawn: invalid int value: 'many'"),
    ],
)
def test_flags_that_make_no_sense_are_one_line_and_exit_code_2(tmp_path, flags, message):
    code, said = Job(tmp_path, *flags).end()
    assert code == 2
    assert [line for line in said.splitlines() if message in line]
