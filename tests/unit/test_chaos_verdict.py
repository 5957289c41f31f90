"""The verdict on two runs: it must be able to fail."""

import dataclasses

import pytest

from ntp_plugin.chaos.charts import presence, spent
from ntp_plugin.chaos.faults import OrderedFault, RequestedFaults, Unordered
from ntp_plugin.chaos.history import History
from ntp_plugin.chaos.verdict import End, Expected, judge
from ntp_plugin.telemetry import Began, Committed, Ended, FaultInjected, RankLost, RecordedEvent, Restored, Weighed
from tests.unit.chaos_runs import PHASES, STEPS, VICTIM, history, run_events, weighed, weighed_with_experts

FAULT = OrderedFault(name="1", what="kill", slot=VICTIM, during="backward", step=3)
FINE = Expected(bound=1e-12)


def verdict(run, *, reference=None, faults=(FAULT,), end=None, expected=FINE, **asked):
    return judge(
        RequestedFaults(faults=tuple(faults), **asked),
        run,
        history() if reference is None else reference,
        end or End(code=0),
        expected,
    )


def broken_checks(found):
    return [check.what for check in found.checks if not check.holds]


def test_a_run_equal_to_its_reference_passes():
    found = verdict(history(killed_in=3, back_in=5), expected=dataclasses.replace(FINE, returns=1))
    assert found.holds, found
    (outcome,) = found.outcomes
    assert outcome.detected_s == pytest.approx(0.1)
    assert outcome.recovered_s == pytest.approx(0.9)
    assert found.efficiency == pytest.approx(6 / 8)
    assert spent(outcome) == pytest.approx({"detect": 0.1, **PHASES, "first step": 0.4})


@pytest.mark.parametrize(
    ("hangs", "problem"), [((), ""), (("r1.s0.t0",), "the others did not go on"), (("r0.s0.t0",), "")]
)
def test_a_fault_in_the_last_step_is_survived_when_the_others_end(hangs, problem):
    injected_fault = FaultInjected(fault="2", what="clock", whom="r0.s0.t0", fault_point="regroup", step=0)
    events = [one for one in run_events(killed_in=STEPS) if not (isinstance(one.event, Ended) and one.slot in hangs)]
    run = History.of([*events, RecordedEvent(at=STEPS - 0.5, slot="r0.s0.t0", event=injected_fault)])
    fault = OrderedFault(name="2", what="clock", slot="r0.s0.t0", during="regroup", epoch=1)
    (outcome,) = verdict(run, faults=(fault,)).outcomes
    assert outcome.problem == problem


@pytest.mark.parametrize(
    ("run", "what"),
    [
        ({"loss": 5.0 + 1e-9}, "losses agree"),
        ({"loss": float("nan")}, "losses agree"),
        ({"samples": lambda _, own: own[:-1]}, "samples are the reference run's"),
        ({"samples": lambda _, own: [*own, own[0]]}, "samples are the reference run's"),
        ({"samples": lambda _, own: [*own[:-1], 999]}, "samples are the reference run's"),
        ({"steps": STEPS - 1}, "every step"),
    ],
)
def test_a_run_that_differs_from_its_reference_is_reported(run, what):
    found = verdict(history(killed_in=3, **run))
    assert not found.holds
    assert [check for check in broken_checks(found) if what in check], found.checks


@pytest.mark.parametrize(
    ("samples", "counts", "message"),
    [
        (lambda _, own: own, (24, 0, 0, 0), "24 in 6 steps"),
        (lambda step, own: own[step % 2 :], (21, 0, 3, 0), "3 missing, 0 other ones, in steps [1, 3, 5]"),
        (lambda _, own: [*own[:-1], own[0], own[0]], (30, 12, 6, 0), "12 twice, 6 missing"),
        (lambda step, own: [*own, 900 + step], (30, 0, 0, 6), "6 other ones, in steps [1, 2, 3, 4, 5] and others"),
    ],
)
def test_samples_that_are_not_right_are_counted(samples, counts, message):
    found = verdict(history(samples=samples), faults=())
    assert dataclasses.astuple(found.samples)[:4] == counts
    (check,) = [check for check in found.checks if "samples" in check.what]
    assert message in check.found
    assert check.holds == (counts[1:] == (0, 0, 0))


