"""The hosts of a job, as each of them sees the others through the job's store.

    beat/N            a counter that host N raises
    host_incarnation/N/K        who is host N for the K-th time: a machine that takes the place of a lost one is the
    next door/N/K          where that host_incarnation can be knocked at
    ended/N/K         all its workers have ended
    round/E/R         the R-th question of epoch E: how does everybody stand?
    standstill/E/R/N  what host N says to it

A host watches the beats of the next few hosts that have members in the view, so that a beat is read by a few and not by
all. Where nothing moves on a host for `hung_s`, it asks the question; every host answers with its standstill and with
the hosts that it cannot reach; whoever asked judges.

The store may answer late, because this host was cut off from it for a while. Then the others have gone on without it,
and it must not take them for silent: a beat counts from when the store answered, silence up to when it was asked.
"""

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ntp_plugin.errors import Excluded
from ntp_plugin.launch.reachability import Address, RefusingEndpoint, unreachable
from ntp_plugin.membership.failure_detector import Pulse, RankFailure, Standstill, Thresholds, heard, hung, judge
from ntp_plugin.membership.protocol import View
from ntp_plugin.membership.store import TorchStore

WATCHED = 8
"""A rack that dies with fewer hosts than this in a row is noticed at once by the host before it."""
KNOCK_S = 1.0
ROUND_S = 5.0
"""An answer takes a knock and two beats; a host that has not answered by then is being missed by those who watch it."""


@dataclasses.dataclass(kw_only=True, slots=True)
class _Round:
    number: int
    asked_by_me: bool
    opened_at: float
    knocked: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    """Filled by the thread that knocks."""
    answered: bool = False


