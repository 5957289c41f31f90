"""AutoTP with ZeRO 1 and 2: a lost slot loses its shard of the optimizer state, which is restored from copies."""

import dataclasses
import math

import pytest

from ntp_plugin.errors import Refused, StateLost
from ntp_plugin.testing.faults import kill
from tests.deepspeed.halves import HALVES
from tests.harness.zero.compare import assert_same_training, of_weights, together, undisturbed_weights, used_once
from tests.harness.zero.job import Job, run, undisturbed

STAGES = [1, 2]


def two(stage, **more):
    """Two replicas of two slots."""
    return Job(ranks=4, tp=2, stage=stage, **more)


@pytest.mark.parametrize("stage", STAGES)
def test_a_job_without_losses_trains_as_the_reference(stage):
    """Bit for bit as without us."""
    job = two(stage)
    outcomes, rows = run(job)
    reference = undisturbed(job)
    for slot, seen in outcomes.items():
        assert (seen.places, seen.kept) == (reference[slot].places, reference[slot].kept)
        assert all(seen.weights[name].tobytes() == value.tobytes() for name, value in reference[slot].weights.items())
        assert (seen.losses, seen.norms) == (reference[slot].losses, reference[slot].norms)
    assert used_once(rows, job)


FAULT_POINTS = [
    *("forward", "within", "backward", "gradient", "accumulated"),
    *("reduce", "vote", "apply", "applied", "gather", "between"),
]
SHORT = {(1, "vote", 1)}


@pytest.mark.parametrize(
    ("stage", "fault_point", "slot"),
    [
        pytest.param(stage, fault_point, slot, marks=[pytest.mark.short] * ((stage, fault_point, slot) in SHORT))
        for stage in STAGES
        for fault_point in FAULT_POINTS
        for slot in ((0, 1, 3) if stage == 1 else (2,))
    ],
)
def test_a_slot_is_killed(stage, fault_point, slot):
    job = two(stage)
    outcomes, rows = run(job, faults=[kill(slot, during=fault_point, step=6)])
    assert sorted(outcomes) == [other for other in range(4) if other != slot]
    assert_same_training(outcomes, rows, job)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("ranks", "tp", "lost"), [(6, 3, [0, 4, 5]), (8, 4, [6]), (8, 4, [1, 4])])
def test_replicas_of_other_widths(stage, ranks, tp, lost):
    job = Job(ranks=ranks, tp=tp, stage=stage)
    faults = [kill(slot, during="vote", step=4 + 3 * place) for place, slot in enumerate(lost)]
    outcomes, rows = run(job, faults=faults)
    assert_same_training(outcomes, rows, job)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("slot", "fault_point"), [(0, "vote"), (1, "within"), (3, "gather"), (2, "applied")])
def test_a_single_replica_continues(stage, slot, fault_point):
    """Everything that the lost slot had is in copies alone."""
    job = Job(ranks=4, tp=4, stage=stage)
    outcomes, rows = run(job, faults=[kill(slot, during=fault_point, step=6)])
    assert sorted(outcomes) == [other for other in range(4) if other != slot]
    assert_same_training(outcomes, rows, job)


@pytest.mark.parametrize("stage", STAGES)
def test_a_single_replica_shrinks_twice_and_grows(stage):
    job = Job(ranks=4, tp=4, stage=stage)
    faults = [kill(2, during="backward", step=4), kill(0, during="applied", step=7)]
    outcomes, rows = run(job, faults=faults, back={2: 12})
    assert {seen.members for seen in outcomes.values()} == {3}
    assert_same_training(outcomes, rows, job)


def test_a_single_replica_without_copies_ends_with_its_first_loss():
    job = Job(ranks=2, tp=2, stage=1, ntp=(("copies", {"mode": "off"}),))
    with pytest.raises(StateLost, match=r"1 of 2 ranks .*ntp\.copies\.mode"):
        run(job, faults=[kill(1, during="vote", step=5)])


@pytest.mark.parametrize(("stage", "slots"), [(1, (2, 3)), (1, (0, 1)), (2, (2, 3))])
def test_all_slots_of_a_replica_are_lost(stage, slots):
    job = two(stage)
    outcomes, rows = run(job, faults=[kill(slot, during="backward", step=6) for slot in slots])
    assert_same_training(outcomes, rows, job)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("last", [2, 3])
