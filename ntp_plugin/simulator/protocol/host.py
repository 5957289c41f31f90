"""One simulated supervisor: it reads heartbeats, judges its ranks, publishes losses, and starts new processes.

What it concludes is the live detector's: `gone` for its own ranks, `standstill` and `judge` for those who hold all
others up, and the silence of other hosts. Here it looks less often than live, at moments that the seed draws.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ntp_plugin.membership import protocol
from ntp_plugin.membership.failure_detector import Pulse, Standstill, Thresholds, standstill
from ntp_plugin.membership.gathering import Read
from ntp_plugin.membership.protocol import MemberId, Phase, View
from ntp_plugin.simulator.protocol.laws import Violation
from ntp_plugin.simulator.protocol.process import SimulatedProcess, joining

if TYPE_CHECKING:
    from ntp_plugin.simulator.protocol.job import VirtualJob

THRESHOLDS = Thresholds(
    heartbeat_s=0.05,
    frozen_s=0.3,
    silent_s=1.0,
    hung_s=1.5,
    start_s=600.0,
    host_heartbeat_s=0.25,
    host_s=1.0,
    store_s=2.0,
)
"""Shorter than live, so that a run is: only their order matters to what is searched."""
LOOK_S = 0.4


class Host:
    """The supervisor of one host; it dies with it."""

    def __init__(self, job: "VirtualJob", number: int, first: View) -> None:
        self._job, self.number, self.view = job, number, first
        self.alive = True
        self.died_at: float | None = None
        self.respawns = job.schedule.respawns
        self._started = 0
        self._starting: set[int] = set()
        """Slots for which a process is on its way: never two for one."""

    def workers(self) -> dict[int, SimulatedProcess]:
        """The newest process in each of its slots."""
        return {process.member_id.slot: process for process in self._job.processes if process.host == self.number}

    def die(self) -> None:
        """All its processes end with it, and nobody is there to see that."""
        self.alive, self.died_at = False, self._job.time.now
        for worker in self.workers().values():
            worker.die()

    # ------------------------------------------------ looks

    def look(self) -> None:
        """Ask the store for the newest view; judge once the answer is there."""
        if self.alive and not self.view.over:
            self._job.store.look(self._judge)

    def look_again_and_again(self) -> None:
        """Live this is a loop."""
        if self.alive and not self.view.over:
            self.look()
            self._job.time.after(self._job.draw(0.5, 1.5) * LOOK_S, self.look_again_and_again)

    def _judge(self, read: Read) -> None:
        if not self.alive:
            return
        self._see(protocol.newest_view(read, self.view))
        if self.view.over:
            return
        now, pulses = self._job.time.now, self._pulses()
        found = {verdict.slot for verdict in self._job.rules.find_lost(pulses, THRESHOLDS, now=now)} & set(
            self.view.slots
        )
        member_ids = [
            member_id for member_id in self.view.member_ids if member_id.slot in found and self._is_mine(member_id)
        ]
        self._require_guilty(member_ids)
        member_ids += self._of_silent_hosts(now)
        if member_ids:
            self.publish(member_ids)
        elif self._standstill() is not None:
            self._job.ask_all(self)

    def answer(self) -> Standstill | None:
        """How its ranks stand, when it is asked."""
        return self._standstill() if self.alive else None

    def hear_all(self, epoch: int, answers: dict[int, Standstill | None]) -> None:
        """What each host with members answered to its question."""
        if not self.alive or epoch != self.view.epoch:
            return
        slots = {host: {s for s in self.view.slots if self._job.host_of(s) == host} for host in answers}
        found = {verdict.slot for verdict in self._job.rules.judge(answers, slots, THRESHOLDS)}
        member_ids = [member_id for member_id in self.view.member_ids if member_id.slot in found]
        self._require_guilty(member_ids)
        if member_ids:
            self.publish(member_ids)

    def _pulses(self) -> dict[int, Pulse]:
        now = self._job.time.now
        return {slot: worker.pulse(now, THRESHOLDS.heartbeat_interval_s) for slot, worker in self.workers().items()}

    def _standstill(self) -> Standstill | None:
        inside = {slot: pulse for slot, pulse in self._pulses().items() if slot in self.view.slots}
        still = standstill(inside, THRESHOLDS)
        if still is None:
            return None
        return dataclasses.replace(still, unreachable=self._job.cut_from(self.number))

    def _is_mine(self, member_id: MemberId) -> bool:
        worker = self.workers().get(member_id.slot)
        return worker is not None and worker.member_id == member_id

    def _of_silent_hosts(self, now: float) -> list[MemberId]:
        silent = {
            host.number
            for host in self._job.hosts
            if host.died_at is not None and now - host.died_at > THRESHOLDS.host_s
        }
        return [member_id for member_id in self.view.member_ids if self._job.host_of(member_id.slot) in silent]

    def _require_guilty(self, member_ids: Iterable[MemberId]) -> None:
        """The detector has never taken a healthy rank for a lost one."""
        for member_id in member_ids:
            if not self._job.is_guilty(member_id):
                raise Violation(f"{member_id} is well, and was taken for lost")

    # ------------------------------------------------ what follows

    def publish(self, member_ids: list[MemberId]) -> None:
        """Make sure that none of these members is in the newest view."""
        lost = [member_id.slot for member_id in self.view.member_ids if member_id in member_ids]
        if not lost or not self.alive:
            return
        following = protocol.without(self.view, lost)
        key = protocol.view_key(following.epoch)
        self._job.store.write(key, following.encode(), lambda stands: self._published(View.decode(stands), member_ids))

    def _published(self, view: View, member_ids: list[MemberId]) -> None:
        if self.alive and view.epoch > self.view.epoch:
            self._see(view)
        self.publish(member_ids)

    def _see(self, view: View) -> None:
        self.view = view
        if view.over:
            return
        for slot, worker in self.workers().items():
            if worker.member_id in view.member_ids or (worker.joiner and not self._job.has_been_in(worker.member_id)):
                continue
            if self._job.kills_who_is_out(worker):
                worker.die()
            free = not worker.acts and slot not in self._starting
            if self.respawns and free and not self._job.cut_from(self.number):
                self.respawns -= 1
                self._started += 1
                self._starting.add(slot)
                self._start(MemberId(slot=slot, incarnation=f"{self.number}/{self._started}"))

    def _start(self, member_id: MemberId) -> None:
        self._job.time.after(self._job.draw(0.01, 0.3), self._join, member_id)

    def _join(self, member_id: MemberId) -> None:
        if self.alive:
            self._job.store.look(lambda read: self._enter(member_id, read))

    def _enter(self, member_id: MemberId, read: Read) -> None:
        newest = protocol.newest_view(read, self.view)
        if newest.over or not self.alive or not newest.member_ids:
            return
        wanted = protocol.with_joiners(newest, [member_id])
        entered: Callable[[str], None] = lambda stands: self._entered(member_id, wanted, stands)  # noqa: E731
        self._job.store.write(protocol.view_key(wanted.epoch), wanted.encode(), entered)

    def _entered(self, member_id: MemberId, wanted: View, stands: str) -> None:
        if not self.alive:
            return
        if stands != wanted.encode():  # somebody else was first
            self._join(member_id)
            return
        process = joining(self._job, member_id, wanted, self.number)
        assert process.member.phase is Phase.REPORTING, "a joining rank reports first"
        self._job.processes.append(process)
        self._starting.discard(member_id.slot)
        process.stir()