def altered(what, slot, by, weighed=weighed):
    """All as it should be but for one number."""

    def weights(slots, own):
        right = weighed(slots, own)
        numbers = list(getattr(right, what))
        numbers[1] += by * (own == slot)
        return dataclasses.replace(right, **{what: numbers})

    return weights


@pytest.mark.parametrize(("killed_in", "back_in", "replica_digests"), [(None, None, 6), (3, None, 5), (3, 5, 6)])
def test_weights_are_compared_however_they_are_cut(killed_in, back_in, replica_digests):
    found = verdict(history(killed_in=killed_in, back_in=back_in), faults=() if killed_in is None else (FAULT,))
    (check,) = [check for check in found.checks if "weights" in check.what]
    assert check.holds
    assert f"of {replica_digests};" in check.found, (
        "the cut state of each replica, and the replicated state of each slot"
    )


@pytest.mark.parametrize("what", ["cut", "alike"])
@pytest.mark.parametrize("slot", ["r0.s0.t0", "r1.s0.t1"])
def test_weights_that_differ_from_the_reference_are_reported(what, slot):
    fine = verdict(history(killed_in=3, weights=altered(what, slot, 1e-12)))
    assert fine.holds, fine.checks
    found = verdict(history(killed_in=3, weights=altered(what, slot, 1e-9)))
    assert broken_checks(found) == ["weights agree with the reference run's"]
    assert f"replica {slot[1]}" in found.checks[-1].found


@pytest.mark.parametrize(("by", "holds"), [(0.0, True), (1e-9, False)])
def test_the_experts_of_a_group_are_compared_however_they_are_dealt(by, holds):
    lost = history(killed_in=3, weights=altered("shared", "r1.s0.t1", by, weighed_with_experts))
    found = verdict(lost, reference=history(weights=weighed_with_experts))
    (check,) = [check for check in found.checks if "weights" in check.what]
    assert check.holds is holds
    assert "of 6;" in check.found, "five replica digests, and the expert group"
    assert ("expert group 0" in check.found) is not holds


def test_a_bound_for_the_weights_keeps_that_of_the_losses():
    drifted, wider = altered("cut", "r0.s0.t0", 1e-9), dataclasses.replace(FINE, weights_bound=1e-8)
    assert verdict(history(killed_in=3, weights=drifted), expected=wider).holds
    off = verdict(history(killed_in=3, loss=5.0 + 1e-9, weights=drifted), expected=wider)
    assert broken_checks(off) == ["losses agree with the reference run's"]


def test_a_replica_with_a_silent_slot_is_not_compared():
    def silent(*silent_slots):
        return history(killed_in=3, weights=lambda slots, own: None if own in silent_slots else weighed(slots, own))

    assert verdict(silent("r1.s0.t0")).holds, "the other replica has reported"
    nobody = verdict(silent("r0.s0.t0", "r1.s0.t0"))
    assert broken_checks(nobody) == ["weights agree with the reference run's"]
    assert "none recorded all" in nobody.checks[-1].found


def test_a_reference_that_was_never_weighed_is_compared_by_its_losses():
    found = verdict(history(killed_in=3), reference=history(weights=None))
    assert found.holds
    assert not [check for check in found.checks if "weights" in check.what]


def test_unreported_samples_of_a_dead_rank_are_not_missed_and_others_are():
    """The victim draws half of the samples of its replica, and dies after the step and before its report."""

    def halved(run):
        for one in run:
            if isinstance(one.event, Committed) and one.event.step == 2 and one.slot == VICTIM:
                continue
            yield one

    def own(step, samples):
        return samples[:2] if step == 2 else samples

    run = History.of(halved(run_events(killed_in=3, samples=own)))
    assert verdict(run).holds
    more = History.of(
        halved(run_events(killed_in=3, samples=lambda step, drawn: own(step, drawn)[: 1 if step == 2 else None]))
    )
    assert not verdict(more).holds, "three are missing, and the share of its replica were two"
    complete = history(killed_in=3, samples=own)
    assert broken_checks(verdict(complete)) == ["the samples are the reference run's, each once"]