def test_ranks_are_lost_one_by_one_until_one_is_left(stage, last):
    """Both holders of the same part may be lost: without ZeRO no rank would have it."""
    job, lost = two(stage), [0, 5 - last, 1]
    fault_points = [("vote", 4), ("within", 9), ("applied", 13)]
    faults = [
        kill(slot, during=fault_point, step=step) for slot, (fault_point, step) in zip(lost, fault_points, strict=True)
    ]
    outcomes, rows = run(job, faults=faults)
    assert sorted(outcomes) == [last]
    assert_same_training(outcomes, rows, job)


@pytest.mark.parametrize(
    ("stage", "slot", "step"), [(1, 0, 1), (1, 0, 7), (2, 3, 1), pytest.param(2, 3, 7, marks=pytest.mark.short)]
)
def test_a_slot_rejoins(stage, slot, step):
    """DeepSpeed's own shards are restored."""
    job = two(stage)
    outcomes, rows = run(job, faults=[kill(slot, during="vote", step=step)], back={slot: 12})
    assert {seen.members for seen in outcomes.values()} == {4}
    whole = undisturbed(job)
    assert {slot: (seen.places, seen.kept) for slot, seen in outcomes.items()} == {
        slot: (seen.places, seen.kept) for slot, seen in whole.items()
    }
    assert_same_training(outcomes, rows, job)


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_rejoins_while_another_is_lost(stage):
    """It joins a degraded layout, and its own replica has full width again."""
    job = two(stage)
    faults = [kill(1, during="vote", step=4), kill(2, during="gradient", step=7)]
    outcomes, rows = run(job, faults=faults, back={1: 12})
    assert {seen.members for seen in outcomes.values()} == {3}
    assert_same_training(outcomes, rows, job)


@pytest.mark.parametrize(
    ("stage", "fault_point"),
    [*((1, fault_point) for fault_point in ("report", "plan", "regroup", "resume", "resumed")), (2, "resume")],
)
def test_a_second_one_in_the_recovery(stage, fault_point):
    job = two(stage)
    outcomes, rows = run(job, faults=[kill(0, during="reduce", step=5), kill(3, during=fault_point, epoch=1)])
    assert sorted(outcomes) == [1, 2]
    assert_same_training(outcomes, rows, job)


@pytest.mark.parametrize(
    ("stage", "fault_point", "number"),
    [(1, "forward", 0), (1, "forward", 1), (1, "backward", 1), (1, "accumulated", 2), (2, "backward", 1)],
)
def test_the_others_learn_of_a_loss_in_their_own_code(stage, fault_point, number):
    job = two(stage, hear_at=(fault_point, 6, number))
    outcomes, rows = run(job, faults=[kill(2, during="between", step=5)])
    assert_same_training(outcomes, rows, job)


@pytest.mark.parametrize("stage", STAGES)
def test_in_the_first_forward_of_all(stage):
    """In which AutoTP has the slots of a replica compare their samples."""
    job = two(stage)
    outcomes, rows = run(job, faults=[kill(2, during="within", step=1)], back={2: 12})
    assert_same_training(outcomes, rows, job)


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_waits_in_a_vote_that_others_left(stage):
    """All repeat the step, or all find it in the copies; also if the next loss comes before that."""
    job = two(stage, slow_to_leave=6)
    faults = [kill(3, during="applied", step=6), kill(2, during="rolled", epoch=1)]
    outcomes, rows = run(job, faults=faults)
    assert sorted(outcomes) == [0, 1]
    assert_same_training(outcomes, rows, job)


@pytest.mark.parametrize("stage", STAGES)
def test_in_float32_with_clipping(stage):
    """Gradients are clipped by DeepSpeed's norm."""
    job = two(stage, dtype="float32")
    outcomes, rows = run(job, faults=[kill(1, during="reduce", step=6)])
    assert_same_training(outcomes, rows, job)


