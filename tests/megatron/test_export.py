"""`ntp copies export` writes the copies of a living or a dead run as a stock checkpoint.

The reference is stock Megatron, which saves after the same step.
"""

import contextlib
import re
import shutil
import sys
from pathlib import Path

import pytest

from benchmarks.numerics import BOUNDS
from ntp_plugin.errors import ConfigError
from ntp_plugin.launch.started_by import StartedBy
from ntp_plugin.telemetry import Committed, CopyTrouble, Exported, Follower, Recovered
from tests.harness.parity.job import Job
from tests.harness.parity.layouts import BASE, MODELS
from tests.harness.parity.saved import largest_difference, replica_digests_in
from tests.megatron import test_hosts
from tests.megatron.test_hosts import ENVIRONMENT, copies_left, training, wait_for_step
from tests.mounted import disk
from tests.ranks.command import NTP, Command
from tests.ranks.machines import machines

STEPS, ENOUGH = 2000, 25
"""More steps than an export takes; and the length of a job that must end."""
ITERATIONS = f"--train-iters {STEPS} --lr-decay-iters {STEPS}"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --dist-ckpt-optim-fully-reshardable"
FLOAT64 = BOUNDS["float64"]


def command(words, log):
    return Command(words, log, **ENVIRONMENT).end()


def export(run, to, log):
    """Export with the command of the run."""
    return command([*NTP, "copies", "export", str(run), "--to", str(to), "--", *StartedBy.read(run).words], log)


def saved_step(folder):
    return int((folder / "latest_checkpointed_iteration.txt").read_text())


def without_us(folder, job_of, more):
    """Run stock Megatron, started by torchrun; return its output."""
    job = job_of(enabled=False, more=f"{ITERATIONS} {more}")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.processes)]
    code, output = command([*launcher, *training(job, folder)], folder / f"without us, {job.processes}")
    assert code == 0, output[-4000:]
    return output


def run_of(events):
    """The run that writes its events there; other runs on this machine may remove what dead ones left."""
    for run in copies_left():
        with contextlib.suppress(ConfigError):
            if f"--ntp-events={events}" in StartedBy.read(run).words:
                return run
    raise AssertionError(f"no run tells to {events}")


def set_aside(run, folder):
    """Move the copies of a run to where no other run removes them."""
    kept = folder / run.name
    shutil.copytree(run, kept)
    shutil.rmtree(run)
    return kept


def killed(folder, job_of, more, *, step, meanwhile=lambda _: None):
    """The copies of a job whose power is cut after that step."""
    events = folder / "events"
    job = job_of(enabled=True, more=f"{ITERATIONS} {more} --ntp-events={events}")
    with machines(1, folder) as hosts:
        words = ["run", "--standalone", "--nproc-per-node", str(job.processes), *training(job, folder)]
        agent = hosts.run(1, *words, **ENVIRONMENT)
        wait_for_step(step, events, agent)
        run = run_of(events)
        meanwhile(run)
        hosts.kill(1)
    return set_aside(run, folder)


def sharded(**options):
    return Job(model=MODELS[BASE], tp=2, dp=2, **options)


def alone(**options):
    return Job(model=MODELS[BASE], tp=2, **options)


def wide(**options):
    return Job(model=MODELS[BASE], tp=4, **options)


@pytest.fixture(scope="module")
def dead(tmp_path_factory):
    """The copies of a dead run, and its events."""
    folder = tmp_path_factory.mktemp("dead")
    return killed(folder, sharded, SHARDED, step=8), folder / "events"


