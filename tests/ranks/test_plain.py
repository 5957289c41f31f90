"""Real ranks are killed; the job continues and computes what it would have computed."""

import functools

import pytest

from ntp_plugin.errors import Excluded
from ntp_plugin.membership.failure_detector import Thresholds
from ntp_plugin.plain.data_parallel import DataParallel
from ntp_plugin.testing.faults import fail, freeze, hang, hold_lock, kill, leave, segfault, slow
from ntp_plugin.testing.ranks import Ranks
from ntp_plugin.testing.reference import assert_every_sample_once, assert_same_training
from tests.patience import HUNG_S
from tests.ranks.plain_job import (
    FAULT_POINTS,
    IN_A_COLLECTIVE,
    IN_A_HELPER,
    IN_A_RECOVERY,
    IN_A_STEP,
    PER_RANK,
    STEPS,
    play,
)


@functools.cache
def reference(ranks):
    """The same job without a fault."""
    with Ranks(ranks, play) as running:
        return running.wait()


def assert_only_the_shares_differ(outcomes, rows, ranks):
    assert_same_training(outcomes, reference(ranks)[0], rtol=1e-12)
    assert_every_sample_once(outcomes.values(), rows, steps=STEPS, batch=PER_RANK * ranks)


@pytest.mark.parametrize("victim", [0, 1, 3])
@pytest.mark.parametrize("fault_point", [*IN_A_STEP, *IN_A_COLLECTIVE])
def test_a_killed_rank_changes_only_the_shares(fault_point, victim):
    with Ranks(4, play, faults=[kill(victim, during=fault_point, step=7)]) as ranks:
        outcomes = ranks.wait()
    assert outcomes.keys() == set(range(4)) - {victim}
    assert {outcome.members for outcome in outcomes.values()} == {tuple(sorted(outcomes))}
    assert_only_the_shares_differ(outcomes, ranks.rows, 4)


@pytest.mark.parametrize("phase", IN_A_RECOVERY)
def test_a_second_death_in_every_phase_of_the_recovery(phase):
    faults = [kill(1, during="reduce", step=7), kill(3, during=phase, epoch=1)]
    with Ranks(4, play, faults=faults) as ranks:
        outcomes = ranks.wait()
    assert outcomes.keys() == {0, 2}
    assert_only_the_shares_differ(outcomes, ranks.rows, 4)


@pytest.mark.parametrize("phase", [phase for phase in IN_A_RECOVERY if phase not in IN_A_HELPER])
def test_a_rank_that_hangs_in_any_phase_of_the_recovery_is_evicted(phase):
    faults = [kill(1, during="reduce", step=7), hang(3, during=phase, epoch=1)]
    with Ranks(4, play, faults=faults, thresholds=Thresholds(hung_s=HUNG_S)) as ranks:
        outcomes = ranks.wait()
    assert outcomes.keys() == {0, 2}, ranks.verdicts
    assert ranks.verdicts[3].kind == "hung"
    assert_only_the_shares_differ(outcomes, ranks.rows, 4)


def test_an_edit_that_hangs_in_one_rank_is_retried_with_that_rank():
    """A helper thread of the rank hangs there; the rank waits for it, as all others wait for theirs."""
    faults = [kill(1, during="reduce", step=7), hang(3, during="address", epoch=1)]
    with Ranks(4, play, faults=faults, thresholds=Thresholds(hung_s=HUNG_S)) as ranks:
        outcomes = ranks.wait()
    assert outcomes.keys() == {0, 2, 3}
    assert_only_the_shares_differ(outcomes, ranks.rows, 4)


@pytest.mark.parametrize(
    ("second", "third"),
    [*zip(IN_A_RECOVERY, IN_A_RECOVERY, strict=True), *zip(IN_A_RECOVERY, IN_A_RECOVERY[::-1], strict=True)],
)
def test_a_third_death_in_every_phase_of_the_second_recovery(second, third):
    """The epoch says which recovery is meant: each death but the first occurs in the recovery from the one before."""
    faults = [kill(1, during="reduce", step=7), kill(3, during=second, epoch=1), kill(0, during=third, epoch=2)]
    with Ranks(4, play, faults=faults, fault_points=FAULT_POINTS) as ranks:
        outcomes = ranks.wait()
    assert {slot: outcome.members for slot, outcome in outcomes.items()} == {2: (2,)}
    assert_only_the_shares_differ(outcomes, ranks.rows, 4)


def test_two_ranks_are_lost_at_once_and_then_one_by_one_until_one_is_left():
    faults = [kill(slot, during="vote", step=step) for slot, step in ((0, 3), (2, 3), (1, 9))]
    with Ranks(4, play, faults=faults) as ranks:
        outcomes = ranks.wait()
    assert outcomes.keys() == {3}
    assert_only_the_shares_differ(outcomes, ranks.rows, 4)


@pytest.mark.parametrize("slot", [0, 2])
def test_a_killed_rank_rejoins_with_the_others_state(slot):
    fault = kill(slot, during="vote", step=5)
    with Ranks(4, functools.partial(play, hold_at=(10,)), faults=[fault]) as ranks:
        ranks.wait_for_death(slot)
        ranks.wait_for_rows(1, 6)  # the others have continued: otherwise it could rejoin before the step of its death
        ranks.start_again(slot)
        outcomes = ranks.wait()
    assert outcomes.keys() == {0, 1, 2, 3}
    assert {outcome.members for outcome in outcomes.values()} == {(0, 1, 2, 3)}
    assert 6 <= min(outcomes[slot].losses) <= 11, (
        "it joined after its death, and before the others went on from the hold"
    )
    assert_only_the_shares_differ(outcomes, ranks.rows, 4)