def test_samples_of_an_attempt_that_was_repeated_do_not_count():
    run = history(killed_in=3, again=(2,))
    assert run.taken_again == {2}
    assert verdict(run).holds
    assert verdict(run).efficiency == pytest.approx(6 / 8)


def test_a_fault_never_injected_is_reported():
    found = verdict(history(), faults=[FAULT])
    assert "never injected" in found.outcomes[0].problem
    assert not found.holds


@pytest.mark.parametrize(("may_miss", "problem"), [(False, "never injected: the job was over"), (True, "")])
def test_a_pending_fault_is_reported_and_fails_unless_it_may_miss(may_miss, problem):
    left = Unordered(
        fault=OrderedFault(name="2", what="sigkill", slot="any", may_miss=may_miss), why="the job was over"
    )
    found = verdict(history(killed_in=3), unordered=(left,))
    assert [(outcome.name, outcome.injected_at, outcome.problem) for outcome in found.outcomes[1:]] == [
        ("2", 0, problem)
    ]
    assert found.holds == may_miss


@pytest.mark.parametrize(
    ("drawn", "found", "holds"),
    [
        (("1", "2"), "2 of 12 were drawn, and 1 of these were injected", True),
        (("2",), "1 of 12 were drawn, and 0 of these were injected", False),
        ((), "0 of 12 were drawn, and 0 of these were injected", False),
    ],
)
def test_fewer_may_be_drawn_than_were_to_be_and_not_none(drawn, found, holds):
    judged = verdict(history(killed_in=3), drawn=drawn, to_be_drawn=12)
    (check,) = [check for check in judged.checks if check.what == "faults were drawn"]
    assert (check.found, check.holds, judged.holds) == (found, holds, holds)


def test_a_signal_to_an_empty_slot_is_reported():
    found = verdict(history(killed_in=3), faults=[OrderedFault(name="2", what="sigkill", slot=VICTIM)])
    assert found.outcomes[0].problem == "never injected: the slot had no process then"


def test_ranks_of_a_lost_host_are_known_by_number():
    """Another host's supervisor notices, and knows no process of it."""
    run = [one for one in run_events(killed_in=3) if not isinstance(one.event, RankLost)]
    began = next(one.event for one in run if isinstance(one.event, Began) and one.slot == VICTIM)
    injected = next(one.at for one in run if isinstance(one.event, FaultInjected))
    for number, seconds in ((began.number, 0.25), (began.number + 1, None)):
        lost = RecordedEvent(
            at=injected + 0.25, slot="host0", event=RankLost(number=number, pid=0, kind="host", reason="no beat")
        )
        (outcome,) = verdict(History.of([*run, lost])).outcomes
        assert outcome.detected_s == (None if seconds is None else pytest.approx(seconds))


def test_a_fault_for_an_unknown_slot_is_reported():
    found = verdict(history(), faults=[dataclasses.replace(FAULT, slot="r7.s0.t0")])
    assert "no such slot, but r0.s0.t0, r0.s0.t1" in found.outcomes[0].problem


@pytest.mark.parametrize(("killed_in", "holds"), [(None, True), (3, False)])
def test_a_slow_rank_must_not_be_reported_lost(killed_in, holds):
    injected = FaultInjected(fault="1", what="slow", whom=VICTIM, fault_point="forward", step=2)
    run = [one for one in run_events(killed_in=killed_in) if not isinstance(one.event, FaultInjected)]
    slow = History.of([*run, RecordedEvent(at=1.1, slot=VICTIM, event=injected)])
    found = verdict(slow, faults=[dataclasses.replace(FAULT, what="slow", during="forward", step=2)])
    assert found.holds == holds
    assert broken_checks(found) == ([] if holds else ["no rank was lost"])