def all_in(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_same_state(saved, folder, more=SHARDED):
    """Assert that the saved state is that of an undisturbed job; that job saves once more, one step later, when it
    ends."""
    step = saved_step(saved)
    intervals = f"--save-interval {step} --exit-interval {step + 1}"
    without_us(folder, sharded, f"{more} --save {folder}/undisturbed {intervals}")
    mine, theirs, later = (
        replica_digests_in(where, when)
        for where, when in ((saved, step), (folder / "undisturbed", step), (folder / "undisturbed", step + 1))
    )
    assert any("exp_avg_sq" in name for name in mine)
    assert largest_difference(mine, theirs) <= FLOAT64
    assert largest_difference(mine, later) > FLOAT64


def test_a_living_run_is_exported(tmp_path):
    """The run continues during the export, until none of its copies has the exported version."""
    folder = tmp_path / "saved"

    def export_it(run):
        code, output = export(run, folder, tmp_path / "log")
        assert code == 0, output[-4000:]
        assert "belongs to a running job" in output

    killed(tmp_path, sharded, SHARDED, step=3, meanwhile=export_it)
    assert_same_state(folder, tmp_path)
    recorded = [one.event for one in Follower(tmp_path / "events").news()]
    (event,) = (event for event in recorded if isinstance(event, Exported))
    assert (event.step, event.folder, event.failed) == (saved_step(folder), str(folder), "")
    assert max(event.step for event in recorded if isinstance(event, Committed)) > event.step + 2
    assert not [event for event in recorded if isinstance(event, Recovered | CopyTrouble)]
    assert not list(Path("/dev/shm").glob("ntp-excerpt-*"))


def test_a_dead_run_is_exported(dead, tmp_path):
    """The export changes nothing of the run."""
    left, _ = dead
    before = all_in(left)
    code, output = export(left, tmp_path / "saved", tmp_path / "log")
    assert code == 0, output[-4000:]
    assert_same_state(tmp_path / "saved", tmp_path)
    assert all_in(left) == before
    assert command([*NTP, "copies", "verify", str(left)], tmp_path / "verified")[0] == 0


def test_an_export_to_a_full_disk_leaves_nothing(dead, tmp_path):
    """One line, nothing left behind, and the copies as they were."""
    left, events = dead
    before = all_in(left)
    with disk(tmp_path / "small", "1m") as small:
        code, output = export(left, small, tmp_path / "log")
        assert code == 1, output[-4000:]
        assert "cannot be written to" in output
        assert "which is full" in output
        assert output.count("\nntp: ") == 1, output[-4000:]
        assert "Traceback" not in output.rpartition("resumed from the copies")[2], output[-4000:]
        assert not list(small.iterdir())
    assert all_in(left) == before
    failed = [one.event for one in Follower(events).news() if isinstance(one.event, Exported) and one.event.failed]
    assert [event.folder for event in failed] == [str(small)]


def test_a_run_can_be_resumed_after_an_export(dead, tmp_path):
    left, _ = dead
    run, events = Path("/dev/shm") / left.name, tmp_path / "events"
    shutil.copytree(left, run)
    job = sharded(enabled=True, more=f"{ITERATIONS} {SHARDED} --ntp-events={events} --exit-interval {ENOUGH}")
    flags = ["--standalone", "--nproc-per-node", "4", "--ntp-resume", str(run)]
    code, output = command([*NTP, "run", *flags, *training(job, tmp_path)], tmp_path / "log")
    assert code == 0, output[-4000:]
    steps = {one.event.step for one in Follower(events).news() if isinstance(one.event, Committed)}
    assert max(steps) == ENOUGH
    assert min(steps) > 1
    assert not run.exists()


def test_a_run_of_two_hosts_is_exported_on_one_of_them(tmp_path):
    """Far copies complete the state there; without them the export is refused. In Megatron's default format."""
    with machines(2, tmp_path) as hosts:
        (agent, events), (_, of_second) = (test_hosts.start(hosts, at, tmp_path) for at in (1, 2))
        wait_for_step(8, events, agent)
        runs = [run_of(of_second), run_of(events)]
        hosts.kill(1)
        hosts.kill(2)
    left, _ = (set_aside(run, tmp_path) for run in runs)
    code, output = export(left, tmp_path / "saved", tmp_path / "log")
    assert code == 0, output[-4000:]
    assert_same_state(tmp_path / "saved", tmp_path, test_hosts.MORE)
    for far in left.glob("host-1/far-*"):
        far.unlink()
    code, output = export(left, tmp_path / "none", tmp_path / "log")
    assert code == 2, output
    assert "those of slots 0, 1" in output


def losses(output):
    """Megatron's own log: iteration -> loss."""
    return {int(step): float(loss) for step, loss in re.findall(r"iteration +(\d+)/.* lm loss: (\S+)", output)}


def test_a_stock_job_resumes_from_an_export(tmp_path):
    """One replica, all of whose state was copied; its checkpoint is loaded in another layout."""
    left = killed(tmp_path, alone, "", step=5)
    code, output = export(left, tmp_path / "saved", tmp_path / "log")
    assert code == 0, output[-4000:]
    step = saved_step(tmp_path / "saved")
    end = step + 10
    whole = losses(without_us(tmp_path, alone, f"--exit-interval {end}"))
    after = losses(without_us(tmp_path, wide, f"--exit-interval {end} --load {tmp_path}/saved"))
    assert sorted(after) == list(range(step + 1, end + 1))
    after.pop(step + 2)  # for the second step of a job Megatron logs the mean of the first two
    assert after == pytest.approx({number: whole[number] for number in after}, rel=1e-6), "as many digits as it logs"
    assert whole[step] != pytest.approx(whole[step + 1], rel=1e-6)
