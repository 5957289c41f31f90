"""Slots of a tensor-parallel job are killed; their replica continues narrower, with the same results."""

import functools

import pytest
import torch

from ntp_plugin.errors import StateLost
from ntp_plugin.planning import spans as sp
from ntp_plugin.reduction import gradient_lanes
from ntp_plugin.resharding import rebuild
from ntp_plugin.testing.faults import kill
from ntp_plugin.testing.ranks import Ranks
from tests.ranks.plain_job import IN_A_RECOVERY, IN_A_STEP
from tests.ranks.tensor_parallel_job import HIDDEN, PER_REPLICA, STEPS, play


@functools.cache
def reference_run(ranks, tp):
    """The same job without a fault."""
    with Ranks(ranks, functools.partial(play, tp=tp)) as running:
        return running.wait()


def assert_same_training(outcomes, ranks=4, tp=2):
    """Losses and state agree with the reference run up to the order of sums; equal units are equal bit for bit."""
    expected = {unit: values for outcome in reference_run(ranks, tp).values() for unit, values in outcome.units.items()}
    reference, seen = reference_run(ranks, tp)[0], {}
    for outcome in outcomes.values():
        for unit, values in outcome.units.items():
            assert torch.equal(values, seen.setdefault(unit, values)), f"{unit} differs between replicas"
            torch.testing.assert_close(values, expected[unit], rtol=1e-12, atol=1e-12)
        for step, loss in outcome.losses.items():
            assert loss == pytest.approx(reference.losses[step], rel=1e-12)
    assert seen.keys() == expected.keys(), "every unit of every tensor and every optimizer entry is held"


def assert_every_sample_once(outcomes, rows, replicas=2):
    """The applied attempts reduced the full global batch of every step, nothing twice."""
    attempts = {}
    for outcome in outcomes.values():
        for step, epoch in outcome.attempts.items():
            assert attempts.setdefault(step, epoch) == epoch, "all members applied the same attempt"
    for step in range(1, STEPS + 1):
        used = sorted(sample for at, epoch, sample in rows if at == step and epoch == attempts[step])
        assert used == list(range(PER_REPLICA * replicas))


