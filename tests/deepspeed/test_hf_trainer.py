"""Ranks of a real job of Hugging Face's Trainer are killed: the training equals that of an undisturbed run."""

import json
from pathlib import Path

import pytest

from ntp_plugin.errors import Refused
from ntp_plugin.testing.faults import kill
from tests.harness.hf.compare import OF_LOG, assert_same_log, assert_same_training
from tests.harness.hf.job import Job, run, undisturbed
from tests.harness.hf.sft import make_sft

STAGES = [0, 1, 2, 3]
FAULT_POINTS = ["counting", "counted", "forward", "backward", "reduce", "vote", "apply", "applied", "logging"]
LOSSES = [
    (stage, slot, fault_point)
    for stage in STAGES
    for slot in (0, 1, 3)
    for fault_point in (*FAULT_POINTS, *(["gather"] if stage else []))  # without ZeRO nothing is gathered
]
SHORT = [(0, 1, "counting"), (3, 0, "logging")]
EVALUATES = (("eval_strategy", "steps"), ("eval_steps", 3), ("per_device_eval_batch_size", 2))
SAVES = (("save_strategy", "steps"), ("save_steps", 3))


@pytest.mark.short
def test_a_job_without_losses_trains_as_the_reference():
    """Bit for bit as without us, and so does its log."""
    job = Job()
    outcomes, _ = run(job)
    for slot, seen in outcomes.items():
        other = undisturbed(job)[slot]
        assert all(seen.weights[name].tobytes() == value.tobytes() for name, value in other.weights.items())
        assert_same_training({0: outcomes[0]}, job)
        for line, others in zip(seen.log[:-1], other.log[:-1], strict=True):
            assert line == others


@pytest.mark.parametrize(
    ("stage", "slot", "fault_point"),
    [pytest.param(*loss, marks=[pytest.mark.short] * (loss in SHORT)) for loss in LOSSES],
)
def test_a_rank_is_killed(stage, slot, fault_point):
    job = Job(stage=stage)
    outcomes, _ = run(job, faults=[kill(slot, during=fault_point, step=3)])
    assert sorted(outcomes) == [other for other in range(4) if other != slot]
    assert_same_training(outcomes, job)


@pytest.mark.parametrize("fault_point", ["counting", "forward", "gather"])
@pytest.mark.parametrize("step", [5, 6])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_is_killed_where_a_data_epoch_ends(stage, step, fault_point):
    """Step 5 has one micro-batch in place of two, since the data epoch ends there."""
    job = Job(stage=stage)
    outcomes, _ = run(job, faults=[kill(1, during=fault_point, step=step)])
    assert_same_training(outcomes, job)


@pytest.mark.parametrize(
    ("stage", "slot"), [(0, 0), (1, 2), (2, 2), (2, 0), pytest.param(3, 2, marks=pytest.mark.short)]
)
def test_a_rank_rejoins(stage, slot):
    """It comes in in the second data epoch."""
    job = Job(stage=stage)
    outcomes, _ = run(job, faults=[kill(slot, during="vote", step=2)], back={slot: 7})
    assert sorted(outcomes) == [0, 1, 2, 3]
    assert {seen.members for seen in outcomes.values()} == {4}
    assert_same_training(outcomes, job)


@pytest.mark.parametrize("stage", STAGES)
def test_with_the_trainer_s_own_optimizer_and_schedule(stage):
    """With ZeRO-3 the loss costs a step that the Trainer believes taken, and its schedule does not go back."""
    job = Job(stage=stage, own_schedule=True)
    outcomes, _ = run(job, faults=[kill(1, during="applied", step=3)], back={1: 7})
    assert_same_training(outcomes, job)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_with_the_optimizer_that_the_trainer_has_by_default(stage):
    """It rounds an element by its place, but each is stepped at one place at a time."""
    job = Job(stage=stage, own_schedule=True, arguments=(("optim", "adamw_torch_fused"),))
    outcomes, _ = run(job, faults=[kill(1, during="applied", step=3)], back={1: 7})
    assert_same_training(outcomes, job)


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_are_lost_one_by_one_until_one_is_left(stage):
    job = Job(stage=stage)
    faults = [kill(0, during="vote", step=2), kill(3, during="backward", step=4), kill(1, during="applied", step=6)]
    outcomes, _ = run(job, faults=faults)
    assert {slot: seen.members for slot, seen in outcomes.items()} == {2: 1}
    assert_same_training(outcomes, job)


@pytest.mark.parametrize("fault_point", ["report", "plan", "regroup", "resume", "resumed"])
def test_a_second_one_in_the_recovery(fault_point):
    job = Job()
    outcomes, _ = run(job, faults=[kill(0, during="reduce", step=3), kill(2, during=fault_point, epoch=1)])
    assert sorted(outcomes) == [1, 3]
    assert_same_training(outcomes, job)


