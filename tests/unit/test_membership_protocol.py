"""The agreement protocol, in every interleaving of a few members; and eight ways to get it wrong, each found."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntp_plugin.membership import protocol
from ntp_plugin.membership.gathering import Gathering, Write
from ntp_plugin.membership.protocol import Decision, Member, MemberId, Phase, Report, StateLost, View, decide, the_end
from tests.unit.membership_model import Violation, explore, start

REPORTS = st.builds(
    lambda applied, kept, prepared: Report(applied=applied, oldest=max(0, applied - kept), prepared=prepared),
    st.integers(0, 5),
    st.integers(0, 1),
    st.booleans(),
)


@pytest.mark.parametrize(
    ("slots", "events", "last_step"),
    [
        (2, {"kills": 1, "doubts": 1}, 2),
        (3, {"kills": 2}, 1),
        (3, {"kills": 1}, 2),
        (3, {"kills": 0, "doubts": 1, "kept": 1}, 2),
        (2, {"kills": 1, "joins": 1}, 2),
        (3, {"kills": 1, "fan": 2}, 2),
        (3, {"kills": 2, "fan": 2}, 0),
        (3, {"kills": 0, "doubts": 1, "kept": 1, "fan": 2}, 2),
        (3, {"kills": 1, "joins": 1, "fan": 2}, 0),
        (4, {"kills": 1, "fan": 2}, 1),
    ],
    ids=str,
)
def test_no_interleaving_breaks_the_agreement(slots, events, last_step):
    assert explore(start(slots, **events), last_step=last_step) > 100


def report_like_others_do(sound):
    """Decide early: a member plans before all have reported."""

    def broken(member, read, **facts):
        following, write = sound(member, read, **facts)
        if member.phase is Phase.GATHERING and following == member:
            return dataclasses.replace(member, phase=Phase.PLANNING), None
        return following, write

    return "advance", broken


def ask_for_the_most(_sound):
    """Max for min: all resume from the newest step that any member has applied or holds gradients for."""

    def broken(reports):
        step = max(report.applied + report.prepared for report in reports.values() if not report.joiner)
        return Decision(step=step, vote=step % 2, roll_forward=(), roll_back=())

    return "decide", broken


def forget_the_prepared(sound):
    """One version only: reduced gradients are thrown away when a member leaves, so it cannot roll forward."""

    def broken(reports):
        return sound({slot: dataclasses.replace(report, prepared=False) for slot, report in reports.items()})

    return "decide", broken


def run_in_a_stale_view(sound):
    """Stale epoch accepted: a member that has gathered all reports no longer looks for a newer view."""

    def broken(member, read, **facts):
        if member.phase in (Phase.PLANNING, Phase.ENTERING):

            def old(key):
                return None if key.startswith("view/") else read(key)

            following, write = sound(member, old, **facts)
            return following, write
        return sound(member, read, **facts)

    return "advance", broken


def believe_the_joiner(sound):
    """Unhealed donor: a joining rank's empty state counts like a veteran's."""

    def broken(reports):
        return sound({slot: dataclasses.replace(report, joiner=False) for slot, report in reports.items()})

    return "decide", broken


def leave_alone(sound):
    """A member that has nothing left to do ends the job, whether the others are done or not."""

    def broken(member, read, fan):
        over, write = sound(member, read, fan)
        if over is None and write is None:
            return None, Write(key=protocol.view_key(member.view.epoch + 1), value=the_end(member.view).encode())
        return over, write

    return "finish", broken


def put_together_what_is_there(_sound):
    """A combining member does not wait for the values that it combines."""

    def broken(gathering, slot, read):
        own = read(gathering.own_key(slot))
        first = gathering.slots.index(slot) % gathering.fan == 0 and len(gathering.slots) > gathering.fan
        node = f"{gathering.kind}/{gathering.epoch}/1.{gathering.slots.index(slot) // gathering.fan}"
        return Write(key=node, value=json.dumps({slot: own})) if first and own and read(node) is None else None

    return "due", broken


def deadlocked_gathering(_sound):
    """A combining member waits for the others, and they for it."""
    return "due", lambda *_: None


FIND = [
    (report_like_others_do, {"kills": 1}),
    (ask_for_the_most, {"kills": 1}),
    (forget_the_prepared, {"kills": 1}),
    (run_in_a_stale_view, {"kills": 2}),
    (believe_the_joiner, {"kills": 1, "joins": 1}),
    (leave_alone, {"kills": 0}),
    (put_together_what_is_there, {"kills": 1, "fan": 2}),
    (deadlocked_gathering, {"kills": 0, "doubts": 1, "fan": 2}),
]


@pytest.mark.parametrize(("planted", "events"), FIND, ids=[planted.__name__ for planted, _ in FIND])
def test_a_planted_protocol_bug_is_found(monkeypatch, planted, events):
    name = planted(None)[0]
    home = protocol if hasattr(protocol, name) else Gathering
    monkeypatch.setattr(home, name, planted(getattr(home, name))[1])
    with pytest.raises(Violation):
        explore(start(3, **events), last_step=2)


@given(st.dictionaries(st.integers(0, 5), REPORTS, min_size=1))
def test_the_decision_is_the_newest_step_that_all_can_resume_from(reports):
    known = {report.applied for report in reports.values()}

    def can_resume(report, step):
        return report.oldest <= step <= report.applied or (
            report.prepared and step == report.applied + 1 and step in known
        )

    possible = [step for step in range(8) if all(can_resume(report, step) for report in reports.values())]
    if not possible:
        with pytest.raises(StateLost, match="no step in common: slot"):
            decide(reports)
        return
    decision = decide(reports)
    assert decision.step == max(possible)
    assert decision.roll_forward == tuple(sorted(s for s, r in reports.items() if r.applied < decision.step))
    assert decision.roll_back == tuple(sorted(s for s, r in reports.items() if r.applied > decision.step))


def test_an_applied_step_carries_the_prepared_members_and_the_vote():
    reports = {0: Report(applied=7, oldest=7, vote=1), 1: Report(applied=6, oldest=6, prepared=True)}
    assert decide(reports) == Decision(step=7, vote=1, roll_forward=(1,), roll_back=())


def test_unapplied_gradients_are_reduced_again():
    reports = {slot: Report(applied=6, oldest=6, prepared=True) for slot in range(3)}
    assert decide(reports) == Decision(step=6, vote=0, roll_forward=(), roll_back=())


def test_joining_ranks_alone_hold_nothing():
    with pytest.raises(StateLost, match="all 2 members are joining ranks"):
        decide({slot: Report(applied=0, oldest=0, joiner=True) for slot in range(2)})


def test_a_process_whose_slot_has_a_new_incarnation_is_fenced():
    """The old process of slot 1 is thawed after a new one took the slot: the slot is a member, the process is not."""
    first = View(epoch=0, member_ids=(MemberId(slot=0, incarnation="a"), MemberId(slot=1, incarnation="b")))
    shrunk = protocol.without(first, [1])
    grown = protocol.with_joiners(shrunk, [MemberId(slot=1, incarnation="c")])
    store = {protocol.view_key(view.epoch): view.encode() for view in (shrunk, grown)}
    thawed = Member(member_id=MemberId(slot=1, incarnation="b"), view=first, phase=Phase.RUNNING)
    member, write = protocol.advance(thawed, store.get, report=Report(applied=0, oldest=0), digest=None)
    assert (member.phase, write) == (Phase.EXCLUDED, None)


@given(REPORTS, st.integers(0, 9))
def test_store_entries_round_trip(report, epoch):
    assert Report.decode(report.encode()) == report
    view = View(
        epoch=epoch, member_ids=(MemberId(slot=0, incarnation="h/1"), MemberId(slot=3, incarnation="h/2")), joiners=(3,)
    )
    assert View.decode(view.encode()) == view
