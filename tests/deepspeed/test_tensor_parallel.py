"""Slots of a replica that AutoTP has cut are killed: the replica continues narrower."""

import dataclasses
import math

import pytest

from ntp_plugin.errors import Refused
from ntp_plugin.testing.faults import kill
from tests.deepspeed.halves import NEEDS_FLOAT16
from tests.harness.zero.compare import (
    BOUNDS,
    assert_same_training,
    of_weights,
    together,
    undisturbed_weights,
    used_once,
)
from tests.harness.zero.fault_points import STEP_FAULT_POINTS
from tests.harness.zero.job import Job, run, undisturbed

TWO = Job(ranks=4, tp=2)


@pytest.mark.short
def test_a_job_without_losses_trains_as_the_reference():
    """Bit for bit as without us."""
    outcomes, rows = run(TWO)
    reference = undisturbed(TWO)
    for slot, seen in outcomes.items():
        assert seen.places == reference[slot].places
        assert all(seen.weights[name].tobytes() == value.tobytes() for name, value in reference[slot].weights.items())
        assert seen.losses == reference[slot].losses
    assert used_once(rows, TWO)


@pytest.mark.parametrize(
    ("fault_point", "slot"),
    [
        pytest.param(fault_point, slot, marks=[pytest.mark.short] * ((fault_point, slot) == ("within", 1)))
        for fault_point in STEP_FAULT_POINTS
        for slot in (0, 1, 3)
    ],
)
def test_a_slot_is_killed(fault_point, slot):
    outcomes, rows = run(TWO, faults=[kill(slot, during=fault_point, step=6)])
    assert sorted(outcomes) == [other for other in range(4) if other != slot]
    assert_same_training(outcomes, rows, TWO)


@pytest.mark.parametrize(
    ("job", "lost"),
    [
        (Job(ranks=6, tp=3), [0, 4, 5]),
        (Job(ranks=8, tp=4), [6]),
        (Job(ranks=8, tp=4), [1, 4]),
    ],
)
def test_replicas_of_other_widths(job, lost):
    faults = [kill(slot, during="vote", step=4 + 3 * place) for place, slot in enumerate(lost)]
    outcomes, rows = run(job, faults=faults)
    assert_same_training(outcomes, rows, job)


@pytest.mark.parametrize("slots", [(2, 3), (0, 1)])
def test_all_slots_of_a_replica_are_lost(slots):
    outcomes, rows = run(TWO, faults=[kill(slot, during="backward", step=6) for slot in slots])
    assert_same_training(outcomes, rows, TWO)


def test_each_replica_loses_one_and_then_one_its_last():
    faults = [kill(0, during="vote", step=4), kill(3, during="within", step=9), kill(2, during="applied", step=13)]
    outcomes, rows = run(TWO, faults=faults)
    assert sorted(outcomes) == [1]
    assert_same_training(outcomes, rows, TWO)


@pytest.mark.parametrize(("slot", "step"), [(0, 1), (3, 1), (0, 7), pytest.param(3, 7, marks=pytest.mark.short)])
def test_a_slot_rejoins(slot, step):
    outcomes, rows = run(TWO, faults=[kill(slot, during="vote", step=step)], back={slot: 12})
    assert {seen.members for seen in outcomes.values()} == {4}
    assert {slot: seen.places for slot, seen in outcomes.items()} == {
        slot: seen.places for slot, seen in undisturbed(TWO).items()
    }
    assert_same_training(outcomes, rows, TWO)


@pytest.mark.parametrize("fault_point", ["report", "plan", "regroup", "resume", "resumed"])
def test_a_second_one_in_the_recovery(fault_point):
    outcomes, rows = run(TWO, faults=[kill(0, during="reduce", step=5), kill(3, during=fault_point, epoch=1)])
    assert sorted(outcomes) == [1, 2]
    assert_same_training(outcomes, rows, TWO)


@pytest.mark.parametrize(
    ("fault_point", "number"), [("forward", 0), ("forward", 1), ("backward", 1), ("accumulated", 2)]
)
def test_the_others_learn_of_a_loss_in_their_own_code(fault_point, number):
    job = Job(ranks=4, tp=2, hear_at=(fault_point, 6, number))
    outcomes, rows = run(job, faults=[kill(2, during="between", step=5)])
    assert_same_training(outcomes, rows, job)


