"""Watches the other hosts of the job through the job's store, and finds out together with them which rank hangs.

It uses these keys of the store:

    beat/N                  a counter that host N increments: its heartbeat
    host_incarnation/N/K    the machine that takes the place of host N for the K-th time
    door/N/K                the address at which incarnation K of host N can be connected to
    ended/N/K               all workers of that incarnation have ended
    round/E/R               the R-th query of epoch E: which ranks of each host wait, are idle or hang?
    standstill/E/R/N        the answer of host N

A host watches the heartbeats of the next few hosts with members in the view, so that a few hosts read each heartbeat
and not all. If nothing has moved on a host for `hung_s`, it starts a query. Every host answers with its `Standstill`
and with the hosts that it cannot reach; the host that started the query judges.

The store may answer late, because this host was cut off from it for a while. The others have then gone on without it,
and it must not count them as silent. So a heartbeat counts from when the store answered, and silence ends at the time
of the request.
"""

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ntp_plugin.errors import Excluded
from ntp_plugin.launch.reachability import Address, RefusingEndpoint, unreachable
from ntp_plugin.membership.failure_detector import (
    Pulse,
    RankFailure,
    Standstill,
    Thresholds,
    after_heartbeat,
    hung,
    judge,
)
from ntp_plugin.membership.protocol import View
from ntp_plugin.membership.store import TorchStore

WATCHED = 8
"""How many of the next hosts a host watches. The loss of a rack with fewer hosts in a row is noticed at once by the
host before it."""
KNOCK_S = 1.0
"""Timeout of a connection to another host."""
ROUND_S = 5.0
"""Timeout of a query. An answer takes one connection and two heartbeats; a host that is slower is about to be lost."""


@dataclasses.dataclass(kw_only=True, slots=True)
class _Round:
    number: int
    asked_by_me: bool
    opened_at: float
    knocked: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    """The hosts that cannot be connected to, once the connecting thread has finished."""
    answered: bool = False


