"""One run of the job: starts it, injects faults while it trains, and waits for its end.

A run is hung if it neither completes a new step nor ends for `hung_s`, which is far more than all of its thresholds
together: load alone does not make a run hung. Its processes are killed then.
"""

import contextlib
import dataclasses
import os
import random
import resource
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ntp_plugin.chaos.ending import Wait
from ntp_plugin.chaos.outside import leavings, processes
from ntp_plugin.chaos.outside.injector import Injected, Injector, Missed
from ntp_plugin.chaos.outside.job_view import LINE, CompletedStep, JobView, Noticed
from ntp_plugin.chaos.outside.kinds import FaultKind, held_at_most_s
from ntp_plugin.chaos.outside.leavings import Leavings
from ntp_plugin.membership.failure_detector import Thresholds

MARK = "NTP_OUTSIDE"
RUN = "{run}"
_NTP_RUN = (sys.executable, "-m", "ntp_plugin.cli.main", "run")
_LOOK_S = 0.1
_STEPS_OF_A_RECOVERY = 3
"""So many steps after a fault the job has gone on, and so many a rank may be behind and still trains."""
_JOINS_WITHIN_S = 15.0
"""After its start, where a job does not say which ranks train."""
_TRIES = 4
"""At a kind, in one run."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """How the job is started."""

    words: tuple[str, ...]
    """Behind `ntp run`."""
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    """Beside that of this process."""
    line: str = LINE
    """By which steps are found in its output."""
    program: tuple[str, ...] = _NTP_RUN


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class InjectionPace:
    """When faults come, and when a run counts as hung."""

    thresholds: Thresholds
    every_s: float = 2.0
    """Between a job's being complete again and the next fault, on average."""
    blocks_of: int | None = None
    whole_s: float = 90.0
    """So long a lost rank is waited for; a run in which it does not come back gets no more faults."""
    beyond_thresholds_s: float = 120.0
    """A run is hung after all of its thresholds together and this."""
    end_s: float = 60.0
    """Within this time all processes have ended after a signal that ends the job."""

    @property
    def hung_s(self) -> float:
        """Without a new step."""
        limits = self.thresholds
        return (
            limits.frozen_s
            + limits.silent_s
            + limits.hung_s
            + limits.host_s
            + limits.store_s
            + self.beyond_thresholds_s
        )

    @property
    def start_s(self) -> float:
        """Until the first step."""
        return self.thresholds.start_s + self.beyond_thresholds_s


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobRun:
    """One run, when it was over."""

    folder: Path
    injected: tuple[Injected, ...]
    missed: tuple[str, ...]
    """Faults that could not be carried out, and why."""
    reports: tuple[CompletedStep, ...]
    noticed: tuple[Noticed, ...]
    code: int | None
    """None: it did not end."""
    hung: str
    """Why it counts as hung, with the numbers; empty if it does not."""
    leavings: Leavings
    is_recorded: bool = False
    """Whether the reports are those of the record, which has all steps of each rank and who was lost."""
    may_be_lost_at: tuple[tuple[int, float], ...] = ()
    """Each rank that got a signal of a fault that could not be carried out, and when."""


class _LiveRun:
    """A run under way."""

    def __init__(self, command: Command, folder: Path) -> None:
        self.folder, self.log = folder, folder / "log.txt"
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        self.mark = MARK, uuid.uuid4().hex
        words = [word.replace(RUN, str(folder)) for word in command.words]
        given = {name: value.replace(RUN, str(folder)) for name, value in (os.environ | command.environment).items()}
        own = {self.mark[0]: self.mark[1], "TMPDIR": str(self.temporary), "PYTHONUNBUFFERED": "1"}
        self.before = leavings.files_there()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command.program, f"--ntp-run-dir={folder}", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=given | own,
                start_new_session=True,  # Ctrl-C is for this command, which then ends the job
            )
        self.view = JobView(folder, self.log, line=command.line)
        found = processes.read(self.process.pid)
        assert found is not None, "it is our child"
        self.supervisor = found

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None

    def kill(self) -> None:
        """All that is left of it."""
        processes.kill_all([*processes.marked(*self.mark), self.supervisor])
        self.process.wait()


def run_job(
    command: Command,
    folder: Path,
    queue: list[FaultKind],
    *,
    pace: InjectionPace,
    chosen: random.Random,
    wait: Wait,
    say: Callable[[str], None] = lambda _: None,
) -> JobRun:
    """Start the job and inject faults from the front of the queue, which are taken from it, until the job is over."""
    with _no_core_files():
        running = _LiveRun(command, folder)
    injector = Injector(
        running.supervisor,
        running.view,
        chosen=chosen,
        blocks_of=pace.blocks_of,
        held_s=held_at_most_s(pace.thresholds),
        joiner_s=pace.whole_s,
        wait=wait,
    )
    faults = _Faults(running, injector, queue, pace=pace, chosen=chosen, say=say)
    try:
        hung = _until_it_is_over(running, faults, pace, wait)
        return _found(running, faults, hung, pace, wait)
    finally:
        running.kill()


