"""A checkpoint that cannot be written is reported, and the training goes on as if it had been.

The causes are real: a full disk, a limit on the size of files in one rank, a folder where a file belongs. They are
there for the first checkpoint, and gone before the second.
"""

import dataclasses
import functools

import pytest

from ntp_plugin.errors import NotSaved
from ntp_plugin.telemetry import SaveFailed, read_run
from ntp_plugin.testing.faults import kill
from tests.harness.parity.job import STEPS, Job, largest_differences, run
from tests.harness.parity.layouts import BASE, MODELS, uniform
from tests.harness.parity.live import live
from tests.harness.parity.saved import largest_difference, replica_digests_in
from tests.mounted import disk

EVERY = 4
SAVE = EVERY + 1
"""The section of the first save, after as many steps."""
LIMITED, OBSTACLE = "small_files_at_first", "obstacles_at_first"
BESIDE = "--async-save --use-persistent-ckpt-worker"
TRACKER = "latest_checkpointed_iteration.txt"


def job(folder, under, more=""):
    options = f"--save {folder} --save-interval {EVERY} --ntp-events {folder.parent / 'events.jsonl'} {more}"
    return Job(model=MODELS[BASE], tp=2, dp=2, enabled=True, under=under, more=options)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The checkpoints of a job that could write all of them, and what its ranks saw."""

    @functools.cache
    def saved():
        folder = tmp_path_factory.mktemp("written") / "saved"
        lived, _ = live(job(folder, ""))
        return folder, {slot: one.seen for slot, one in lived.items()}

    return saved


def finished(folder):
    return sorted(int(path.parent.name.removeprefix("iter_")) for path in folder.glob("iter_*/.metadata"))


def failures(folder):
    return [recorded.event for recorded in read_run(folder.parent) if isinstance(recorded.event, SaveFailed)]


def assert_only_the_first_is_missing(folder, reference):
    """Bit for bit, of all later ones."""
    steps = list(range(2 * EVERY, STEPS + 1, EVERY))
    assert finished(folder) == steps
    assert not (folder / f"iter_{EVERY:07d}").exists()
    assert (folder / TRACKER).read_text() == str(STEPS)
    for step in steps:
        assert largest_difference(replica_digests_in(folder, step), replica_digests_in(reference, step)) == 0


def assert_same_training(lived, seen):
    assert max(largest_differences({slot: one.seen for slot, one in lived.items()}, seen).values()) == 0


@pytest.mark.parametrize("more", ["", BESIDE], ids=["waited for", "beside"])
def test_one_rank_cannot_write_its_part(tmp_path, expected, more):
    folder, (reference, seen) = tmp_path / "saved", expected()
    lived, _ = live(job(folder, LIMITED, more))
    (failed,) = failures(folder)
    assert (failed.step, failed.folder, failed.removed) == (EVERY, str(folder), True)
    assert failed.why.startswith("r1.s0.t1: [Errno 27] File too large")
    assert_only_the_first_is_missing(folder, reference)
    assert_same_training(lived, seen)


@pytest.mark.parametrize("more", ["", BESIDE], ids=["waited for", "beside"])
def test_the_disk_is_full(tmp_path, expected, more):
    reference, seen = expected()
    with disk(tmp_path / "saved", "32m") as folder:
        fill(folder)
        lived, _ = live(job(folder, OBSTACLE, more))
        (failed,) = failures(folder)
        assert "[Errno 28] No space left on device" in failed.why
        assert_only_the_first_is_missing(folder, reference)
    assert_same_training(lived, seen)


def fill(folder):
    with pytest.raises(OSError, match="No space"), (folder / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(1 << 20))


@pytest.mark.parametrize("more", ["", BESIDE], ids=["waited for", "beside"])
def test_the_number_of_the_newest_checkpoint_cannot_be_written(tmp_path, expected, more):
    """The last thing of a save: all else was written, and no other checkpoint may be removed for it."""
    folder, (reference, seen) = tmp_path / "saved", expected()
    (folder / f"{TRACKER}.new").mkdir(parents=True)
    lived, _ = live(job(folder, OBSTACLE, more))
    (failed,) = failures(folder)
    assert "r0.s0.t0: [Errno 21] Is a directory" in failed.why
    assert_only_the_first_is_missing(folder, reference)
    assert_same_training(lived, seen)


@pytest.mark.parametrize("more", ["", BESIDE], ids=["waited for", "beside"])
@pytest.mark.parametrize("fault_point", ["save", "vote", "applied"])
def test_a_rank_is_lost_while_a_save_fails(tmp_path, fault_point, more):
    folder = tmp_path / "saved"
    lived, _ = live(job(folder, LIMITED, more), faults=[kill(0, during=fault_point, step=SAVE)])
    assert len(lived) == 3
    assert {failed.step for failed in failures(folder)} <= {EVERY, EVERY + 1}
    assert finished(folder) == list(range(2 * EVERY, STEPS + 1, EVERY))
    assert (folder / TRACKER).read_text() == str(STEPS)
    seen = {slot: one.seen for slot, one in lived.items()}
    assert max(largest_differences(seen, run(uniform(BASE))).values()) <= 1e-12


@pytest.mark.parametrize(
    "more",
    [pytest.param("", marks=pytest.mark.short), BESIDE, "--ckpt-format torch"],
    ids=["waited for", "beside", "torch"],
)
def test_a_job_whose_newest_checkpoint_was_not_written_ends_with_an_error(tmp_path, more):
    """The training itself is over on all ranks then."""
    (tmp_path / "saved").write_text("a file")
    with pytest.raises(NotSaved, match=f"the checkpoint of step {STEPS} could not be saved") as error:
        live(job(tmp_path / "saved", "", more))
    assert error.value.exit_code == 10


def test_without_the_hooks_a_full_disk_ends_the_job(tmp_path):
    """The control."""
    with disk(tmp_path / "saved", "32m") as folder:
        fill(folder)
        with pytest.raises(Exception, match=r"CheckpointException|No space left|Worker failure"):
            live(dataclasses.replace(job(folder, OBSTACLE), spoil="errors_of_saves_are_raised"))
        assert not finished(folder)
