"""A report arrives just as the time limit of an agreement expires."""

from ntp_plugin.membership import protocol
from ntp_plugin.membership.agreement import Agreement
from ntp_plugin.membership.protocol import Member, MemberId, Phase, Report, View
from ntp_plugin.membership.wait_progress import CollectiveWait
from tests.unit.key_store import Keys

MEMBER_IDS = tuple(MemberId(slot=slot, incarnation=f"first/{slot}") for slot in range(2))
BOTH = View(epoch=1, member_ids=MEMBER_IDS)
REPORT = Report(applied=0, oldest=0)


class LateKeys(Keys):
    """`late`: the report of slot 1 arrives between the last poll and the check for missing reports."""

    late = False


def agree(keys, monkeypatch):
    keys.create(protocol.view_key(1), BOTH.encode())
    member = Member(member_id=MEMBER_IDS[0], view=View(epoch=0, member_ids=MEMBER_IDS), phase=Phase.RUNNING)
    evict = Agreement._evict_the_missing

    def late(agreement, *args):
        if keys.late:
            keys.create("report/1/1", REPORT.encode())
            keys.create("entry/1/1", "the plan")
        return evict(agreement, *args)

    monkeypatch.setattr(Agreement, "_evict_the_missing", late)
    agreement = Agreement(keys, member)
    return agreement.run(
        lost=frozenset, report=lambda _: REPORT, plan=lambda _: "the plan", waiting=CollectiveWait, timeout_s=0.05
    )


def test_a_report_at_the_time_limit_is_read(monkeypatch):
    keys = LateKeys()
    keys.late = True
    assert agree(keys, monkeypatch).view.slots == (0, 1)


def test_a_member_without_a_report_is_evicted(monkeypatch):
    """A negative control."""
    assert agree(LateKeys(), monkeypatch).view.slots == (0,)
