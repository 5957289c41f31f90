"""Replicas of a script's own mpu: a replica that loses a slot leaves as a whole, and rejoins as a whole."""

import dataclasses

import pytest

from ntp_plugin.errors import Refused, StateLost
from ntp_plugin.testing.faults import kill
from tests.deepspeed.halves import HALVES
from tests.harness.zero.compare import assert_same_training, of_weights, together, used_once
from tests.harness.zero.fault_points import STEP_FAULT_POINTS
from tests.harness.zero.job import Job, run, undisturbed

TWO = Job(ranks=4, tp=2, mpu=True)
SHARDED = dataclasses.replace(TWO, stage=1)
STAGES = [0, 1, 2, 3]


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.short), 2, 3])
def test_a_job_without_losses_trains_as_the_reference(stage):
    """Bit for bit as without us."""
    job = dataclasses.replace(TWO, stage=stage)
    outcomes, rows = run(job)
    reference = undisturbed(job)
    for slot, seen in outcomes.items():
        assert all(seen.weights[name].tobytes() == value.tobytes() for name, value in reference[slot].weights.items())
        assert (seen.losses, seen.norms) == (reference[slot].losses, reference[slot].norms)
    assert used_once(rows, job)


LOSSES = [
    (stage, slot, fault_point)
    for stage in STAGES
    for slot in (0, 1, 3)
    for fault_point in (*STEP_FAULT_POINTS, *(["gather"] if stage else []))
]
SHORT = [(0, 3, "within"), (2, 1, "gradient")]


@pytest.mark.parametrize(
    ("stage", "slot", "fault_point"),
    [pytest.param(*loss, marks=[pytest.mark.short] * (loss in SHORT)) for loss in LOSSES],
)
def test_a_slot_is_killed(stage, slot, fault_point):
    job, mate = dataclasses.replace(TWO, stage=stage), slot ^ 1
    outcomes, rows = run(job, faults=[kill(slot, during=fault_point, step=6)], leaving=[slot, mate])
    assert sorted(outcomes) == [other for other in range(4) if other not in (slot, mate)]
    assert_same_training(outcomes, rows, job)


@pytest.mark.parametrize(("stage", "slot"), [(0, 0), pytest.param(1, 3, marks=pytest.mark.short), (2, 1)])
def test_a_replica_rejoins(stage, slot):
    """Once there are processes for all of its slots; and holds what the others hold, step by step."""
    job, mate = dataclasses.replace(TWO, stage=stage, ntp=(("watch_steps", 3),)), slot ^ 1
    outcomes, rows = run(job, faults=[kill(slot, during="vote", step=6)], back={slot: 12, mate: 12})
    assert sorted(outcomes) == [0, 1, 2, 3]
    assert {seen.members for seen in outcomes.values()} == {4}
    assert_same_training(outcomes, rows, job)


@pytest.mark.parametrize("stage", STAGES)
def test_both_slots_at_once(stage):
    job = dataclasses.replace(TWO, stage=stage)
    outcomes, rows = run(job, faults=[kill(slot, during="backward", step=6) for slot in (0, 1)], leaving=[0, 1])
    assert_same_training(outcomes, rows, job)


@pytest.mark.parametrize("fault_point", ["report", "regroup", "resume", "resumed"])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_second_one_in_the_recovery(stage, fault_point):
    """Three replicas: the first loss makes an epoch of its own before the others continue without its replica."""
    job = Job(ranks=6, tp=2, mpu=True, stage=stage)
    faults = [kill(0, during="reduce", step=5), kill(5, during=fault_point, epoch=1 if fault_point == "report" else 2)]
    outcomes, rows = run(job, faults=faults, leaving=[0, 1, 4, 5])
    assert sorted(outcomes) == [2, 3]
    assert_same_training(outcomes, rows, job)


def test_of_three_slots():
    job = Job(ranks=6, tp=3, mpu=True, stage=1)
    outcomes, rows = run(job, faults=[kill(1, during="within", step=6)], leaving=[0, 1, 2])
    assert sorted(outcomes) == [3, 4, 5]
    assert_same_training(outcomes, rows, job)


