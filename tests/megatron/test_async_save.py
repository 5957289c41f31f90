"""Checkpoints that are written while the training goes on (`--async-save`), through losses.

The reference are the checkpoints of a job that waits for them. The threads that write are slow here: until a rank is
lost, two steps are over before a checkpoint is written.
"""

import dataclasses
import functools

import numpy as np
import pytest

from benchmarks.numerics import BOUNDS
from ntp_plugin.testing.faults import kill
from tests.harness.parity.job import STEPS, Job, largest_differences, run
from tests.harness.parity.layouts import BASE, MODELS, uniform
from tests.harness.parity.live import as_if_always_there, live
from tests.harness.parity.saved import largest_difference, replica_digests_in

EVERY = 4
SHARDED = "--use-distributed-optimizer"
SAVE = EVERY + 1
"""The section of the first save, after as many steps."""
ASK, NEXT_STEP = SAVE + 1, SAVE + 2


def job(folder, more=""):
    return Job(
        model=MODELS[BASE],
        tp=2,
        dp=2,
        enabled=True,
        under="writers_wait",
        more=f"--save {folder} --save-interval {EVERY} --async-save --use-persistent-ckpt-worker {more}",
    )


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The checkpoint after a step of a job that waits for each, by the kind of its optimizer."""

    @functools.cache
    def saved(more):
        folder = tmp_path_factory.mktemp("waited")
        options = f"--save {folder} --save-interval 1 {more}"
        live(Job(model=MODELS[BASE], tp=2, dp=2, enabled=True, more=options))
        return folder

    return saved


def finished(folder):
    """The steps after which there is a checkpoint."""
    return sorted(int(path.parent.name.removeprefix("iter_")) for path in folder.glob("iter_*/.metadata"))


def latest(folder):
    return int((folder / "latest_checkpointed_iteration.txt").read_text())


def assert_checkpoints_are(folder, steps, reference, bound=BOUNDS["float64"]):
    assert finished(folder) == list(steps)
    assert latest(folder) == steps[-1]
    for step in steps:
        found = largest_difference(replica_digests_in(folder, step), replica_digests_in(reference, step))
        assert found <= bound, (step, found)


@pytest.mark.parametrize("more", ["", SHARDED], ids=["plain", "sharded"])
def test_a_checkpoint_is_what_training_was_when_it_was_scheduled(tmp_path, expected, more):
    """Bit for bit, although the steps behind it are over before it is written."""
    lived, _ = live(job(tmp_path, more))
    assert_checkpoints_are(tmp_path, range(EVERY, STEPS + 1, EVERY), expected(more), bound=0)
    assert max(largest_differences(as_if_always_there(lived), run(uniform(BASE))).values()) <= BOUNDS["float64"]


@pytest.mark.parametrize(
    ("fault_point", "section", "again"),
    [
        ("save", SAVE, 4),
        ("written", SAVE, 4),
        ("vote", SAVE, 4),
        ("applied", SAVE, 5),
        ("vote", ASK, 5),
        ("applied", ASK, 6),
        ("backward", NEXT_STEP, 6),
        ("applied", NEXT_STEP, 6),
    ],
)
@pytest.mark.parametrize("slot", [0, 3])
def test_a_checkpoint_that_a_loss_makes_void_is_saved_again(tmp_path, expected, slot, fault_point, section, again):  # noqa: PLR0917
    """In the same section while all ranks still schedule it, else at the end of the step that follows."""
    lived, _ = live(job(tmp_path), faults=[kill(slot, during=fault_point, step=section)])
    assert len(lived) == 3
    assert_checkpoints_are(tmp_path, [again, *range(8, STEPS + 1, EVERY)], expected(""))


@pytest.mark.parametrize(
    "more",
    [
        "",
        pytest.param(SHARDED, marks=pytest.mark.short),
        "--ntp-min-tp-width 2",
    ],
    ids=["plain", "sharded", "idle"],
)
def test_a_rank_rejoins_while_a_checkpoint_is_written(tmp_path, expected, more):
    """It is admitted in the step after the one in which it has asked, and the save is void in the next question."""
    lived, _ = live(job(tmp_path, more), faults=[kill(1, during="backward", step=3)], back={1: NEXT_STEP})
    assert len(lived) == 4
    assert_checkpoints_are(tmp_path, [7, *range(8, STEPS + 1, EVERY)], expected(more if more == SHARDED else ""))


@pytest.mark.parametrize("more", ["", SHARDED], ids=["plain", "sharded"])
def test_a_plan_of_writing_that_was_cached_is_dropped_after_a_loss(tmp_path, expected, more):
    """With `--ckpt-assume-constant-structure` Megatron plans a checkpoint once."""
    options = f"--ckpt-assume-constant-structure --ckpt-fully-parallel-save {more}"
    waits = dataclasses.replace(job(tmp_path, options), spoil="")
    lived, _ = live(waits, faults=[kill(3, during="backward", step=12)], back={3: 20})
    assert len(lived) == 4
    assert_checkpoints_are(tmp_path, range(EVERY, STEPS + 1, EVERY), expected(more))


def test_a_loss_after_the_last_step_has_its_checkpoint_saved_again_at_once(tmp_path, expected):
    """Five checkpoints are five sections, and the first four are asked for three times each."""
    sections = STEPS + 5 + 4 * 3
    lived, _ = live(job(tmp_path), faults=[kill(3, during="vote", step=sections + 1)])
    assert len(lived) == 3
    assert_checkpoints_are(tmp_path, range(EVERY, STEPS + 1, EVERY), expected(""))


def test_a_planned_degraded_job_writes_beside_its_training(tmp_path, expected):
    planned = dataclasses.replace(job(tmp_path), lost=("r1.s0.t1",))
    run(planned)
    assert_checkpoints_are(tmp_path, range(EVERY, STEPS + 1, EVERY), expected(""))


def test_without_a_copy_of_its_own_a_writer_would_write_later_values(tmp_path, expected):
    """The control: what is written is taken from the tensors that training changes."""
    live(dataclasses.replace(job(tmp_path), spoil="writers_share"))
    found, wanted = (replica_digests_in(folder, EVERY) for folder in (tmp_path, expected("")))
    assert any(not np.array_equal(found[name], wanted[name]) for name in wanted)
