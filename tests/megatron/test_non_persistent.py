"""Checkpoints that Megatron removes when there is a newer one (`--non-persistent-save-interval`), through losses."""

import dataclasses
import functools

import pytest

from benchmarks.numerics import BOUNDS
from ntp_plugin.testing.faults import kill
from tests.harness.parity.job import STEPS, Job, largest_differences, run
from tests.harness.parity.layouts import BASE, MODELS, uniform
from tests.harness.parity.live import live
from tests.harness.parity.saved import joined, largest_difference, replica_digests_in

FLOAT64 = BOUNDS["float64"]
EVERY, LAST = 3, 12
PERSISTENT = 10
BESIDE = "--async-save --use-persistent-ckpt-worker"
TYPE = "--non-persistent-ckpt-type global"


def job(folder, more="", **options):
    saves = f"--save {folder} --save-interval {PERSISTENT} --non-persistent-save-interval {EVERY} {TYPE}"
    return Job(model=MODELS[BASE], tp=2, dp=2, enabled=True, more=f"{saves} {more}", **options)


def complete_in(folder):
    """The steps of which there is a complete non-persistent checkpoint."""
    paths = (folder / "non_persistent").glob("iter_*/.metadata")
    return sorted(int(path.parent.name.removeprefix("iter_")) for path in paths)


def latest(folder):
    return int((folder / "latest_checkpointed_iteration.txt").read_text())


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """A persistent checkpoint after every step, of a job that nobody disturbs."""

    @functools.cache
    def saved():
        folder = tmp_path_factory.mktemp("every-step")
        run(Job(model=MODELS[BASE], tp=2, dp=2, more=f"--save {folder} --save-interval 1"))
        return folder

    return saved


def test_a_degraded_job_is_resumed_from_a_newer_non_persistent_checkpoint(tmp_path):
    """The second job begins full-width, without the plugin."""
    lived, _ = live(job(tmp_path, f"--exit-interval {LAST}"), faults=[kill(3, during="backward", step=5)])
    assert (latest(tmp_path), latest(tmp_path / "non_persistent")) == (PERSISTENT, LAST)
    assert complete_in(tmp_path) == [LAST - EVERY, LAST], "the one before stays until there is a newer one"
    stock = Job(model=MODELS[BASE], tp=2, dp=2, more=f"--load {tmp_path} {TYPE}")
    second = run(stock)
    assert all(len(seen.norms) == STEPS - LAST for seen in second.values())
    first = {slot: one.seen for slot, one in lived.items()}
    assert max(largest_differences(joined(first, second), run(uniform(BASE))).values()) <= FLOAT64


BEGUN, VOID, AGAIN = EVERY, 2 * EVERY, 2 * EVERY + 2
"""The step that the second job resumes from; that of a checkpoint which a loss makes void; and of the one after it."""
LOST_IN = VOID - BEGUN + 3
"""The section of the step behind it: before come the save, and a question."""


def interrupted(folder, spoil=""):
    """Resume from a non-persistent checkpoint, and lose a rank while the next one is written: the threads are slow, up
    to the last steps that `--train-iters` allows."""
    run(dataclasses.replace(job(folder, f"--exit-interval {BEGUN}"), enabled=False))
    assert complete_in(folder) == [BEGUN]
    ends = f"--exit-interval {AGAIN} --train-iters {AGAIN + 1} --use-checkpoint-opt_param-scheduler"
    slow = job(folder, f"--load {folder} {BESIDE} {ends}", under="writers_wait", spoil=spoil)
    lived, _ = live(slow, faults=[kill(3, during="backward", step=LOST_IN)])
    assert {len(one.seen.norms) for one in lived.values()} == {AGAIN - BEGUN}
    assert latest(folder / "non_persistent") == AGAIN


def test_one_that_a_loss_makes_void_is_saved_again_and_the_one_before_stays(tmp_path, expected):
    interrupted(tmp_path)
    assert complete_in(tmp_path) == [BEGUN, AGAIN]
    assert not list(tmp_path.glob("iter_*")), "it is not saved as a persistent one"
    found = replica_digests_in(tmp_path / "non_persistent", AGAIN)
    assert largest_difference(found, replica_digests_in(expected(), AGAIN)) <= FLOAT64


def test_megatron_itself_removes_the_newest_for_a_void_one(tmp_path):
    """The control."""
    interrupted(tmp_path, "void_ones_stay")
    assert complete_in(tmp_path) == [AGAIN]
