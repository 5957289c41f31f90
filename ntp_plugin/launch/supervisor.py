"""Watches the processes and heartbeats of a host, and publishes who is gone.

A process that ends is seen at once, through its pidfd. Beats are looked at every `beat_s`. What the detector finds is
published as the next view, which is the one signal that every survivor waits for; whoever publishes first wins, and a
supervisor that finds a rank out already does nothing.
"""

import dataclasses
import os
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ntp_plugin.comm import membership
from ntp_plugin.comm.membership import Seat, View
from ntp_plugin.comm.store import KeyStore
from ntp_plugin.recovery.detector import Pulse, Thresholds, Verdict, heard, verdicts
from ntp_plugin.recovery.heartbeat import HeartbeatFile


@dataclasses.dataclass(kw_only=True, slots=True)
class _Ward:
    seat: Seat
    pid: int
    pidfd: int
    exit_code: Callable[[], int]
    pulse: Pulse
    beats: int


class Supervisor:
    """One for each host; runs on a thread of its own."""

    def __init__(
        self,
        store: KeyStore,
        first: View,
        heartbeats: HeartbeatFile,
        *,
        thresholds: Thresholds,
        told: Callable[[Seat, Verdict], None],
    ) -> None:
        """`told` hears of every verdict, once, on the supervisor's thread."""
        self._store, self._first, self._heartbeats = store, first, heartbeats
        self._thresholds, self._told = thresholds, told
        self._wards: dict[int, _Ward] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ntp-supervisor", daemon=True)

    def watch(self, seat: Seat, pid: int, exit_code: Callable[[], int]) -> None:
        """Look after a process; it takes the place of the one that had the slot. `exit_code` is asked once it ended."""
        beats = self._heartbeats.read(seat.slot).count
        ward = _Ward(
            seat=seat,
            pid=pid,
            pidfd=os.pidfd_open(pid),
            exit_code=exit_code,
            pulse=Pulse(started_at=time.monotonic()),
            beats=beats,
        )
        with self._lock:
            old = self._wards.pop(seat.slot, None)
            self._wards[seat.slot] = ward
        if old is not None:
            os.close(old.pidfd)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the processes are left as they are."""
        self._stopping.set()
        self._thread.join()
        for ward in self._wards.values():
            os.close(ward.pidfd)
        self._wards.clear()

    def publish_lost(self, seat: Seat) -> None:
        """Create the next view without a seat, unless it is out already."""
        while True:
            view = membership.newest_view(self._store.read, self._first)
            if seat not in view.seats:
                return
            following = membership.without(view, [seat.slot])
            if self._store.create(membership.view_key(following.epoch), following.encode()) == following.encode():
                return

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self._lock:
                wards = dict(self._wards)
            poll = select.poll()
            by_pidfd = {ward.pidfd: ward for ward in wards.values() if ward.pulse.ended is None}
            for pidfd in by_pidfd:
                poll.register(pidfd, select.POLLIN)
            for pidfd, _ in poll.poll(self._thresholds.beat_s * 1000):
                ward = by_pidfd[pidfd]
                ward.pulse = dataclasses.replace(ward.pulse, ended=ward.exit_code(), over=self._is_over())
            now = time.monotonic()
            for slot, ward in wards.items():
                self._listen(slot, ward, now)
            self._judge(wards, now)

    def _is_over(self) -> bool:
        return membership.newest_view(self._store.read, self._first).over

    def _listen(self, slot: int, ward: _Ward, now: float) -> None:
        beat = self._heartbeats.read(slot)
        if beat.count != ward.beats:
            ward.beats = beat.count
            ward.pulse = heard(ward.pulse, now=now, moves=beat.moves, waiting=beat.waiting)
        silence = now - (ward.pulse.beat_at or now)
        stopped = silence > self._thresholds.frozen_s and ward.pulse.ended is None and _is_stopped(ward.pid)
        ward.pulse = dataclasses.replace(ward.pulse, stopped=stopped)

    def _judge(self, wards: dict[int, _Ward], now: float) -> None:
        pulses = {slot: ward.pulse for slot, ward in wards.items()}
        for verdict in verdicts(pulses, self._thresholds, now=now):
            ward = wards[verdict.slot]
            self.publish_lost(ward.seat)
            with self._lock:
                gone = self._wards.get(verdict.slot) is ward
                if gone:
                    del self._wards[verdict.slot]
            if gone:
                os.close(ward.pidfd)
                self._told(ward.seat, verdict)


def _is_stopped(pid: int) -> bool:
    """Whether the system says that a process is stopped: the state after its name in /proc/PID/stat is T or t."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in ("T", "t")