def test_a_drawn_fault_may_miss():
    assert verdict(history(), faults=[dataclasses.replace(FAULT, may_miss=True)]).holds


def test_a_run_that_hangs_after_a_fault_is_reported():
    hung = [one for one in run_events(killed_in=3) if one.at < 2.5]
    found = verdict(History.of(hung), end=End(code=-15, hung=True))
    assert found.outcomes[0].problem == "the others did not go on"
    assert "the job ended with code 0" in broken_checks(found)


@pytest.mark.parametrize(("code", "holds"), [(7, True), (0, False), (1, False)])
def test_a_job_that_is_to_stop_must_stop_as_expected(code, holds):
    run = history(killed_in=3, steps=3)
    found = verdict(run, end=End(code=code), expected=dataclasses.replace(FINE, code=7))
    assert found.holds == holds


def test_workers_that_outlive_their_job_are_reported():
    assert broken_checks(verdict(history(killed_in=3), end=End(code=0, left=(17,)))) == ["no worker was left behind"]


def test_a_missing_return_is_reported():
    found = verdict(history(killed_in=3), expected=dataclasses.replace(FINE, returns=1))
    assert broken_checks(found) == ["1 lost slots rejoined"]


def test_a_run_without_samples_or_steps_fails():
    found = judge(RequestedFaults(), History(), None, End(code=0), FINE)
    assert not found.holds


def test_the_history_knows_the_members_at_each_time():
    run = history(killed_in=3, back_in=5)
    assert presence(run, "r0.s0.t0", 6.0)[-1][1] == 6.0
    assert presence(run, VICTIM, 6.0) == [(0.0, pytest.approx(2.6)), (pytest.approx(4.5), 6.0)]


def restored(at, again):
    event = Restored(step=1, again=again, own=0, here=0, elsewhere=0, rebuilt=[])
    return RecordedEvent(at=at, slot="r0.s0.t0", event=event)


@pytest.mark.parametrize(("before", "behind"), [((), ()), ((2,), ()), ((), (7,)), ((2,), (7,))])
def test_steps_again_are_those_of_its_own_recovery(before, behind):
    """Steps before the fault, and steps that a later fault cost, do not count."""
    others = [*(restored(2.0, again) for again in before), *(restored(4.5, again) for again in behind)]
    run = [*run_events(killed_in=3, back_in=5), restored(2.5, 1), *others]
    assert verdict(History.of(run)).outcomes[0].steps_again == 1


def test_a_loss_without_recovery_repeats_no_steps():
    hung = [one for one in run_events(killed_in=3) if one.at < 2.5]
    assert verdict(History.of([*hung, restored(2.4, 1)]), end=End(code=1)).outcomes[0].steps_again == 0


def test_weights_that_nobody_has_recorded_do_not_agree():
    def empty(slots, own):
        return Weighed(cut=[], cut_values=0, alike=[], alike_values=0)

    found = verdict(history(killed_in=3, weights=empty), reference=history(weights=empty))
    assert broken_checks(found) == ["weights agree with the reference run's"]
    assert found.checks[-1].found == "none were recorded"


@pytest.mark.parametrize(
    ("number", "pid", "reason", "found"),
    [
        (1, 101, "its process ended with code -9", "nobody"),
        (1, 107, "its process ended with code -6", VICTIM),
        (2, 102, "its process ended with code -6", "r1.s0.t0"),
        (2, 102, "its process ended with code 5", "nobody"),
    ],
)
def test_a_rank_that_is_lost_without_a_fault_is_a_defect(number, pid, reason, found):
    """The victim's own loss, another process in its slot, another slot, and one that leaves with its replica."""
    loss = RankLost(number=number, pid=pid, kind="ended", reason=reason)
    events = [*run_events(killed_in=3, back_in=5), RecordedEvent(at=5.5, slot="host0", event=loss)]
    judged = verdict(History.of(events), expected=dataclasses.replace(FINE, returns=1))
    (check,) = [check for check in judged.checks if check.what == "nobody was lost but by a fault"]
    assert check.found == found
    assert judged.holds is (found == "nobody")