@pytest.mark.parametrize(
    ("fault_point", "number"), [("forward", 0), ("forward", 1), ("backward", 1), ("accumulated", 2)]
)
def test_the_others_learn_of_a_loss_in_their_own_code(fault_point, number):
    job = dataclasses.replace(TWO, hear_at=(fault_point, 6, number))
    outcomes, rows = run(job, faults=[kill(2, during="between", step=5)], leaving=[2, 3])
    assert_same_training(outcomes, rows, job)


def test_one_of_each_replica():
    """No full-width replica is left: the job ends, and says so."""
    with pytest.raises(StateLost, match="no replica has all of its 2 slots"):
        run(TWO, faults=[kill(0, during="vote", step=5), kill(3, during="vote", step=5)], leaving=[0, 3])


def test_in_an_evaluation():
    """The rest of the evaluation gives no value that could be taken for a result."""
    job = dataclasses.replace(TWO, evaluates=6)
    outcomes, rows = run(job, faults=[kill(3, during="evaluation", step=6)], leaving=[2, 3])
    assert_same_training(outcomes, rows, job)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_checkpoint_without_the_first_replica(stage, tmp_path):
    """The others write it, and all load it."""
    job = dataclasses.replace(TWO, stage=stage, saves=9, folder=str(tmp_path))
    outcomes, rows = run(job, faults=[kill(1, during="vote", step=6)], leaving=[0, 1])
    assert_same_training(outcomes, rows, job)
    assert {name for row in rows if row[0] == "saved" for name in row[1]} >= {
        "mp_rank_00_model_states.pt",
        "mp_rank_01_model_states.pt",
    }
    assert {tuple(row[1:]) for row in rows if row[0] == "writes"} == {(2, 1), (3, 1)}, "who, and of how many replicas"
    if not stage:  # ZeRO's shards are loaded by as many ranks
        _, loaded = run(dataclasses.replace(job, loads=True))
        assert sorted(loaded) == [["loaded", slot, 9] for slot in range(4)]


def test_in_float32_with_clipping():
    """Norms are those of a replica."""
    job = dataclasses.replace(SHARDED, dtype="float32")
    outcomes, rows = run(job, faults=[kill(1, during="reduce", step=6)], leaving=[0, 1])
    assert_same_training(outcomes, rows, job)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("stage", STAGES)
def test_in_half_precision(stage, dtype):
    """No further from DeepSpeed alone than four times what one replica with all samples is."""
    scaled = (("fp16", {"enabled": True, "initial_scale_power": 10}),) if dtype == "float16" else ()
    job = dataclasses.replace(TWO, stage=stage, dtype=dtype, more=scaled)
    alone = dataclasses.replace(job, enabled=False)
    reference = run(alone)[0]
    whole = together(reference, job)
    one = run(dataclasses.replace(alone, ranks=2, each=2 * job.each))[0]
    rounding = max(of_weights(seen, whole) for seen in one.values())
    outcomes, rows = run(job, faults=[kill(1, during="reduce", step=6)], back={1: 14, 0: 14})
    assert rounding > 0
    for seen in outcomes.values():
        assert (seen.steps, seen.samples, seen.rates) == (reference[0].steps, reference[0].samples, reference[0].rates)
        assert of_weights(seen, whole) <= 4 * rounding
    assert used_once(rows, job)


@pytest.mark.parametrize("stage", STAGES)
def test_an_mpu_of_data_parallel_ranks(stage):
    job = Job(ranks=4, mpu=True, stage=stage)
    outcomes, rows = run(job, faults=[kill(2, during="reduce", step=6)], back={2: 12})
    assert sorted(outcomes) == [0, 1, 2, 3]
    assert_same_training(outcomes, rows, job)


def test_a_single_replica_is_refused():
    with pytest.raises(Refused, match="all 2 ranks in one replica"):
        run(Job(ranks=2, tp=2, mpu=True, steps=2, epochs=1))