def _until_it_is_over(running: _LiveRun, faults: "_Faults", pace: InjectionPace, wait: Wait) -> str:
    """Returns why it is hung, or nothing."""
    view, moved_at, newest = running.view, time.monotonic(), 0
    while not running.is_over:
        wait(_LOOK_S)
        view.look()
        if faults.has_ended_it:
            return _until_it_has_ended(running, pace, wait)
        now = time.monotonic()
        injected = faults.step()
        if injected or view.newest != newest:
            moved_at, newest = time.monotonic(), view.newest
        limit = pace.hung_s if newest else pace.start_s
        if now - moved_at > limit:
            return f"no new step in {now - moved_at:.0f} s after step {newest} (limit {limit:g} s)"
    return ""


def _until_it_has_ended(running: _LiveRun, pace: InjectionPace, wait: Wait) -> str:
    until = time.monotonic() + pace.end_s
    while not running.is_over:
        if time.monotonic() > until:
            return f"ntp run was there {pace.end_s:g} s after a signal that ends it"
        wait(_LOOK_S)
    return ""


def _found(running: _LiveRun, faults: "_Faults", hung: str, pace: InjectionPace, wait: Wait) -> JobRun:
    if hung:
        there = processes.marked(*running.mark)
        (running.folder / "hung.txt").write_text("\n".join((hung, *map(processes.where, there))) + "\n")
        running.kill()
    code = None if hung else running.process.returncode
    left = leavings.look(
        running.mark,
        supervisor=running.supervisor.pid,
        before=running.before,
        temporary=running.temporary,
        limit_s=pace.end_s,
        was_killed=bool(hung) or (code is not None and code < 0),
        ended_well=code == 0,
        wait=wait,
    )
    running.view.look()
    return JobRun(
        folder=running.folder,
        injected=tuple(faults.injected),
        missed=tuple(faults.missed),
        reports=tuple(running.view.reports),
        noticed=tuple(running.view.noticed),
        code=code,
        hung=hung,
        leavings=left,
        is_recorded=running.view.is_recorded,
        may_be_lost_at=tuple(faults.may_be_lost_at),
    )


class _Faults:
    """Decides when the next fault of a run comes, and injects it."""

    def __init__(
        self,
        running: _LiveRun,
        injector: Injector,
        queue: list[FaultKind],
        *,
        pace: InjectionPace,
        chosen: random.Random,
        say: Callable[[str], None],
    ) -> None:
        self._running, self._view, self._injector, self._queue = running, running.view, injector, queue
        self._pace, self._chosen, self._say = pace, chosen, say
        self.injected, self.missed = list[Injected](), list[str]()
        self.may_be_lost_at = list[tuple[int, float]]()
        self._wanted = 0
        self._next_at: float | None = None
        self._waits_since: float | None = None
        self._tries = 0
        self._no_more = False

    @property
    def has_ended_it(self) -> bool:
        """Whether the last fault is one that ends the job."""
        return bool(self.injected) and self.injected[-1].kind.ends_job

    def step(self) -> bool:
        """Inject the next fault if it is time; whether one was."""
        if self._no_more or not self._queue:
            return False
        now = time.monotonic()
        if not self._is_complete():
            self._next_at = None
            self._waits_since = self._waits_since or now
            self._no_more = bool(self.injected) and now - self._waits_since > self._pace.whole_s
            return False
        self._waits_since = None
        if self._next_at is None:
            self._next_at = now + self._chosen.uniform(0.0, 2 * self._pace.every_s)
        if now < self._next_at:
            return False
        self._next_at = None
        return self._inject(self._queue[0])

    def _inject(self, kind: FaultKind) -> bool:
        try:
            injected = self._injector.inject(kind, over=lambda: self._running.is_over)
        except Missed as error:
            self.missed.append(f"{kind.name}: {error}")
            self.may_be_lost_at += error.may_be_lost_at
            self._tries += 1
            self._no_more = self._tries >= _TRIES
            return False
        self._queue.pop(0)
        self._tries = 0
        self.injected.append(injected)
        self._say(f"{kind.name} after step {injected.step}: {injected.words}")
        return True

    def _is_complete(self) -> bool:
        """Whether the job has gone on after the last fault, and all ranks train."""
        view = self._view
        since = self.injected[-1].step if self.injected else 0
        if view.newest < since + _STEPS_OF_A_RECOVERY:
            return False
        ranks = self._injector.ranks()
        self._wanted = max(self._wanted, len(ranks))
        if len(ranks) < self._wanted:
            return False
        if view.newest_of:
            return all(view.newest_of.get(rank, 0) >= view.newest - _STEPS_OF_A_RECOVERY for rank in ranks)
        youngest = max(process.started for process in ranks.values()) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - youngest > _JOINS_WITHIN_S


@contextlib.contextmanager
def _no_core_files() -> Iterator[None]:
    """SIGSEGV and SIGABRT would have each victim write one."""
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)


def steps_of(reports: Sequence[CompletedStep]) -> set[int]:
    """Return the steps that at least one rank has completed."""
    return {report.step for report in reports}