SCALED = (("fp16", {"enabled": True, "initial_scale_power": 10}),)
"""So that DeepSpeed's two widths do not begin with another number of steps that overflow."""


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("stage", STAGES)
def test_in_half_precision(stage, dtype):
    """With masters in float32. No further from AutoTP alone than four times what DeepSpeed without it is."""
    job = two(stage, dtype=dtype, more=SCALED if dtype == "float16" else ())
    alone = dataclasses.replace(job, enabled=False)
    reference = run(alone)[0]
    whole = together(reference, job)
    uncut = run(dataclasses.replace(alone, ranks=2, tp=1, pair=True))[0][0]
    outcomes, rows = run(job, faults=[kill(1, during="reduce", step=6)], back={1: 14})
    for seen in outcomes.values():
        assert (seen.steps, seen.samples, seen.rates) == (reference[0].steps, reference[0].samples, reference[0].rates)
        assert of_weights(seen, whole) <= 4 * of_weights(uncut, whole)
    assert used_once(rows, job)


@pytest.mark.parametrize(("stage", "kind"), [(1, "llama"), (2, "tied llama"), (1, "opt")])
def test_a_model_of_transformers(stage, kind):
    job = two(stage, transformer=kind, dtype="float32")
    outcomes, rows = run(job, faults=[kill(3, during="within", step=6)], back={3: 14})
    assert_same_training(outcomes, rows, job)


@pytest.mark.parametrize("lost", [[1], [0, 3], [0, 1]])
def test_the_state_stays_sharded(lost):
    """Every element is kept by one rank, but for padding."""
    job = two(1)
    outcomes, _ = run(job, faults=[kill(slot, during="vote", step=6) for slot in lost])
    elements = sum(value.size for value in undisturbed_weights(job).values())
    kept = [seen.kept for seen in outcomes.values()]
    assert elements <= sum(kept) <= elements + 40
    assert max(kept) <= 2 * elements / len(kept)


def test_an_evaluation_that_a_loss_has_interrupted_gives_no_numbers():
    job = two(1, evaluates=9)
    outcomes, rows = run(job, faults=[kill(3, during="evaluation", step=9)])
    assert_same_training(outcomes, rows, job)
    losses = {number: [row[2] for row in rows if row[:2] == ["evaluated", number]] for number in range(3)}
    assert any(map(math.isnan, losses[1])), "the slot beside the lost one waits for it"
    assert any(map(math.isnan, losses[2]))


@pytest.mark.parametrize("stage", STAGES)
def test_while_a_rank_is_lost_no_checkpoint_is_written(stage):
    """DeepSpeed would want the shards of all."""
    job = two(stage, saves=12)
    outcomes, rows = run(job, faults=[kill(0, during="vote", step=6)])
    assert_same_training(outcomes, rows, job)
    assert not [row for row in rows if row[0] == "saved"]


@pytest.mark.parametrize("stage", [0, 1])
def test_while_a_rank_is_lost_no_checkpoint_is_loaded(stage):
    job = two(stage, steps=6, calls=("load_checkpoint", "nowhere"))
    with pytest.raises(Refused, match=r"engine\.load_checkpoint\(\) while a rank is lost"):
        run(job, faults=[kill(1, during="vote", step=2)])


def test_without_copies_a_shard_is_lost_with_its_rank():
    job = two(1, ntp=(("copies", {"mode": "off"}),))
    with pytest.raises(StateLost, match=r"3 of 4 ranks .*ntp\.copies\.mode"):
        run(job, faults=[kill(2, during="vote", step=5)])


def test_autocast_is_refused():
    with pytest.raises(Refused, match="ZeRO and torch_autocast"):
        run(two(1, steps=2, epochs=1, more=(("torch_autocast", {"enabled": True, "dtype": "bfloat16"}),)))


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_accumulated_in_more_digits_are_refused(stage):
    job = two(stage, steps=2, epochs=1, dtype="bfloat16", more=(("data_types", {"grad_accum_dtype": "fp32"}),))
    with pytest.raises(Refused, match=r"gradients of torch\.bfloat16 are accumulated in torch\.float32"):
        run(job)


def test_a_part_that_is_not_trained_is_refused():
    with pytest.raises(Refused, match=r"up\.weight is cut by AutoTP and not trained"):
        run(two(1, steps=2, epochs=1, frozen="up.weight"))


def test_replicated_parameters_may_be_frozen():
    job = two(1, frozen="enter.weight")
    outcomes, rows = run(job, faults=[kill(1, during="vote", step=6)], back={1: 12})
    assert_same_training(outcomes, rows, job)