def test_in_the_first_forward_of_all():
    """In which AutoTP has the slots of a replica compare their samples."""
    outcomes, rows = run(TWO, faults=[kill(2, during="within", step=1)], back={2: 12})
    assert_same_training(outcomes, rows, TWO)


def test_a_rank_waiting_in_a_vote_that_others_left_applies_the_step():
    job = Job(ranks=4, tp=2, slow_to_leave=6)
    faults = [kill(3, during="applied", step=6), kill(2, during="rolled", epoch=1)]
    outcomes, rows = run(job, faults=faults)
    assert sorted(outcomes) == [0, 1]
    assert_same_training(outcomes, rows, job)


@pytest.mark.parametrize("back", [{}, {3: 12}])
def test_all_slots_of_a_replica_draw_the_same_after_a_loss(back):
    """Masks of replicated tensors: slot 1 waits in the vote, and continues in it."""
    job = Job(ranks=4, tp=2, dropout=0.1, slow_to_leave=6)
    _, rows = run(job, faults=[kill(3, during="applied", step=6)], back=back)
    for pair in ((0, 1), (2, 3)) if back else ((0, 1),):
        drawn = [[(step, *draws) for kind, step, of, *draws in rows if kind == "drawn" and of == slot] for slot in pair]
        after = [[one for one in draws if one[1] == max(row[1] for row in draws)] for draws in drawn]
        assert after[0] == after[1] and len(after[0]) > 4


def test_in_float32_with_clipping():
    job = Job(ranks=4, tp=2, dtype="float32")
    outcomes, rows = run(job, faults=[kill(1, during="reduce", step=6)], back={1: 14})
    assert_same_training(outcomes, rows, job)


SCALED = (("fp16", {"enabled": True, "initial_scale_power": 10}),)
"""So that DeepSpeed's two widths do not begin with another number of steps that overflow."""


@pytest.mark.parametrize(
    ("dtype", "lost", "back"),
    [
        ("bfloat16", [1], {1: 14}),
        ("bfloat16", [2], {}),
        pytest.param("float16", [1], {1: 14}, marks=NEEDS_FLOAT16),
        pytest.param("float16", [0, 3], {0: 14}, marks=NEEDS_FLOAT16),
    ],
)
def test_in_half_precision(dtype, lost, back):
    """With masters in float32, which move with the parameters. The norm is that of DeepSpeed, which counts a replica's
    first slot. No further from AutoTP alone than four times what AutoTP with half as many replicas is."""
    job = Job(ranks=4, tp=2, dtype=dtype, more=SCALED if dtype == "float16" else ())
    alone = dataclasses.replace(job, enabled=False)
    reference = run(alone)[0]
    whole = together(reference, job)
    half = dataclasses.replace(alone, ranks=2, each=2 * job.each)
    rounding = max(of_weights(seen, whole) for seen in run(half)[0].values())
    faults = [kill(slot, during="reduce", step=6 + 2 * place) for place, slot in enumerate(lost)]
    outcomes, rows = run(job, faults=faults, back=back)
    for seen in outcomes.values():
        assert (seen.steps, seen.samples, seen.rates) == (reference[0].steps, reference[0].samples, reference[0].rates)
        assert of_weights(seen, whole) <= 4 * rounding
    assert used_once(rows, job)


@pytest.mark.parametrize("kind", ["llama", "tied llama", "mistral", "qwen2", "qwen3", "gpt_neox", "opt"])
def test_a_model_of_transformers(kind):
    """Attention with its heads, an output layer that is gathered; one is cut by its plan, the other by AutoTP's own
    rules, and has a slot's heads written into the layer."""
    job = Job(ranks=4, tp=2, transformer=kind, dtype="float32")
    outcomes, rows = run(job, faults=[kill(3, during="within", step=6)])
    assert_same_training(outcomes, rows, job)


def test_an_evaluation_that_a_loss_has_interrupted_gives_no_numbers():
    """The others cannot know how far each slot is in it. Training continues as usual."""
    job = Job(ranks=4, tp=2, evaluates=9)
    outcomes, rows = run(job, faults=[kill(3, during="evaluation", step=9)])
    assert_same_training(outcomes, rows, job)
    losses = {number: [row[2] for row in rows if row[:2] == ["evaluated", number]] for number in range(3)}
    assert all(math.isfinite(value) for value in losses[0])
    assert any(map(math.isnan, losses[1])), "the slot beside the lost one waits for it"
    assert any(map(math.isnan, losses[2]))