class Hosts:
    """This host among the others; `tick` is called again and again by the supervisor's thread."""

    def __init__(
        self,
        store: TorchStore,
        *,
        host: int,
        host_incarnation: int,
        hosts: int,
        slots: int,
        door: RefusingEndpoint,
        thresholds: Thresholds,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self.host, self._host_incarnation, self._thresholds = store, host, host_incarnation, thresholds
        self._slots = {other: range(other * slots // hosts, (other + 1) * slots // hosts) for other in range(hosts)}
        self._door, self._clock = door, clock
        self._pulses: dict[int, Pulse] = {}
        self._counts: dict[int, int] = {}
        self._heartbeat_at = 0.0
        self._epoch = 0
        self._rounds = 0
        self._round: _Round | None = None
        self._quiet_until = 0.0
        self.hung = 0
        """How many wait for each other, if all do: by the last question that this host has asked."""
        self._leaving = False
        store.create(f"door/{host}/{host_incarnation}", json.dumps(door.address))

    def close(self) -> None:
        """Nobody can knock here any more."""
        self._door.close()

    # ------------------------------------------------ what the supervisor asks

    def tick(self, view: View, still: Standstill | None) -> list[RankFailure]:
        """Heartbeat, look at the others, and answer or ask; returns who is lost because of its host, or hangs."""
        now = self._clock()
        if now - self._heartbeat_at < self._thresholds.host_heartbeat_s:
            return []
        self._heartbeat_at = now
        if not self._leaving:  # else another machine may take the place
            self._store.count(f"beat/{self.host}", 1)
            if self._store.present([f"host_incarnation/{self.host}/{self._host_incarnation + 1}"]):
                raise Excluded(f"another machine has taken the place of this one as host {self.host}")
        return self._watch(view) or self._take_part(view, still, self._clock())

    def unreachable(self, view: View) -> tuple[int, ...]:
        """The hosts of the view that this one cannot connect to; waits for them for a second."""
        return unreachable(self._doors(view), timeout_s=KNOCK_S)

    def all_ended(self, view: View) -> bool:
        """All workers of this host have ended; whether those of all hosts in the view have."""
        self._leaving = True
        self._store.create(f"ended/{self.host}/{self._host_incarnation}", "yes")
        return all(self._store.present([f"ended/{host}/{self._host_incarnation_of(host)}"]) for host in self._in(view))

    # ------------------------------------------------ beats

    def _in(self, view: View) -> list[int]:
        members = set(view.slots)
        return [host for host, slots in self._slots.items() if members & set(slots)]

    def _watch(self, view: View) -> list[RankFailure]:
        found = []
        for host in successors(self._in(view), self.host, WATCHED):
            asked_at, count = self._clock(), self._store.count(f"beat/{host}")
            answered_at, pulse = self._clock(), self._pulses.get(host, Pulse(started_at=asked_at))
            if count != self._counts.get(host, 0):
                pulse = heard(pulse, now=answered_at, moved_at=answered_at)
            self._pulses[host], self._counts[host] = pulse, count
            silence = asked_at - (pulse.heartbeat_at or pulse.started_at)
            limit = self._thresholds.host_s if pulse.heartbeat_at else self._thresholds.start_s
            if silence > limit:
                reason = f"no beat of its host {host} in {silence:.1f} s (limit {limit} s)"
                found += self._verdicts(view, host, reason)
        return found

    def _verdicts(self, view: View, host: int, reason: str) -> list[RankFailure]:
        return [RankFailure(slot=slot, kind="host", reason=reason) for slot in view.slots if slot in self._slots[host]]

    # ------------------------------------------------ how does everybody stand?

    def _take_part(self, view: View, still: Standstill | None, now: float) -> list[RankFailure]:
        if view.epoch != self._epoch:
            self._epoch, self._rounds, self._round, self.hung = view.epoch, 0, None, 0
        if self._round is None:
            self._round = self._opened(view, still, now)
            if self._round is None:
                return []
        current = self._round
        if current.knocked and not current.answered:
            self._answer(current, still)
        found = self._gather(current, view) if current.asked_by_me and current.answered else None
        if found is not None or (current.answered and (not current.asked_by_me or now - current.opened_at > ROUND_S)):
            self._round, self._quiet_until = None, now + self._thresholds.hung_s / 2
        return found or []

    def _opened(self, view: View, still: Standstill | None, now: float) -> _Round | None:
        key = f"round/{self._epoch}/{self._rounds}"
        asking = still is not None and bool(still.waiting or still.idle or still.done) and now > self._quiet_until
        if not (self._store.present([key]) or asking):
            return None
        asked_by = self._store.create(key, str(self.host)) if asking else ""
        opened = _Round(number=self._rounds, asked_by_me=asked_by == str(self.host), opened_at=now)
        self._rounds += 1
        threading.Thread(
            target=lambda doors: opened.knocked.append(unreachable(doors, timeout_s=KNOCK_S)),
            args=(self._doors(view),),
            name="ntp-knock",
            daemon=True,
        ).start()
        return opened

    def _answer(self, current: _Round, still: Standstill | None) -> None:
        told = None
        if still is not None:
            told = [still.waiting, _rows(still.idle), still.hanging, _rows(still.done), current.knocked[0]]
        self._store.create(f"standstill/{self._epoch}/{current.number}/{self.host}", json.dumps(told))
        current.answered = True

    def _gather(self, current: _Round, view: View) -> list[RankFailure] | None:
        told: dict[int, Standstill | None] = {}
        for host in self._in(view):
            text = self._store.read(f"standstill/{self._epoch}/{current.number}/{host}")
            if text is None:
                return None
            told[host] = _standstill(json.loads(text))
        self.hung = hung(told)
        slots = {host: set(view.slots) & set(self._slots[host]) for host in told}
        return judge(told, slots, self._thresholds)

    # ------------------------------------------------ tenants

    def _host_incarnation_of(self, host: int) -> int:
        host_incarnation = 0
        while self._store.present([f"host_incarnation/{host}/{host_incarnation + 1}"]):
            host_incarnation += 1
        return host_incarnation

    def _doors(self, view: View) -> dict[int, Address]:
        return {host: self._door_of(host) for host in self._in(view) if host != self.host}

    def _door_of(self, host: int) -> Address:
        address, port = json.loads(self._store.read(f"door/{host}/{self._host_incarnation_of(host)}") or '["", 0]')
        return address, port


def successors(hosts: Sequence[int], of: int, most: int) -> list[int]:
    """The hosts that come after one in the ring of them all."""
    others = sorted(host for host in hosts if host != of)
    after = [host for host in others if host > of]
    return [*after, *(host for host in others if host < of)][:most]


def _rows(since: Mapping[int, float]) -> list[tuple[int, float]]:
    """As JSON has it, whose keys are no numbers."""
    return list(since.items())


def _standstill(told: Any) -> Standstill | None:
    if told is None:
        return None
    waiting, idle, hanging, done, missed = told
    return Standstill(
        waiting=waiting, idle=dict(idle), hanging=tuple(hanging), done=dict(done), unreachable=tuple(missed)
    )
