"""Ranks of plain loops with Hugging Face Accelerate are killed: the training equals that of an undisturbed run."""

from pathlib import Path

import pytest

from ntp_plugin.errors import Refused
from ntp_plugin.testing.faults import kill
from tests.harness.accelerate.compare import assert_same_training, of_weights
from tests.harness.accelerate.job import Job, run, undisturbed

STAGES = [0, 2, 3]
FAULT_POINTS = ["drawing", "forward", "backward", "reduce", "vote", "apply", "applied", "stepped"]
LOSSES = [
    (stage, slot, fault_point)
    for stage in STAGES
    for slot in (0, 3)
    for fault_point in (*FAULT_POINTS, *(["gather"] if stage else []))  # without ZeRO nothing is gathered
]
SHORT = [(0, 3, "vote"), (2, 0, "gather")]
IN_THE_LOOP = ["collecting", "collected", "waiting"]


@pytest.mark.short
def test_a_job_without_losses_trains_as_the_reference():
    """Bit for bit as without us, on the same samples."""
    job = Job(gathers=True, evaluates=18)
    outcomes, _ = run(job)
    assert_same_training({0: outcomes[0]}, job)
    for slot, seen in outcomes.items():
        other = undisturbed(job)[slot]
        assert all(seen.weights[name].tobytes() == value.tobytes() for name, value in other.weights.items())
        assert (seen.used, seen.metrics) == (other.used, other.metrics)
        assert not seen.warnings


@pytest.mark.parametrize(
    ("stage", "slot", "fault_point"),
    [pytest.param(*loss, marks=[pytest.mark.short] * (loss in SHORT)) for loss in LOSSES],
)
def test_a_rank_is_killed(stage, slot, fault_point):
    job = Job(stage=stage)
    outcomes, _ = run(job, faults=[kill(slot, during=fault_point, step=3)])
    assert sorted(outcomes) == [other for other in range(4) if other != slot]
    assert_same_training(outcomes, job)


@pytest.mark.parametrize("fault_point", ["drawing", "forward", "vote", "applied"])
@pytest.mark.parametrize("step", [5, 6])
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_is_killed_where_a_data_epoch_ends(stage, step, fault_point):
    """Step 5 has one micro-batch in place of two, since the data epoch ends there. Without ZeRO the others are in the
    evaluation when a rank dies that has applied the step: its samples are missing there."""
    job = Job(stage=stage, evaluates=18)
    outcomes, _ = run(job, faults=[kill(1, during=fault_point, step=step)])
    assert_same_training(outcomes, job, metrics=(stage, step, fault_point) != (0, 5, "applied"))


@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_with_other_numbers_of_micro_batches(stage, each):
    job = Job(stage=stage, each=each, epochs=1)
    outcomes, _ = run(job, faults=[kill(1, during="reduce", step=2)])
    assert_same_training(outcomes, job)


def test_a_loop_without_accumulate():
    job = Job(each=1, epochs=1, accumulates=False)
    outcomes, _ = run(job, faults=[kill(1, during="forward", step=2)])
    assert_same_training(outcomes, job)


@pytest.mark.parametrize("schedule", ["torch", "config", ""])
@pytest.mark.parametrize("back", [5, 7, 8])
@pytest.mark.parametrize(("stage", "slot"), [(2, 2), (3, 0)])
def test_a_joining_rank_counts_a_step_that_is_taken_again_once(stage, slot, back, schedule):
    """The scripts of the others have counted a step that the recovery has undone, and stepped their schedules."""
    job = Job(stage=stage, schedule=schedule)
    outcomes, _ = run(job, faults=[kill(slot, during="vote", step=2)], back={slot: back})
    assert {seen.members for seen in outcomes.values()} == {4}
    assert_same_training(outcomes, job, joined={slot: back})


@pytest.mark.parametrize(("stage", "slot"), [(0, 0), (2, 2), (2, 0), (3, 2)])
def test_a_rank_rejoins(stage, slot):
    """It comes in in the second data epoch; its script has the counters of the others."""
    job = Job(stage=stage, evaluates=18, gathers=True)
    outcomes, _ = run(job, faults=[kill(slot, during="vote", step=2)], back={slot: 7})
    assert sorted(outcomes) == [0, 1, 2, 3]
    assert {seen.members for seen in outcomes.values()} == {4}
    for seen in outcomes.values():
        assert of_weights(seen, undisturbed(job)[0]) <= 1e-12
        assert seen.steps == undisturbed(job)[0].steps