def test_in_float32_with_clipping():
    job = Job(dtype="float32")
    outcomes, _ = run(job, faults=[kill(1, during="reduce", step=3)])
    assert_same_training(outcomes, job)


@pytest.mark.parametrize("stage", [2, 3])
def test_adapters_over_a_frozen_model(stage):
    pytest.importorskip("peft")
    job = Job(stage=stage, lora=True)
    outcomes, _ = run(job, faults=[kill(1, during="gather", step=3)], back={1: 7})
    assert_same_training(outcomes, job)


@pytest.mark.parametrize(("stage", "slot", "fault_point"), [(2, 1, "forward"), (3, 0, "gather"), (2, 0, "applied")])
def test_the_sft_trainer_of_trl(stage, slot, fault_point):
    """It gathers metrics within each loss, in which others wait for the lost rank, and counts tokens by them."""
    pytest.importorskip("trl")
    job = Job(stage=stage, trainer=make_sft, dtype="float32")
    outcomes, _ = run(job, faults=[kill(slot, during=fault_point, step=3)], back={slot: 7})
    assert sorted(outcomes) == [0, 1, 2, 3], "with ZeRO-3 its output layer is used outside of its own forward"
    assert_same_training(outcomes, job)


def test_activations_that_are_computed_again():
    job = Job(arguments=(("activation_checkpointing", True),))
    outcomes, _ = run(job, faults=[kill(1, during="backward", step=3)])
    assert_same_training(outcomes, job)


def test_a_log_line_over_several_steps_and_tokens_that_were_seen():
    """What a lost rank had not logged yet is in the line."""
    job = Job(arguments=(("logging_steps", 4), ("include_num_input_tokens_seen", "all")))
    outcomes, _ = run(job, faults=[kill(1, during="reduce", step=3)])
    assert_same_training(outcomes, job)


def test_samples_that_are_grouped_by_length():
    """The order is drawn from the global generator, which a joining rank gets from the others."""
    job = Job(stage=1, arguments=(("train_sampling_strategy", "group_by_length"),))
    outcomes, _ = run(job, faults=[kill(0, during="forward", step=2)], back={0: 7})
    assert_same_training(outcomes, job)


def test_losses_that_each_rank_divides_by_its_own_tokens():
    job = Job(arguments=(("average_tokens_across_devices", False),))
    outcomes, _ = run(job, faults=[kill(1, during="reduce", step=3)])
    assert_same_training(outcomes, job)


@pytest.mark.parametrize(
    ("slot", "fault_point"),
    [(0, "evaluating"), (3, "evaluated"), pytest.param(0, "saving", marks=pytest.mark.short), (2, "written")],
)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_is_killed_in_an_evaluation_or_a_checkpoint(tmp_path, stage, slot, fault_point):
    job = Job(stage=stage, evaluates=18, arguments=EVALUATES + SAVES, folder=str(tmp_path))
    outcomes, _ = run(job, faults=[kill(slot, during=fault_point, step=3)])
    assert_same_training(outcomes, Job(stage=stage, evaluates=18, arguments=EVALUATES))
    for step in (3, 6):
        folder = Path(tmp_path) / f"checkpoint-{step}"
        state = json.loads((folder / "trainer_state.json").read_text())
        assert state["global_step"] == step
        assert (folder / "model.safetensors").exists()
        assert len(list((folder / f"global_step{step}").glob("*_optim_states.pt"))) == 3


def test_a_job_that_begins_from_a_checkpoint(tmp_path):
    """In the middle of a data epoch."""
    run(Job(enabled=False, steps=3, arguments=SAVES, folder=str(tmp_path)))
    job = Job(resumes=str(tmp_path / "checkpoint-3"))
    outcomes, _ = run(job, faults=[kill(1, during="forward", step=2)], back={1: 4})
    assert_same_training(outcomes, job)


def test_another_log_is_noticed():
    """A negative control."""
    log = undisturbed(Job())[0].log
    other = [dict(line) for line in log]
    other[2]["loss"] *= 1 + 2 * OF_LOG
    with pytest.raises(AssertionError):
        assert_same_log(other, log)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((("accelerator_config", {"dispatch_batches": True, "split_batches": True}),), "dispatch_batches"),
        ((("accelerator_config", {"use_seedable_sampler": False}),), "use_seedable_sampler"),
        ((("accelerator_config", {"even_batches": False}),), "even_batches"),
        ((("train_sampling_strategy", "batch_rebalance"),), "batch_rebalance"),
        ((("auto_find_batch_size", True),), "auto_find_batch_size"),
        (
            (("auto_find_batch_size", True), ("accelerator_config", {"even_batches": False})),
            "auto_find_batch_size .*; even_batches",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(arguments, says):
    with pytest.raises(Refused, match=says):
        run(Job(ranks=2, steps=2, arguments=arguments))
