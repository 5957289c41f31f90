"""The protocol of `protocol.py` on a live store: one call takes a member from a broken epoch to the next.

The loop looks, advances, writes, and sleeps some milliseconds where nothing changed. Who dies or hangs in an agreement
is found by the detector, whose verdict makes another view. The time limit is for whatever the detector does not find:
members that are missing when it has passed are evicted by those that wait for them, and the others agree again. Every
eviction leaves fewer members, so this ends.

All members ask one store, so what a member has read it does not read again, and who only waits looks the more rarely
the more they are. Who puts values together looks often: the others wait for these.
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
"""While others still train or write their last checkpoint nothing is in a hurry."""
FIRST_POLL_S, LAST_POLL_S = 0.001, 0.01
"""Each look comes half as long again after the one before, as long as nothing changes."""
POLL_PER_MEMBER_S = 0.0002
"""A look is two questions, and a store answers tens of thousands in a second."""
_SHOW_S = 0.1
"""Who waits shows so often that it polls, however rarely it looks."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Agreed:
    """What all members of the view know alike."""

    view: View
    reports: Mapping[int, Report]
    decision: Decision


def publish_lost(store: KeyStore, since: View, member_ids: Collection[MemberId]) -> View:
    """Make sure that none of the seats is in the newest view, which follows `since`; returns it."""
    while True:
        view = protocol.newest_view(store.read, since)
        lost = [member_id.slot for member_id in view.member_ids if member_id in member_ids]
        if not lost:
            return view
        following = protocol.without(view, lost)
        store.create(protocol.view_key(following.epoch), following.encode())


class Agreement:
    """This process in the protocol, from epoch to epoch."""

    def __init__(self, store: KeyStore, member: Member, *, fan: int = FAN) -> None:
        self._store, self._fan = store, fan
        self._known: dict[str, str] = {}
        """Of this epoch."""
        self.member = member

    @classmethod
    def founding(cls, store: KeyStore, view: View, member_id: MemberId, *, fan: int = FAN) -> "Agreement":
        """A member of the first view, which runs from the start."""
        return cls(store, Member(member_id=member_id, view=view, phase=Phase.RUNNING), fan=fan)

    @classmethod
    def joining(cls, store: KeyStore, first: View, member_id: MemberId, *, fan: int = FAN) -> "Agreement":
        """A joining rank: it creates the view that it is in, after whichever is the newest when it gets to write."""
        while True:
            newest = protocol.newest_view(store.read, first)
            if newest.over:
                raise Excluded(
                    f"slot {member_id.slot} ({member_id.incarnation}) comes too late: the job was over with "
                    f"epoch {newest.epoch}",
                    way_out="this process ends; there is nothing left to do",
                )
            wanted = protocol.with_joiners(newest, [member_id])
            if store.create(protocol.view_key(wanted.epoch), wanted.encode()) == wanted.encode():
                return cls(store, Member(member_id=member_id, view=wanted, phase=Phase.REPORTING), fan=fan)

    def newer_view_exists(self) -> bool:
        """Whether this member must agree again before it trains on."""
        return self._store.present([protocol.view_key(self.member.view.epoch + 1)])

    def go_on_without(self, slots: Iterable[int]) -> None:
        """Call for a new epoch without some members; without none, where this one could not begin."""
        following = protocol.without(self.member.view, slots)
        self._store.create(protocol.view_key(following.epoch), following.encode())

    def everybody_is_done(self, poll: Callable[[], None] = lambda: None) -> bool:
        """Say that this member is done, and wait for the others; False where a newer view must agree first. `poll` is
        called in each turn of the wait."""
        return self._meet(protocol.finish, protocol.done_of(self.member.view, self._fan), poll)

    def everybody_has_come(self, poll: Callable[[], None] = lambda: None) -> bool:
        """Say that this member has come to the end of its work, and wait for the others, however long their scripts
        take; False where a newer view must agree first. `poll` is called in each turn of the wait."""
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
        """Until the newest view has agreed. `report` and `plan` may be called again, for each view on the way. Entered
        while this process does nothing but wait for others is `waiting`: who does not come is found by that. Who has
        not come when this member has waited for `timeout_s` is evicted."""
        waited = RunningTime()
        agreed, digest, told = None, None, Report(applied=0, oldest=0)

        def look() -> Step:
            return protocol.advance(self.member, self._read, lost=lost(), report=told, digest=digest, fan=self._fan)

        while True:
            before = self.member
            if before.phase is Phase.REPORTING:
                self._known.clear()
                agreed, digest, told = None, None, report(before.view)
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
                    way_out="this process ends; a new one may join in its slot",
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
        """Keys are written once: what was read is not read again."""
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
                way_out="run the same versions and the same configuration everywhere",
            )

    def _evict_the_missing(self, look: Callable[[], Step], timeout_s: float) -> None:
        """Make the next view without whoever holds this agreement up; the next look finds it."""
        awaited = protocol.awaited_of(self.member, self._fan)
        late = awaited.late(self._read) if awaited else ()
        epoch, mine = self.member.view.epoch, self.member.member_id.slot
        if not late or mine in late:
            if look() != (self.member, None):  # what was missing has come just now
                return
            raise NoAgreement(
                f"epoch {epoch} did not agree within {timeout_s} s, and slot {mine} does not see for whom it waits",
                way_out="look at the job's store; restart from the last checkpoint",
            )
        assert awaited is not None, "somebody is late"
        _LOG.warning(
            "epoch %d: slots %s evicted: no %s within %g s", epoch, ", ".join(map(str, late)), awaited.kind, timeout_s
        )
        self.go_on_without(late)
