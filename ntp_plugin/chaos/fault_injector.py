"""Write the orders of a schedule to the orders file, and inject the faults that need another process."""

import contextlib
import functools
import os
import signal
import time
from pathlib import Path

from ntp_plugin.chaos.faults import (
    INJECTED_BY_WORKER,
    LEAVES_THE_JOB,
    OrderedFault,
    Orders,
    RequestedFaults,
    orders_file,
)
from ntp_plugin.chaos.history import History
from ntp_plugin.chaos.hosting import Action, Running, Undo
from ntp_plugin.chaos.schedule import FaultSchedule
from ntp_plugin.telemetry import EventWriter, FaultInjected, events_file
from ntp_plugin.telemetry.job_state import JobState

_MISSED = 12
"""Steps after which an ordered random fault counts as missed: not every step has every fault point."""
SIGNALS = {"sigkill": signal.SIGKILL, "sigstop": signal.SIGSTOP, "pause": signal.SIGSTOP}
"""Sent to a worker; other faults from outside are injected where the job runs (`hosting.py`)."""


class FaultInjector:
    """Injects the faults of one run."""

    def __init__(self, folder: Path, schedule: FaultSchedule, orders: Orders | None = None) -> None:
        """`orders`: the orders file of a run that exists already."""
        self._schedule, self._orders = schedule, orders or Orders.new(orders_file(folder))
        self._event_writer = from_outside(folder)
        self._undo_later: list[tuple[float, Undo]] = []
        self.ordered: list[OrderedFault] = []
        self._ordered_in: dict[str, int] = {}
        """Name of a fault -> the last complete step when it was ordered."""
        self._missed: set[str] = set()
        for fault in schedule.at_start():
            self._order(fault)

    def inject(self, job: JobState, history: History, running: Running | None = None) -> None:
        """Inject what is due now; `running` is the campaign's own job, None when attached to another one."""
        for at, undo in tuple(self._undo_later):
            if time.monotonic() >= at:
                self._undo_later.remove((at, undo))
                undo()
        self._missed |= {fault.name for fault in self.ordered if self._misses(fault, job, history)}
        pending = [fault.slot for fault in self.ordered if not self._is_over(fault, history)]
        for fault in self._schedule.next(job, seconds=_seconds(job), pending=pending, missed=self._missed):
            self._order(fault)
            self._ordered_in[fault.name] = job.step
            if fault.what not in INJECTED_BY_WORKER:
                self._from_outside(fault, job, running)

    def is_done(self, history: History) -> bool:
        """Return whether all faults of the schedule are over."""
        ended = all(self._is_over(fault, history) for fault in self.ordered)
        return ended and self._schedule.has_given_all and not self._undo_later

    def give_up(self) -> None:
        """Stop injecting: take back orders that are not carried out, and undo temporary faults now."""
        for fault in self.ordered:
            if fault.what in INJECTED_BY_WORKER:
                self._orders.cancel(fault)
        for _, undo in self._undo_later:
            undo()
        self._undo_later.clear()

    def asked(self, job: JobState) -> RequestedFaults:
        """Return all requested faults, when the run is over."""
        return self._schedule.asked(job, seconds=_seconds(job), ordered=self.ordered)

    def _is_over(self, fault: OrderedFault, history: History) -> bool:
        return fault.name in self._missed or _is_settled(fault, history)

    def _misses(self, fault: OrderedFault, job: JobState, history: History) -> bool:
        """Return whether the slot missed the fault point; the order is then taken back, so that faults stay apart."""
        passed = job.step - self._ordered_in.get(fault.name, job.step)
        was_injected = any(injected.event.fault == fault.name for injected in history.injected)
        may_miss = self._schedule.has_drawn(fault) and fault.name not in self._missed
        return may_miss and not was_injected and passed >= _MISSED and self._orders.cancel(fault)

    def _order(self, fault: OrderedFault) -> None:
        self.ordered.append(fault)
        if fault.what in INJECTED_BY_WORKER:
            self._orders.give(fault)

    def _from_outside(self, fault: OrderedFault, job: JobState, running: Running | None) -> None:
        action = _way_to(fault, job.pids.get(fault.slot), running)
        if action is None:
            return
        self._event_writer.write(injected_now(fault, job))
        undo = action()
        if undo is not None:
            self._undo_later.append((time.monotonic() + fault.seconds, undo))


def _way_to(fault: OrderedFault, pid: int | None, running: Running | None) -> Action | None:
    """Return what injects the fault, or None if there is no such process; the fault is not recorded then."""
    if fault.what in SIGNALS:
        return functools.partial(_signal, fault, pid) if pid is not None and is_worker(pid) else None
    assert running is not None, "an attached job takes signals and orders only"
    return running.way_to(fault, pid)


def _signal(fault: OrderedFault, pid: int) -> Undo | None:
    send(pid, SIGNALS[fault.what])
    return functools.partial(send, pid, signal.SIGCONT) if fault.what == "pause" else None


def _seconds(job: JobState) -> float:
    """Seconds since training began."""
    return job.heard_at - job.began_at


def _is_settled(fault: OrderedFault, history: History) -> bool:
    """Return whether a fault was injected and the other ranks have gone on."""
    injected = next((injected for injected in history.injected if injected.event.fault == fault.name), None)
    if injected is None:
        return False
    if fault.what not in LEAVES_THE_JOB:
        return any(commit.at > injected.at for step in history.commits.values() for commit in step.values())
    went_on = (one for slots in history.recoveries.values() for one in slots.values() if one.at > injected.at)
    return any(fault.slot in one.event.lost for one in went_on)


def from_outside(folder: Path) -> EventWriter:
    """Open an event file for faults from outside. It is beside the record of the run, which must be empty when the run
    starts; a `Follower` of the folder reads both."""
    return EventWriter(events_file(folder).with_name("events.campaign.jsonl"), "campaign")


def injected_now(fault: OrderedFault, job: JobState) -> FaultInjected:
    """Return the event of a fault from outside."""
    return FaultInjected(fault=fault.name, what=fault.what, whom=fault.slot, fault_point="", step=job.step + 1)


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may just have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def is_worker(pid: int) -> bool:
    """Return whether a process of this host is a worker of `ntp run`, or a spare."""
    try:
        return b"ntp_plugin.launch" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