def test_slots_learn_of_a_loss_in_and_after_an_evaluation():
    """One slot is past it, and learns of the loss while it writes a checkpoint: no other evaluation has numbers before
    they train."""
    job = Job(ranks=4, tp=2, evaluates=9, saves=9, hears_in_evaluation=1)
    outcomes, rows = run(job, faults=[kill(3, during="save", step=9)])
    assert_same_training(outcomes, rows, job)
    losses = [row[2] for row in rows if row[0] == "evaluated"]
    assert sum(map(math.isnan, losses)) >= len(losses) // 2


def test_a_joining_process_evaluates_by_itself():
    """Before its first step, as its script does."""
    job = Job(ranks=4, tp=2, evaluates=0)
    outcomes, rows = run(job, faults=[kill(3, during="vote", step=6)], back={3: 12})
    assert_same_training(outcomes, rows, job)
    losses = [row[2] for row in rows if row[0] == "evaluated"]
    assert [math.isnan(value) for value in losses] == [False] * 12 + [True] * 3


def test_losses_and_returns_with_a_cut_vocabulary():
    """A loss at each fault point, a second loss, and a return: the loss function waits for other slots, too."""
    job = Job(ranks=4, tp=2, transformer="tied llama", dtype="float32", hear_at=("forward", 6, 0))
    faults = [kill(2, during="between", step=5), kill(0, during="within", step=9)]
    outcomes, rows = run(job, faults=faults, back={2: 15})
    assert sorted(outcomes) == [1, 2, 3]
    assert_same_training(outcomes, rows, job)


def test_a_full_width_replica_writes_the_checkpoint():
    job = Job(ranks=4, tp=2, saves=9)
    _, rows = run(job, faults=[kill(0, during="vote", step=6)])
    (saved,) = {tuple(names) for kind, names, *_ in rows if kind == "saved"}
    assert sorted(saved) == ["mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"]


@pytest.mark.parametrize(("stage", "back"), [(0, {}), (1, {0: 12}), (2, {0: 12})])
def test_stock_autotp_loads_a_checkpoint_saved_after_a_loss(tmp_path, stage, back):
    """The checkpoint has full-width weights and optimizer state. With ZeRO its files need the shards of all."""
    job = Job(ranks=4, tp=2, stage=stage, saves=20, folder=str(tmp_path))
    run(job, faults=[kill(0, during="vote", step=6)], back=back)
    outcomes, rows = run(dataclasses.replace(job, enabled=False, loads=True))
    for slot, seen in outcomes.items():
        assert (seen.steps, seen.places) == (20, undisturbed(job)[slot].places)
        assert of_weights(seen, undisturbed_weights(job)) <= BOUNDS["float64"]
    assert [row[2] for row in rows if row[0] == "loaded"] == [20] * 4


def test_no_checkpoint_is_written_without_a_full_width_replica():
    job = Job(ranks=4, tp=2, saves=12)
    faults = [kill(0, during="vote", step=6), kill(3, during="vote", step=9)]
    outcomes, rows = run(job, faults=faults)
    assert_same_training(outcomes, rows, job)
    assert not [row for row in rows if row[0] == "saved"]


def test_a_single_replica_is_refused():
    with pytest.raises(Refused, match=r"one replica, of 2 slots"):
        run(Job(ranks=2, tp=2, steps=2, epochs=1))


def test_slots_with_different_initial_state_are_refused():
    """DeepSpeed makes replicas equal, but not the slots of one."""
    with pytest.raises(Refused, match=r"do not begin alike: .*norm\.weight"):
        run(Job(ranks=4, tp=2, steps=2, epochs=1, unlike=True))


@pytest.mark.parametrize(
    ("more", "ntp", "message"),
    [
        ((), (("dropout", "exact"),), r"ntp\.dropout = exact"),
        ((), (("min_tp_width", 2),), r"ntp\.min_tp_width"),
        ((), (("granule", 5),), r"up.* in parts of \[12, 12\]"),
    ],
)
def test_unsupported_settings_are_refused_at_the_start(more, ntp, message):
    with pytest.raises(Refused, match=message):
        run(Job(ranks=4, tp=2, steps=2, epochs=1, more=more, ntp=ntp))