def test_a_frozen_rank_is_left_behind_and_fenced_when_it_thaws():
    fault = freeze(1, during="reduce", step=7)
    with Ranks(4, play, faults=[fault]) as ranks:
        outcomes = ranks.wait(but=[1])
        assert ranks.verdicts[1].kind == "frozen"
        ranks.thaw(1)
        with pytest.raises(Excluded, match=r"slot 1 \(1/0\) is not in epoch \d: the others went on without it"):
            ranks.wait(but=[0, 2, 3])
    assert_only_the_shares_differ(outcomes, ranks.rows, 4)


@pytest.mark.parametrize("fault_point", ["between", "backward", "after vote"])
def test_a_hung_rank_with_a_heartbeat_is_evicted(fault_point):
    """The others wait in a collective for it; a job with two replicas would wait for ever."""
    fault = hang(1, during=fault_point, step=7)
    with Ranks(2, play, faults=[fault], thresholds=Thresholds(hung_s=HUNG_S)) as ranks:
        outcomes = ranks.wait()
    assert outcomes.keys() == {0}
    assert ranks.verdicts[1].kind == "hung"
    assert_only_the_shares_differ(outcomes, ranks.rows, 2)


def test_the_reference_detects_a_wrong_gradient():
    """A negative control: one rank forgets a sample, and weights no longer agree."""
    with Ranks(4, play_forgetful) as ranks:
        outcomes = ranks.wait()
    with pytest.raises(AssertionError, match="weight 0 of slot 0"):
        assert_same_training(outcomes, reference(4)[0], rtol=1e-12)
    with pytest.raises(AssertionError, match="step 1 of 16 samples used"):
        assert_every_sample_once(outcomes.values(), ranks.rows, steps=STEPS, batch=PER_RANK * 4)


def play_forgetful(rank):
    sound = DataParallel.my_samples

    def forgetful(job):
        return sound(job)[:-1] if rank.slot == 2 else sound(job)

    DataParallel.my_samples = forgetful
    return play(rank)


# ---------------------------------------------------------------- other ways to be lost


def injected(fault, ranks=3, **options):
    """Outcomes, rows and the failure of the slot of a job with one fault."""
    with Ranks(ranks, play, faults=[fault], fault_points=FAULT_POINTS, **options) as running:
        outcomes = running.wait(but=[fault.slot])
    assert_only_the_shares_differ(outcomes, running.rows, ranks)
    return outcomes, running.verdicts.get(fault.slot)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (segfault(1, during="vote", step=7), "its process ended with code -11"),
        (leave(1, 7, during="reduce", step=7), "its process ended with code 7"),
        (leave(1, during="reduce", step=7), "its process ended with code 0 before the job was over"),
        (leave(1, during="between", step=STEPS), "its process ended with code 0 before the job was over"),
    ],
    ids=str,
)
def test_a_rank_that_ends_before_the_job_is_lost_with_any_exit_code(fault, reason):
    outcomes, verdict = injected(fault)
    assert outcomes.keys() == {0, 2}
    assert (verdict.kind, verdict.reason) == ("ended", reason)


def test_a_rank_that_holds_the_python_lock_is_silent():
    outcomes, verdict = injected(hold_lock(1, during="backward", step=7))
    assert outcomes.keys() == {0, 2}
    assert verdict.kind == "silent"


def test_a_slow_rank_is_waited_for():
    """It pauses for ten times as long as a stopped rank may, in every step of the second half."""
    slowly = slow(1, 0.3, during="backward", from_step=STEPS // 2)
    with Ranks(3, play, faults=[slowly], fault_points=FAULT_POINTS, thresholds=Thresholds(hung_s=HUNG_S)) as ranks:
        outcomes = ranks.wait()
    assert outcomes.keys() == {0, 1, 2}
    assert not ranks.verdicts
    assert_only_the_shares_differ(outcomes, ranks.rows, 3)
    taken = [outcomes[0].done_at[step] - outcomes[0].done_at[step - 1] for step in range(STEPS // 2 + 1, STEPS + 1)]
    assert min(taken) >= 0.29, "the others waited for it"


@pytest.mark.parametrize("error", [ValueError("a bad sample"), RuntimeError("out of memory")], ids=repr)
def test_an_error_of_one_rank_ends_only_that_rank(error):
    with Ranks(3, play, faults=[fail(1, error, during="backward", step=7)], fault_points=FAULT_POINTS) as ranks:
        outcomes = ranks.wait(but=[1])
        with pytest.raises(type(error), match=str(error)):
            ranks.wait(but=[0, 2])
    assert outcomes.keys() == {0, 2}
    assert ranks.verdicts[1].reason == "its process ended with code 1"
    assert_only_the_shares_differ(outcomes, ranks.rows, 3)


def test_a_rank_dies_when_the_others_have_finished():
    """The rank that finished first is still there to report."""
    outcomes, _ = injected(kill(1, during="after vote", step=STEPS))
    assert outcomes.keys() == {0, 2}
