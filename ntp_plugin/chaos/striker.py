"""Orders what the schedule says, and sees to what comes from outside."""

import contextlib
import functools
import os
import signal
import time
from pathlib import Path

from ntp_plugin.chaos.history import History
from ntp_plugin.chaos.hosting import Blow, Running, Undoing
from ntp_plugin.chaos.schedule import FaultSchedule
from ntp_plugin.chaos.strikes import (
    BY_ITS_OWN_HAND,
    LEAVES_THE_JOB,
    Orders,
    RequestedFaults,
    Strike,
    orders_file,
)
from ntp_plugin.telemetry import Struck, Teller, events_file
from ntp_plugin.telemetry.job_state import JobState

_MISSED = 12
"""So many steps after it was ordered a drawn strike has missed: not every step has every moment."""
SIGNALS = {"sigkill": signal.SIGKILL, "sigstop": signal.SIGSTOP, "pause": signal.SIGSTOP}
"""To a worker; what else comes from outside is done where the job runs (`hosting.py`)."""


class Striker:
    """Of one run."""

    def __init__(self, folder: Path, schedule: FaultSchedule, orders: Orders | None = None) -> None:
        """`orders`: those of a run that is there already."""
        self._schedule, self._orders = schedule, orders or Orders.new(orders_file(folder))
        self._teller = from_outside(folder)
        self._undoing: list[tuple[float, Undoing]] = []
        self.ordered: list[Strike] = []
        self._ordered_in: dict[str, int] = {}
        """Name -> the step that was over then."""
        self._missed: set[str] = set()
        for strike in schedule.at_start():
            self._order(strike)

    def strike(self, job: JobState, history: History, running: Running | None = None) -> None:
        """What is due now; `running` is what somebody else has started otherwise."""
        for at, undo in tuple(self._undoing):
            if time.monotonic() >= at:
                self._undoing.remove((at, undo))
                undo()
        self._missed |= {strike.name for strike in self.ordered if self._misses(strike, job, history)}
        pending = [strike.slot for strike in self.ordered if not self._is_over(strike, history)]
        for strike in self._schedule.next(job, seconds=_seconds(job), pending=pending, missed=self._missed):
            self._order(strike)
            self._ordered_in[strike.name] = job.step
            if strike.what not in BY_ITS_OWN_HAND:
                self._from_outside(strike, job, running)

    def is_done(self, history: History) -> bool:
        """Whether all that the schedule has is over."""
        ended = all(self._is_over(strike, history) for strike in self.ordered)
        return ended and self._schedule.has_given_all and not self._undoing

    def give_up(self) -> None:
        """Nothing more is to come: what has not struck does not, and what is undone after a time is undone now."""
        for strike in self.ordered:
            if strike.what in BY_ITS_OWN_HAND:
                self._orders.take_back(strike)
        for _, undo in self._undoing:
            undo()
        self._undoing.clear()

    def asked(self, job: JobState) -> RequestedFaults:
        """Now that it is over."""
        return self._schedule.asked(job, seconds=_seconds(job), ordered=self.ordered)

    def _is_over(self, strike: Strike, history: History) -> bool:
        return strike.name in self._missed or _is_settled(strike, history)

    def _misses(self, strike: Strike, job: JobState, history: History) -> bool:
        """Whether its slot has not come to that moment. Then it shall not strike later, beside another one."""
        passed = job.step - self._ordered_in.get(strike.name, job.step)
        has_struck = any(said.event.strike == strike.name for said in history.struck)
        may_miss = self._schedule.has_drawn(strike) and strike.name not in self._missed
        return may_miss and not has_struck and passed >= _MISSED and self._orders.take_back(strike)

    def _order(self, strike: Strike) -> None:
        self.ordered.append(strike)
        if strike.what in BY_ITS_OWN_HAND:
            self._orders.give(strike)

    def _from_outside(self, strike: Strike, job: JobState, running: Running | None) -> None:
        blow = _way_to(strike, job.pids.get(strike.slot), running)
        if blow is None:
            return
        self._teller.tell(struck_now(strike, job))
        undo = blow()
        if undo is not None:
            self._undoing.append((time.monotonic() + strike.seconds, undo))


def _way_to(strike: Strike, pid: int | None, running: Running | None) -> Blow | None:
    """None where there is nobody to be struck: it is not told then."""
    if strike.what in SIGNALS:
        return functools.partial(_signal, strike, pid) if pid is not None and is_worker(pid) else None
    assert running is not None, "attached to a job there are signals and orders"
    return running.way_to(strike, pid)


def _signal(strike: Strike, pid: int) -> Undoing | None:
    send(pid, SIGNALS[strike.what])
    return functools.partial(send, pid, signal.SIGCONT) if strike.what == "pause" else None


def _seconds(job: JobState) -> float:
    """Since training began."""
    return job.heard_at - job.began_at


def _is_settled(strike: Strike, history: History) -> bool:
    """Whether it has struck, and the others have gone on."""
    said = next((said for said in history.struck if said.event.strike == strike.name), None)
    if said is None:
        return False
    if strike.what not in LEAVES_THE_JOB:
        return any(told.at > said.at for step in history.commits.values() for told in step.values())
    went_on = (one for slots in history.recoveries.values() for one in slots.values() if one.at > said.at)
    return any(strike.slot in one.event.lost for one in went_on)


def from_outside(folder: Path) -> Teller:
    """For who strikes from there. Beside the record of the run, which must be empty when it starts; a follower of the
    folder reads both."""
    return Teller(events_file(folder).with_name("events.campaign.jsonl"), "campaign")


def struck_now(strike: Strike, job: JobState) -> Struck:
    """What is told of one from outside."""
    return Struck(strike=strike.name, what=strike.what, whom=strike.slot, moment="", step=job.step + 1)


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