class Hosts:
    """This host's view of the others. The supervisor's thread calls `tick` in its loop."""

    def __init__(
        self,
        store: TorchStore,
        *,
        host: int,
        host_incarnation: int,
        hosts: int,
        slots: int,
        endpoint: RefusingEndpoint,
        thresholds: Thresholds,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self.host, self._host_incarnation, self._thresholds = store, host, host_incarnation, thresholds
        self._slots = {other: range(other * slots // hosts, (other + 1) * slots // hosts) for other in range(hosts)}
        self._endpoint, self._clock = endpoint, clock
        self._pulses: dict[int, Pulse] = {}
        self._counts: dict[int, int] = {}
        self._heartbeat_at = 0.0
        self._epoch = 0
        self._rounds = 0
        self._round: _Round | None = None
        self._quiet_until = 0.0
        self.hung = 0
        """How many ranks wait for each other, if all do, by the last query of this host."""
        self._leaving = False
        store.create(f"door/{host}/{host_incarnation}", json.dumps(endpoint.address))

    def close(self) -> None:
        """Stop accepting connections."""
        self._endpoint.close()

    # ------------------------------------------------ what the supervisor asks

    def tick(self, view: View, still: Standstill | None) -> list[RankFailure]:
        """Send a heartbeat, check the other hosts, and answer or start a query.

        Args:
            view: The newest view.
            still: What the ranks of this host wait in, if nothing has moved here for `hung_s`.

        Returns:
            The ranks that are lost with their host, or hang.

        Raises:
            Excluded: Another machine has taken the place of this one.
        """
        now = self._clock()
        if now - self._heartbeat_at < self._thresholds.host_heartbeat_s:
            return []
        self._heartbeat_at = now
        if not self._leaving:  # afterwards another machine may take the place
            self._store.count(f"beat/{self.host}", 1)
            if self._store.present([f"host_incarnation/{self.host}/{self._host_incarnation + 1}"]):
                raise Excluded(f"another machine has taken the place of this one as host {self.host}")
        return self._watch(view) or self._take_part(view, still, self._clock())

    def unreachable(self, view: View) -> tuple[int, ...]:
        """Return the hosts of the view that this one cannot connect to within `KNOCK_S`."""
        return unreachable(self._addresses(view), timeout_s=KNOCK_S)

    def all_ended(self, view: View) -> bool:
        """Announce that all workers of this host have ended; return whether those of all hosts in the view have."""
        self._leaving = True
        self._store.create(f"ended/{self.host}/{self._host_incarnation}", "yes")
        return all(self._store.present([f"ended/{host}/{self._host_incarnation_of(host)}"]) for host in self._in(view))

    # ------------------------------------------------ heartbeats

    def _in(self, view: View) -> list[int]:
        members = set(view.slots)
        return [host for host, slots in self._slots.items() if members & set(slots)]

    def _watch(self, view: View) -> list[RankFailure]:
        found = []
        for host in successors(self._in(view), self.host, WATCHED):
            asked_at, count = self._clock(), self._store.count(f"beat/{host}")
            answered_at, pulse = self._clock(), self._pulses.get(host, Pulse(started_at=asked_at))
            if count != self._counts.get(host, 0):
                pulse = after_heartbeat(pulse, now=answered_at, moved_at=answered_at)
            self._pulses[host], self._counts[host] = pulse, count
            silence = asked_at - (pulse.heartbeat_at or pulse.started_at)
            limit = self._thresholds.host_s if pulse.heartbeat_at else self._thresholds.start_s
            if silence > limit:
                reason = f"no beat of its host {host} in {silence:.1f} s (limit {limit} s)"
                found += self._verdicts(view, host, reason)
        return found

    def _verdicts(self, view: View, host: int, reason: str) -> list[RankFailure]:
        return [RankFailure(slot=slot, kind="host", reason=reason) for slot in view.slots if slot in self._slots[host]]

    # ------------------------------------------------ queries

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
            target=lambda addresses: opened.knocked.append(unreachable(addresses, timeout_s=KNOCK_S)),
            args=(self._addresses(view),),
            name="ntp-connect",
            daemon=True,
        ).start()
        return opened

    def _answer(self, current: _Round, still: Standstill | None) -> None:
        answer = None
        if still is not None:
            answer = [still.waiting, _rows(still.idle), still.hanging, _rows(still.done), current.knocked[0]]
        self._store.create(f"standstill/{self._epoch}/{current.number}/{self.host}", json.dumps(answer))
        current.answered = True

    def _gather(self, current: _Round, view: View) -> list[RankFailure] | None:
        answers: dict[int, Standstill | None] = {}
        for host in self._in(view):
            text = self._store.read(f"standstill/{self._epoch}/{current.number}/{host}")
            if text is None:
                return None
            answers[host] = _standstill(json.loads(text))
        self.hung = hung(answers)
        slots = {host: set(view.slots) & set(self._slots[host]) for host in answers}
        return judge(answers, slots, self._thresholds)

    # ------------------------------------------------ host incarnations

    def _host_incarnation_of(self, host: int) -> int:
        host_incarnation = 0
        while self._store.present([f"host_incarnation/{host}/{host_incarnation + 1}"]):
            host_incarnation += 1
        return host_incarnation

    def _addresses(self, view: View) -> dict[int, Address]:
        return {host: self._address_of(host) for host in self._in(view) if host != self.host}

    def _address_of(self, host: int) -> Address:
        address, port = json.loads(self._store.read(f"door/{host}/{self._host_incarnation_of(host)}") or '["", 0]')
        return address, port


def successors(hosts: Sequence[int], of: int, most: int) -> list[int]:
    """Return the next `most` hosts after one, in the ring of all hosts."""
    others = sorted(host for host in hosts if host != of)
    after = [host for host in others if host > of]
    return [*after, *(host for host in others if host < of)][:most]


def _rows(since: Mapping[int, float]) -> list[tuple[int, float]]:
    """Return the pairs of a mapping: keys in JSON cannot be numbers."""
    return list(since.items())


def _standstill(answer: Any) -> Standstill | None:
    if answer is None:
        return None
    waiting, idle, hanging, done, missed = answer
    return Standstill(
        waiting=waiting, idle=dict(idle), hanging=tuple(hanging), done=dict(done), unreachable=tuple(missed)
    )
