"""One supervisor: it looks at the beats of its ranks, judges, publishes who is gone, and starts anew.

What it concludes is the live detector's: `gone` for its own ranks, `standstill` and `judge` for those who hold all
others up, and the silence of other hosts. Here it looks less often than live, at moments that the seed draws.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ntp_plugin.comm import membership
from ntp_plugin.comm.gathering import Read
from ntp_plugin.comm.membership import Phase, Seat, View
from ntp_plugin.recovery.detector import Pulse, Standstill, Thresholds, standstill
from ntp_plugin.simulator.protocol.laws import Violation
from ntp_plugin.simulator.protocol.process import SimulatedProcess, joining

if TYPE_CHECKING:
    from ntp_plugin.simulator.protocol.job import VirtualJob

THRESHOLDS = Thresholds(
    beat_s=0.05, frozen_s=0.3, silent_s=1.0, hung_s=1.5, start_s=600.0, host_beat_s=0.25, host_s=1.0, store_s=2.0
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

    def wards(self) -> dict[int, SimulatedProcess]:
        """The newest process in each of its slots."""
        return {process.seat.slot: process for process in self._job.processes if process.host == self.number}

    def die(self) -> None:
        """All its processes end with it, and nobody is there to see that."""
        self.alive, self.died_at = False, self._job.time.now
        for ward in self.wards().values():
            ward.die()

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
        self._see(membership.newest_view(read, self.view))
        if self.view.over:
            return
        now, pulses = self._job.time.now, self._pulses()
        found = {verdict.slot for verdict in self._job.rules.gone(pulses, THRESHOLDS, now=now)} & set(self.view.slots)
        seats = [seat for seat in self.view.seats if seat.slot in found and self._is_mine(seat)]
        self._require_guilty(seats)
        seats += self._of_silent_hosts(now)
        if seats:
            self.publish(seats)
        elif self._standstill() is not None:
            self._job.ask_all(self)

    def answer(self) -> Standstill | None:
        """How its ranks stand, when it is asked."""
        return self._standstill() if self.alive else None

    def hear_all(self, epoch: int, told: dict[int, Standstill | None]) -> None:
        """What each host with members answered to its question."""
        if not self.alive or epoch != self.view.epoch:
            return
        slots = {host: {s for s in self.view.slots if self._job.host_of(s) == host} for host in told}
        found = {verdict.slot for verdict in self._job.rules.judge(told, slots, THRESHOLDS)}
        seats = [seat for seat in self.view.seats if seat.slot in found]
        self._require_guilty(seats)
        if seats:
            self.publish(seats)

    def _pulses(self) -> dict[int, Pulse]:
        now = self._job.time.now
        return {slot: ward.pulse(now, THRESHOLDS.heart_s) for slot, ward in self.wards().items()}

    def _standstill(self) -> Standstill | None:
        inside = {slot: pulse for slot, pulse in self._pulses().items() if slot in self.view.slots}
        still = standstill(inside, THRESHOLDS)
        if still is None:
            return None
        return dataclasses.replace(still, unreachable=self._job.cut_from(self.number))

    def _is_mine(self, seat: Seat) -> bool:
        ward = self.wards().get(seat.slot)
        return ward is not None and ward.seat == seat

    def _of_silent_hosts(self, now: float) -> list[Seat]:
        silent = {
            host.number
            for host in self._job.hosts
            if host.died_at is not None and now - host.died_at > THRESHOLDS.host_s
        }
        return [seat for seat in self.view.seats if self._job.host_of(seat.slot) in silent]

    def _require_guilty(self, seats: Iterable[Seat]) -> None:
        """The detector has never taken a healthy rank for a lost one."""
        for seat in seats:
            if not self._job.is_guilty(seat):
                raise Violation(f"{seat} is well, and was taken for lost")

    # ------------------------------------------------ what follows

    def publish(self, seats: list[Seat]) -> None:
        """Make sure that none of the seats is in the newest view."""
        lost = [seat.slot for seat in self.view.seats if seat in seats]
        if not lost or not self.alive:
            return
        following = membership.without(self.view, lost)
        key = membership.view_key(following.epoch)
        self._job.store.write(key, following.encode(), lambda stands: self._published(View.decode(stands), seats))

    def _published(self, view: View, seats: list[Seat]) -> None:
        if self.alive and view.epoch > self.view.epoch:
            self._see(view)
        self.publish(seats)

    def _see(self, view: View) -> None:
        self.view = view
        if view.over:
            return
        for slot, ward in self.wards().items():
            if ward.seat in view.seats or (ward.newcomer and not self._job.has_been_in(ward.seat)):
                continue
            if self._job.kills_who_is_out(ward):
                ward.die()
            free = not ward.acts and slot not in self._starting
            if self.respawns and free and not self._job.cut_from(self.number):
                self.respawns -= 1
                self._started += 1
                self._starting.add(slot)
                self._start(Seat(slot=slot, occupant=f"{self.number}/{self._started}"))

    def _start(self, seat: Seat) -> None:
        self._job.time.after(self._job.draw(0.01, 0.3), self._join, seat)

    def _join(self, seat: Seat) -> None:
        if self.alive:
            self._job.store.look(lambda read: self._enter(seat, read))

    def _enter(self, seat: Seat, read: Read) -> None:
        newest = membership.newest_view(read, self.view)
        if newest.over or not self.alive or not newest.seats:
            return
        wanted = membership.with_newcomers(newest, [seat])
        entered: Callable[[str], None] = lambda stands: self._entered(seat, wanted, stands)  # noqa: E731
        self._job.store.write(membership.view_key(wanted.epoch), wanted.encode(), entered)

    def _entered(self, seat: Seat, wanted: View, stands: str) -> None:
        if not self.alive:
            return
        if stands != wanted.encode():  # somebody else was first
            self._join(seat)
            return
        process = joining(self._job, seat, wanted, self.number)
        assert process.member.phase is Phase.REPORTING, "a newcomer reports first"
        self._job.processes.append(process)
        self._starting.discard(seat.slot)
        process.stir()
