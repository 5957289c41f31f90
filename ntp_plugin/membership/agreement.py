"""Runs the protocol of `protocol.py` on a live store: one call takes a member from an interrupted epoch to the next.

The loop reads, advances, writes, and sleeps some milliseconds if nothing changed. The failure detector finds members
that die or hang in an agreement, and its failure creates another view. The time limit covers what the detector does not
find: members that are missing when it has passed are evicted by those that wait for them, and the others agree again.
Every eviction leaves fewer members, so this ends.

All members ask one store. So a member does not read a key again that it has read, and polls less often the more members
wait as it does. A member that aggregates values polls often, because the others wait for it.
"""

import collections
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping

from ntp_plugin.errors import Excluded, NoAgreement, PlansDiffer
from ntp_plugin.membership import protocol
from ntp_plugin.membership.gathering import FAN, Gathering, Read, Write
from ntp_plugin.membership.protocol import Decision, Member, MemberId, Phase, Report, Step, View
from ntp_plugin.membership.running_time import RunningTime
from ntp_plugin.membership.store import KeyStore
from ntp_plugin.membership.wait_progress import CollectiveWait

_LOG = logging.getLogger(__name__)

END_POLL_S = 0.02
"""Polling interval at the end: others still train or write their last checkpoint, so nothing is urgent."""
FIRST_POLL_S, LAST_POLL_S = 0.001, 0.01
"""First and longest polling interval; while nothing changes each interval is half as long again as the one before."""
POLL_PER_MEMBER_S = 0.0002
"""Extra interval per member: a poll is two requests, and a store answers tens of thousands per second."""
_SHOW_S = 0.1
"""Longest time between two `poll` calls of a wait, however rarely it reads the store."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Agreed:
    """The agreed facts, equal on all members of the view."""

    view: View
    reports: Mapping[int, Report]
    decision: Decision


def publish_lost(store: KeyStore, since: View, member_ids: Collection[MemberId]) -> View:
    """Create views until none contains these members; return the newest view, which follows `since`."""
    while True:
        view = protocol.newest_view(store.read, since)
        lost = [member_id.slot for member_id in view.member_ids if member_id in member_ids]
        if not lost:
            return view
        following = protocol.without(view, lost)
        store.create(protocol.view_key(following.epoch), following.encode())


class Agreement:
    """The protocol state of this process, from epoch to epoch."""

    def __init__(self, store: KeyStore, member: Member, *, fan: int = FAN) -> None:
        self._store, self._fan = store, fan
        self._known: dict[str, str] = {}
        """Keys read in this epoch."""
        self.member = member

    @classmethod
    def founding(cls, store: KeyStore, view: View, member_id: MemberId, *, fan: int = FAN) -> "Agreement":
        """Create a member of the first view, which runs from the start."""
        return cls(store, Member(member_id=member_id, view=view, phase=Phase.RUNNING), fan=fan)

    @classmethod
    def joining(cls, store: KeyStore, first: View, member_id: MemberId, *, fan: int = FAN) -> "Agreement":
        """Create a joining member, and the view that contains it, after the newest view."""
        while True:
            newest = protocol.newest_view(store.read, first)
            if newest.over:
                raise Excluded(
                    f"slot {member_id.slot} ({member_id.incarnation}) comes too late: the job was over with "
                    f"epoch {newest.epoch}",
                    fix="this process ends; there is nothing left to do",
                )
            wanted = protocol.with_joiners(newest, [member_id])
            if store.create(protocol.view_key(wanted.epoch), wanted.encode()) == wanted.encode():
                return cls(store, Member(member_id=member_id, view=wanted, phase=Phase.REPORTING), fan=fan)

    def newer_view_exists(self) -> bool:
        """Return True if this member must agree again before it trains on."""
        return self._store.present([protocol.view_key(self.member.view.epoch + 1)])

    def propose_without(self, slots: Iterable[int]) -> None:
        """Propose a new epoch without some members; without an empty set, if this member could not begin."""
        following = protocol.without(self.member.view, slots)
        self._store.create(protocol.view_key(following.epoch), following.encode())

    def all_are_done(self, poll: Callable[[], None] = lambda: None) -> bool:
        """Report that this member is done, and wait for the others; False if a newer view must agree first. `poll` is
        called in each iteration of the wait."""
        return self._meet(protocol.finish, protocol.done_of(self.member.view, self._fan), poll)

    def all_have_arrived(self, poll: Callable[[], None] = lambda: None) -> bool:
        """Report that this member has come to the end of its work, and wait for the others, however long their scripts
        take; False if a newer view must agree first. `poll` is called in each iteration of the wait."""
        return self._meet(protocol.arrive, protocol.arrived_of(self.member.view, self._fan), poll)

    def _meet(
        self,
        look: Callable[[Member, Read, int], tuple[bool | None, Write | None]],
        of: Gathering,
        poll: Callable[[], None],
    ) -> bool:
        pause = max(END_POLL_S, self._longest_pause(of))
        while True:
            met, write = look(self.member, self._read, self._fan)
            if met is not None:
                return met
            if write is not None:
                self._store.create(write.key, write.value)
            else:
                poll()
                time.sleep(pause)

    def run(
        self,
        *,
        lost: Callable[[], frozenset[int]],
        report: Callable[[View], Report],
        plan: Callable[[Agreed], str],
        waiting: Callable[[], contextlib.AbstractContextManager[CollectiveWait]],
        timeout_s: float,
    ) -> Agreed:
        """Agree on the newest view.

        Args:
            lost: Returns the slots that are known to be lost.
            report: Returns this member's report; called again for each newer view on the way.
            plan: Returns the digest of this member's plan; called again likewise.
            waiting: Context that is entered while this process only waits for others, so that the failure detector can
                tell it from those that do not come.
            timeout_s: Members that have not come after so long a wait are evicted.

        Raises:
            Excluded: The newest view does not contain this member.
            NoAgreement: The view did not agree in time, and no missing member can be named.
            PlansDiffer: Members made different plans.
        """
        waited = RunningTime()
        agreed, digest, own_report = None, None, Report(applied=0, oldest=0)

        def look() -> Step:
            return protocol.advance(
                self.member, self._read, lost=lost(), report=own_report, digest=digest, fan=self._fan
            )

        while True:
            before = self.member
            if before.phase is Phase.REPORTING:
                self._known.clear()
                agreed, digest, own_report = None, None, report(before.view)
                waited.begin_again()
            elif before.phase is Phase.PLANNING and agreed is None and not self.newer_view_exists():
                agreed = self._gather(before.view)
                digest = plan(agreed)
            self.member, write = look()
            if write is not None:
                self._store.create(write.key, write.value)
            elif self.member == before:
                with waiting() as collective_wait:
                    self._wait_for_news(look, collective_wait, waited, timeout_s)
            if self.member.phase is Phase.EXCLUDED:
                member_id, epoch = self.member.member_id, self.member.view.epoch
                raise Excluded(
                    f"slot {member_id.slot} ({member_id.incarnation}) is not in epoch {epoch}: the others went on "
                    "without it",
                    fix="this process ends; a new one may join in its slot",
                )
            if self.member.phase is Phase.RUNNING and agreed is not None:
                self._compare_plans(agreed.view)
                return agreed

    def _wait_for_news(
        self, look: Callable[[], Step], collective_wait: CollectiveWait, waited: RunningTime, timeout_s: float
    ) -> None:
        awaited = protocol.awaited_of(self.member, self._fan)
        pause, longest = FIRST_POLL_S, LAST_POLL_S if awaited is None else self._longest_pause(awaited)
        while look() == (self.member, None):
            if waited.seconds() > timeout_s:
                self._evict_the_missing(look, timeout_s)
            until = time.monotonic() + pause
            while (left := until - time.monotonic()) > 0:
                collective_wait.poll()
                time.sleep(min(left, _SHOW_S))
                waited.seconds()
            pause = min(1.5 * pause, longest)

    def _longest_pause(self, awaited: Gathering) -> float:
        alike = len(awaited.slots) // (self._fan if awaited.gathers(self.member.member_id.slot) else 1)
        return max(LAST_POLL_S, alike * POLL_PER_MEMBER_S)

    def _read(self, key: str) -> str | None:
        """Read a key once; keys never change."""
        if key not in self._known:
            value = self._store.read(key)
            if value is None:
                return None
            self._known[key] = value
        return self._known[key]

    def _gather(self, view: View) -> Agreed:
        reports = protocol.read_reports(view, self._read, self._fan)
        return Agreed(view=view, reports=reports, decision=protocol.decide(reports))

    def _compare_plans(self, view: View) -> None:
        digests = protocol.entries_of(view, self._fan).values(self._read)
        usual = collections.Counter(digests.values()).most_common(1)[0][0]
        others = [f"slot {slot} {digest}" for slot, digest in digests.items() if digest != usual]
        if others:
            raise PlansDiffer(
                f"the members of epoch {view.epoch} made different plans: {', '.join(others)}; all others {usual}",
                fix="run the same versions and the same configuration everywhere",
            )

    def _evict_the_missing(self, look: Callable[[], Step], timeout_s: float) -> None:
        """Create the next view without the members that delay this agreement; the next poll finds it."""
        awaited = protocol.awaited_of(self.member, self._fan)
        late = awaited.late(self._read) if awaited else ()
        epoch, mine = self.member.view.epoch, self.member.member_id.slot
        if not late or mine in late:
            if look() != (self.member, None):  # the missing value has just arrived
                return
            raise NoAgreement(
                f"epoch {epoch} did not agree within {timeout_s} s, and slot {mine} cannot tell who is missing",
                fix="look at the job's store; restart from the last checkpoint",
            )
        assert awaited is not None, "some member is late"
        _LOG.warning(
            "epoch %d: slots %s evicted: no %s within %g s", epoch, ", ".join(map(str, late)), awaited.kind, timeout_s
        )
        self.propose_without(late)
