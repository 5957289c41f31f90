"""Real ranks are killed; the job goes on and computes what it would have computed."""

import functools
import signal

import pytest
import torch

from ntp_plugin.errors import Excluded
from ntp_plugin.plain.data_parallel import DataParallel
from ntp_plugin.recovery.detector import Thresholds
from ntp_plugin.testing.ranks import Fault, Ranks
from tests.ranks.plain_job import PER_RANK, STEPS, play


@functools.cache
def twin(ranks):
    """The same job without a fault."""
    with Ranks(ranks, play) as running:
        return running.wait(60)


def assert_same_training(outcomes, ranks):
    """Losses and weights agree with the twin up to the changed order of sums, and bit for bit among the survivors."""
    reference, first = twin(ranks)[0], next(iter(outcomes.values()))
    for outcome in outcomes.values():
        for weight, same, expected in zip(outcome.weights, first.weights, reference.weights, strict=True):
            assert torch.equal(weight, same)
            torch.testing.assert_close(weight, expected, rtol=1e-12, atol=1e-12)
        for step, loss in outcome.losses.items():
            assert loss == pytest.approx(reference.losses[step], rel=1e-12)


def assert_every_sample_once(outcomes, rows, ranks):
    """What was reduced in the attempts that were applied is the whole global batch of every step, nothing twice."""
    attempts = {}
    for outcome in outcomes.values():
        for step, epoch in outcome.attempts.items():
            assert attempts.setdefault(step, epoch) == epoch, "all members applied the same attempt"
    for step in range(1, STEPS + 1):
        used = sorted(sample for at, epoch, sample in rows if at == step and epoch == attempts[step])
        assert used == list(range(PER_RANK * ranks))


MOMENTS = ["between", "backward", "reduce", "after reduce", "vote", "after vote", "apply", "after apply"]
PHASES = [
    *("report", "after report", "plan", "after plan", "regroup", "address", "after address", "after regroup"),
    *("stand on", "after stand on"),
]


@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_rank_changes_nothing_but_who_computes(moment, victim):
    with Ranks(4, play, faults=[Fault(slot=victim, moment=moment, step=7)]) as ranks:
        outcomes = ranks.wait(60)
    assert outcomes.keys() == set(range(4)) - {victim}
    assert {outcome.members for outcome in outcomes.values()} == {tuple(sorted(outcomes))}
    assert_same_training(outcomes, 4)
    assert_every_sample_once(outcomes, ranks.rows, 4)


@pytest.mark.parametrize("phase", PHASES)
def test_a_second_death_in_every_phase_of_the_recovery(phase):
    faults = [Fault(slot=1, moment="reduce", step=7), Fault(slot=3, moment=phase, step=1)]
    with Ranks(4, play, faults=faults) as ranks:
        outcomes = ranks.wait(60)
    assert outcomes.keys() == {0, 2}
    assert_same_training(outcomes, 4)
    assert_every_sample_once(outcomes, ranks.rows, 4)


def test_two_at_once_and_then_one_after_the_other_until_one_is_left():
    faults = [Fault(slot=slot, moment="vote", step=step) for slot, step in ((0, 3), (2, 3), (1, 9))]
    with Ranks(4, play, faults=faults) as ranks:
        outcomes = ranks.wait(60)
    assert outcomes.keys() == {3}
    assert_same_training(outcomes, 4)
    assert_every_sample_once(outcomes, ranks.rows, 4)


@pytest.mark.parametrize("slot", [0, 2])
def test_a_killed_rank_comes_back_and_trains_on_with_the_others_state(slot):
    fault = Fault(slot=slot, moment="vote", step=5)
    with Ranks(4, functools.partial(play, hold_at=(10,)), faults=[fault]) as ranks:
        ranks.wait_for_death(slot)
        ranks.start_again(slot)
        outcomes = ranks.wait(60)
    assert outcomes.keys() == {0, 1, 2, 3}
    assert {outcome.members for outcome in outcomes.values()} == {(0, 1, 2, 3)}
    assert 6 <= min(outcomes[slot].losses) <= 11, (
        "it joined after its death, and before the others went on from the hold"
    )
    assert_same_training(outcomes, 4)
    assert_every_sample_once(outcomes, ranks.rows, 4)


def test_a_frozen_rank_is_left_behind_and_fenced_when_it_thaws():
    fault = Fault(slot=1, moment="reduce", step=7, by=signal.SIGSTOP)
    with Ranks(4, play, faults=[fault]) as ranks:
        outcomes = ranks.wait(60, but=[1])
        assert ranks.verdicts[1].kind == "frozen"
        ranks.thaw(1)
        with pytest.raises(Excluded, match=r"slot 1 \(1/0\) is not in epoch 1: the others went on without it"):
            ranks.wait(30, but=[0, 2, 3])
    assert_same_training(outcomes, 4)
    assert_every_sample_once(outcomes, ranks.rows, 4)


@pytest.mark.parametrize("moment", ["between", "backward", "after vote"])
def test_a_hung_rank_with_a_beating_heart_is_left_behind(moment):
    """The others wait in a collective for it; a job with two replicas would wait for ever."""
    fault = Fault(slot=1, moment=moment, step=7, by=None)
    with Ranks(2, play, faults=[fault], thresholds=Thresholds(hung_s=0.5)) as ranks:
        outcomes = ranks.wait(60)
    assert outcomes.keys() == {0}
    assert ranks.verdicts[1].kind == "hung"
    assert_same_training(outcomes, 2)
    assert_every_sample_once(outcomes, ranks.rows, 2)


def test_the_twin_notices_a_wrong_gradient():
    """A negative control: one rank forgets a sample, and weights no longer agree."""
    with Ranks(4, play_forgetful) as ranks:
        outcomes = ranks.wait(60)
    with pytest.raises(AssertionError):
        assert_same_training(outcomes, 4)
    with pytest.raises(AssertionError):
        assert_every_sample_once(outcomes, ranks.rows, 4)


def play_forgetful(rank):
    sound = DataParallel.my_samples

    def forgetful(job):
        return sound(job)[:-1] if rank.slot == 2 else sound(job)

    DataParallel.my_samples = forgetful
    return play(rank)