def assert_each_replica_is_complete(outcomes, tp=2):
    """The members of every replica hold each hidden unit once, and their tensors have the shapes of what they hold."""
    for replica in {slot // tp for slot in outcomes}:
        holdings = [outcome.holdings["row.weight"] for slot, outcome in outcomes.items() if slot // tp == replica]
        assert sp.union(*holdings) == ((0, HIDDEN),)
    for outcome in outcomes.values():
        width = sp.size(outcome.holdings["row.weight"])
        assert outcome.shapes["column.weight"] == (width, 6)
        assert outcome.shapes["column.bias"] == (width,)
        assert outcome.shapes["row.weight"] == (1, width)


def lose(*faults, ranks=4, tp=2, **options):
    with Ranks(ranks, functools.partial(play, tp=tp, **options), faults=faults) as running:
        outcomes = running.wait()
    assert {outcome.members for outcome in outcomes.values()} == {tuple(sorted(outcomes))}
    assert_same_training(outcomes, ranks, tp)
    assert_every_sample_once(outcomes, running.rows, ranks // tp)
    assert_each_replica_is_complete(outcomes, tp)
    return outcomes


@pytest.mark.parametrize(("fault_point", "victim"), list(zip(IN_A_STEP, [0, 1, 2, 3, 3, 2, 1, 0], strict=True)))
def test_a_lost_slot_changes_only_the_shares(fault_point, victim):
    outcomes = lose(kill(victim, during=fault_point, step=5))
    assert outcomes.keys() == set(range(4)) - {victim}


@pytest.mark.parametrize("phase", [*IN_A_RECOVERY, "make lanes", "first lane"])
def test_a_second_death_in_every_phase_of_the_recovery(phase):
    """Slot 2 of the other replica holds the units that slot 1 had not; the two replicas continue one slot wide."""
    outcomes = lose(kill(1, during="reduce", step=5), kill(2, during=phase, epoch=1))
    assert outcomes.keys() == {0, 3}


@pytest.mark.parametrize(("fault_point", "number"), [("build", 1), ("switch", 3), ("after switch", 3), ("build", 6)])
def test_a_second_death_in_the_middle_of_the_move(fault_point, number):
    """The first tensors are in the new layout then, and the others in the old; number 3 is the first that is cut."""
    outcomes = lose(kill(1, during="reduce", step=5), kill(2, during=fault_point, step=number))
    assert outcomes.keys() == {0, 3}


def test_a_second_loss_in_the_same_replica_drops_it():
    outcomes = lose(kill(1, during="vote", step=3), kill(0, during="reduce", step=7))
    assert outcomes.keys() == {2, 3}


def test_all_slots_of_a_replica_are_lost_at_once():
    outcomes = lose(kill(2, during="reduce", step=4), kill(3, during="reduce", step=4))
    assert outcomes.keys() == {0, 1}


def test_four_wide_two_slots_of_one_replica_and_a_third_of_the_other():
    faults = [kill(slot, during="reduce", step=step) for slot, step in ((1, 3), (2, 3), (7, 8))]
    outcomes = lose(*faults, ranks=8, tp=4)
    assert outcomes.keys() == {0, 3, 4, 5, 6}
    assert outcomes[0].holdings["row.weight"][0] == (0, 3), "a survivor keeps what it had, in front"


@pytest.mark.parametrize("slots", [(1,), (2, 3), (0, 3)])
def test_a_rejoining_slot_gets_exactly_its_own_state(slots):
    """One slot, all slots of a replica, and one of each replica."""
    faults = [kill(slot, during="vote", step=3) for slot in slots]
    with Ranks(4, functools.partial(play, hold_at=(6,)), faults=faults) as ranks:
        for slot in slots:
            ranks.wait_for_death(slot)
        for slot in slots:
            ranks.start_again(slot)
        outcomes = ranks.wait()
    assert outcomes.keys() == {0, 1, 2, 3}
    assert_same_training(outcomes)
    assert_every_sample_once(outcomes, ranks.rows)
    for slot, outcome in outcomes.items():
        assert outcome.holdings == reference_run(4, 2)[slot].holdings
        assert outcome.shapes == reference_run(4, 2)[slot].shapes


def test_a_narrow_replica_is_idle_until_its_slot_rejoins():
    fault = kill(3, during="vote", step=3)
    with Ranks(4, functools.partial(play, hold_at=(8,), min_width=2), faults=[fault]) as ranks:
        ranks.wait_for_death(3)
        ranks.start_again(3)
        outcomes = ranks.wait()
    assert_same_training(outcomes)
    assert_every_sample_once(outcomes, ranks.rows)


def test_the_last_holder_of_a_unit_is_lost():
    """Slots 1 and 3 hold the same units; 3 dies before it has sent those of 1, and no slot has them."""
    faults = [kill(1, during="reduce", step=5), kill(3, during="resume", epoch=1)]
    message = (
        r"state of r0\.s0\.t1 is held by no living slot.*units 6 to \d+ of hidden \(column\.weight.*last checkpoint"
    )
    with pytest.raises(StateLost, match=message), Ranks(4, play, faults=faults) as ranks:
        ranks.wait()


# ---------------------------------------------------------------- negative controls: the suite can fail


def test_the_reference_run_detects_a_lane_with_a_wrong_scale():
    with Ranks(4, play_wrong_scale) as ranks:
        outcomes = ranks.wait()
    with pytest.raises(AssertionError):
        assert_same_training(outcomes)


def play_wrong_scale(rank):
    """Every member halves its lanes' sums: the replicas agree, and are wrong."""
    sound = gradient_lanes.unpack
    gradient_lanes.unpack = lambda slices, gradients, buffer: sound(slices, gradients, buffer / 2)
    return play(rank)


def test_swapped_units_are_found_before_anybody_trains_on_them():
    """Slot 0 puts the units that it is sent into each other's places."""
    message = r"column\.weight \(weight\) is not the same wherever it is held.*after in slots 0 .*after in slots 2, 3"
    faults = [kill(1, during="reduce", step=5)]
    with pytest.raises(StateLost, match=message), Ranks(4, play_swapped, faults=faults) as ranks:
        ranks.wait()


def play_swapped(rank):
    sound = rebuild._put

    def swapped(tensor, part, held, wanted, values):
        sound(tensor, part, held, wanted, values.flip(tensor.dim) if rank.slot == 0 else values)

    rebuild._put = swapped
    return play(rank)