@pytest.mark.parametrize("fault_point", IN_THE_LOOP)
@pytest.mark.parametrize("slot", [0, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_is_killed_in_a_collective_of_the_loop(stage, slot, fault_point):
    job = Job(stage=stage, gathers=True)
    outcomes, _ = run(job, faults=[kill(slot, during=fault_point, step=3)])
    assert_same_training(outcomes, job)
    for seen in outcomes.values():
        assert sum("gathers within a step is of 3 of 4 ranks" in warning for warning in seen.warnings) == 1


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_are_lost_one_by_one_until_one_is_left(stage):
    job = Job(stage=stage, gathers=True)
    faults = [kill(0, during="vote", step=2), kill(3, during="backward", step=4), kill(1, during="applied", step=6)]
    outcomes, _ = run(job, faults=faults)
    assert {slot: seen.members for slot, seen in outcomes.items()} == {2: 1}
    assert_same_training(outcomes, job)


@pytest.mark.parametrize("stage", STAGES)
def test_with_the_schedule_of_the_configuration(stage):
    job = Job(stage=stage, schedule="config", by_environment=True)
    outcomes, _ = run(job, faults=[kill(1, during="applied", step=3)])
    assert_same_training(outcomes, job)


def test_with_workers():
    """Without a loss: a killed rank's workers notice it only after some seconds, and the harness finds them."""
    job = Job(workers=2, epochs=1)
    outcomes, _ = run(job)
    assert_same_training(outcomes, job)


def test_with_a_seedable_sampler():
    job = Job(loading=(("use_seedable_sampler", True),))
    outcomes, _ = run(job, faults=[kill(1, during="reduce", step=3)])
    assert_same_training(outcomes, job)


def test_in_float32_with_clipping():
    job = Job(dtype="float32")
    outcomes, _ = run(job, faults=[kill(1, during="reduce", step=3)])
    assert_same_training(outcomes, job)


@pytest.mark.parametrize(("slot", "fault_point"), [(0, "saving"), (2, "written"), (1, "saved"), (1, "applied")])
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_is_killed_in_a_checkpoint(tmp_path, stage, slot, fault_point):
    job = Job(stage=stage, saves=3, folder=str(tmp_path))
    outcomes, _ = run(job, faults=[kill(slot, during=fault_point, step=3)])
    assert_same_training(outcomes, Job(stage=stage))
    for step in (3, 6, 9):
        folder = Path(tmp_path) / f"step_{step}"
        assert (folder / "scheduler.bin").exists()
        assert (folder / "pytorch_model" / "mp_rank_00_model_states.pt").exists() or stage > 2


def test_other_weights_are_noticed():
    """A negative control."""
    seen = undisturbed(Job())[0]
    other = seen.weights | {name: value * (1 + 1e-11) for name, value in list(seen.weights.items())[:1]}
    with pytest.raises(AssertionError):
        assert_same_training({0: type(seen)(**{**vars(seen), "weights": other})}, Job())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"loading": (("split_batches", True),)}, "split_batches"),
        ({"loading": (("dispatch_batches", True),)}, "dispatch_batches"),
        ({"loading": (("even_batches", False),)}, "even_batches"),
        ({"iterable": True}, "IterableDataset|dispatch_batches"),
        ({"accelerator": (("step_scheduler_with_optimizer", False),)}, "step_scheduler_with_optimizer"),
        (
            {"loading": (("split_batches", True),), "accelerator": (("step_scheduler_with_optimizer", False),)},
            "split_batches cuts .*; step_scheduler_with_optimizer",
        ),
        ({"skips": 1}, "skip_first_batches"),
        ({"accumulates": False}, "accelerator.accumulate"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(changes, says):
    with pytest.raises(Refused, match=says):
        run(Job(ranks=2, epochs=1, **changes))
