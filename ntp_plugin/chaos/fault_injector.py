"""Orders what the schedule says, and sees to what comes from outside."""

import contextlib
import functools
import os
import signal
import time
from pathlib import Path

from ntp_plugin.chaos.faults import (
    BY_ITS_OWN_HAND,
    LEAVES_THE_JOB,
    OrderedFault,
    Orders,
    RequestedFaults,
    orders_file,
)
from ntp_plugin.chaos.history import History
from ntp_plugin.chaos.hosting import Blow, Running, Undoing
from ntp_plugin.chaos.schedule import FaultSchedule
from ntp_plugin.telemetry import FaultInjected, Teller, events_file
from ntp_plugin.telemetry.job_state import JobState

_MISSED = 12
"""So many steps after it was ordered a drawn strike has missed: not every step has every moment."""
SIGNALS = {"sigkill": signal.SIGKILL, "sigstop": signal.SIGSTOP, "pause": signal.SIGSTOP}
"""To a worker; what else comes from outside is done where the job runs (`hosting.py`)."""


class FaultInjector:
    """Of one run."""

    def __init__(self, folder: Path, schedule: FaultSchedule, orders: Orders | None = None) -> None:
        """`orders`: those of a run that is there already."""
        self._schedule, self._orders = schedule, orders or Orders.new(orders_file(folder))
        self._teller = from_outside(folder)
        self._undoing: list[tuple[float, Undoing]] = []
        self.ordered: list[OrderedFault] = []
        self._ordered_in: dict[str, int] = {}
        """Name -> the step that was over then."""
        self._missed: set[str] = set()
        for fault in schedule.at_start():
            self._order(fault)

    def inject(self, job: JobState, history: History, running: Running | None = None) -> None:
        """What is due now; `running` is what somebody else has started otherwise."""
        for at, undo in tuple(self._undoing):
            if time.monotonic() >= at:
                self._undoing.remove((at, undo))
                undo()
        self._missed |= {fault.name for fault in self.ordered if self._misses(fault, job, history)}
        pending = [fault.slot for fault in self.ordered if not self._is_over(fault, history)]
        for fault in self._schedule.next(job, seconds=_seconds(job), pending=pending, missed=self._missed):
            self._order(fault)
            self._ordered_in[fault.name] = job.step
            if fault.what not in BY_ITS_OWN_HAND:
                self._from_outside(fault, job, running)

    def is_done(self, history: History) -> bool:
        """Whether all that the schedule has is over."""
        ended = all(self._is_over(fault, history) for fault in self.ordered)
        return ended and self._schedule.has_given_all and not self._undoing

    def give_up(self) -> None:
        """Nothing more is to come: what has not struck does not, and what is undone after a time is undone now."""
        for fault in self.ordered:
            if fault.what in BY_ITS_OWN_HAND:
                self._orders.take_back(fault)
        for _, undo in self._undoing:
            undo()
        self._undoing.clear()

    def asked(self, job: JobState) -> RequestedFaults:
        """Now that it is over."""
        return self._schedule.asked(job, seconds=_seconds(job), ordered=self.ordered)

    def _is_over(self, fault: OrderedFault, history: History) -> bool:
        return fault.name in self._missed or _is_settled(fault, history)

    def _misses(self, fault: OrderedFault, job: JobState, history: History) -> bool:
        """Whether its slot has not come to that moment. Then it shall not strike later, beside another one."""
        passed = job.step - self._ordered_in.get(fault.name, job.step)
        was_injected = any(said.event.fault == fault.name for said in history.injected)
        may_miss = self._schedule.has_drawn(fault) and fault.name not in self._missed
        return may_miss and not was_injected and passed >= _MISSED and self._orders.take_back(fault)

    def _order(self, fault: OrderedFault) -> None:
        self.ordered.append(fault)
        if fault.what in BY_ITS_OWN_HAND:
            self._orders.give(fault)

    def _from_outside(self, fault: OrderedFault, job: JobState, running: Running | None) -> None:
        blow = _way_to(fault, job.pids.get(fault.slot), running)
        if blow is None:
            return
        self._teller.tell(injected_now(fault, job))
        undo = blow()
        if undo is not None:
            self._undoing.append((time.monotonic() + fault.seconds, undo))


def _way_to(fault: OrderedFault, pid: int | None, running: Running | None) -> Blow | None:
    """None where there is nobody to be struck: it is not told then."""
    if fault.what in SIGNALS:
        return functools.partial(_signal, fault, pid) if pid is not None and is_worker(pid) else None
    assert running is not None, "attached to a job there are signals and orders"
    return running.way_to(fault, pid)


def _signal(fault: OrderedFault, pid: int) -> Undoing | None:
    send(pid, SIGNALS[fault.what])
    return functools.partial(send, pid, signal.SIGCONT) if fault.what == "pause" else None


def _seconds(job: JobState) -> float:
    """Since training began."""
    return job.heard_at - job.began_at


def _is_settled(fault: OrderedFault, history: History) -> bool:
    """Whether it has struck, and the others have gone on."""
    said = next((said for said in history.injected if said.event.fault == fault.name), None)
    if said is None:
        return False
    if fault.what not in LEAVES_THE_JOB:
        return any(told.at > said.at for step in history.commits.values() for told in step.values())
    went_on = (one for slots in history.recoveries.values() for one in slots.values() if one.at > said.at)
    return any(fault.slot in one.event.lost for one in went_on)


def from_outside(folder: Path) -> Teller:
    """For who strikes from there. Beside the record of the run, which must be empty when it starts; a follower of the
    folder reads both."""
    return Teller(events_file(folder).with_name("events.campaign.jsonl"), "campaign")


def injected_now(fault: OrderedFault, job: JobState) -> FaultInjected:
    """What is told of one from outside."""
    return FaultInjected(fault=fault.name, what=fault.what, whom=fault.slot, fault_point="", step=job.step + 1)


def send(pid: int, number: signal.Signals) -> None:
    """To a process that may have ended by itself a moment ago."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def is_worker(pid: int) -> bool:
    """Whether a process is there, on this host, and is a worker of `ntp run` or a spare of one."""
    try:
        return b"ntp_plugin.launch" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
