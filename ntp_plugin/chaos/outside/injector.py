"""Carries out one fault: finds who is meant, waits as its acts say, and sends the signals.

Ranks are the processes below `ntp run` that have RANK in their environment, or, where they are forked and so show that
of the process that forked them, those of which the record says that they train.
"""

import contextlib
import dataclasses
import random
import signal
import time
from collections.abc import Callable, Collection, Mapping

from ntp_plugin.chaos.ending import Wait
from ntp_plugin.chaos.outside import processes
from ntp_plugin.chaos.outside.job_view import JobView
from ntp_plugin.chaos.outside.kinds import BY_HANDLER, JOINER, OTHER, RANKS, SUPERVISOR, VICTIM, Act, FaultKind
from ntp_plugin.chaos.outside.processes import ProcessInfo

_LOOK_S = 0.02
_STANDS_STILL_S, _RAN_AT_MOST_S = 0.04, 0.004
"""A main thread waits in a collective if it has had no more than this of a processor in that time, while another rank
is stopped. Polling takes less, computing takes more."""
_TRIES = 20
"""To meet a rank while it waits."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Injected:
    """One fault that was."""

    kind: FaultKind
    at: float
    """When the first signal was sent, by the clock on the wall."""
    step: int
    """The last one that was complete then."""
    lost_at: tuple[tuple[int, float], ...]
    """Each rank whose loss has to be noticed, and when its signal was sent."""
    words: str
    """What was sent to whom."""
    may_be_lost_at: tuple[tuple[int, float], ...] = ()
    """Each rank that was stopped for longer than it was to be, because the machine was busy, and from when on."""


type Sent = tuple[Act, ProcessInfo, float]
"""A signal, to whom, and when: of a SIGCONT when it had been sent, of another one just before."""


class Missed(Exception):
    """A fault could not be carried out as its kind says; what was stopped has been continued."""

    may_be_lost_at: tuple[tuple[int, float], ...] = ()
    """Each rank that got a signal before."""


class Injector:
    """Injects the faults of one run of a job."""

    def __init__(
        self,
        supervisor: ProcessInfo,
        view: JobView,
        *,
        chosen: random.Random,
        blocks_of: int | None,
        held_s: float,
        joiner_s: float,
        wait: Wait,
    ) -> None:
        """`blocks_of`: two ranks that are lost together are in one block of so many consecutive ranks; `held_s`: for
        how long a rank may be stopped and is not taken for lost; `joiner_s`: how long a lost rank's new process is
        waited for."""
        self._supervisor, self._view, self._chosen, self._wait = supervisor, view, chosen, wait
        self._blocks_of, self._held_s, self._joiner_s = blocks_of, held_s, joiner_s

    def ranks(self) -> dict[int, ProcessInfo]:
        """Who is there now, by rank."""
        everybody = processes.all_processes()
        tree = processes.below(self._supervisor.pid, everybody)
        rank_variables = {process.pid: processes.environment(process.pid).get("RANK") for process in tree}
        found = dict[int, ProcessInfo]()
        for process in tree - {self._supervisor}:
            rank = rank_variables[process.pid]
            if (
                rank is not None and rank_variables.get(process.parent) is None
            ):  # what a rank has started has its environment
                found[int(rank)] = process
            elif rank is None and process.pid in self._view.rank_of_pid:
                found[self._view.rank_of_pid[process.pid]] = process
        return found

    def inject(self, kind: FaultKind, *, over: Callable[[], bool]) -> Injected:
        """Do all that the kind says; `over`: whether the job has ended meanwhile. Raises `Missed`."""
        ranks = self.ranks()
        if not ranks:
            raise Missed("there are no ranks")
        whom = self._choose(kind, ranks)
        sent = list[Sent]()
        try:
            return self._carry_out(kind, whom, ranks, sent, over)
        except Missed as error:
            for process in _stopped(sent):
                processes.send(process, signal.SIGCONT)
            error.may_be_lost_at = tuple((_rank(act, whom), at) for act, _, at in sent if act.whom in RANKS)
            raise
        except BaseException:  # the command was ended: nobody stays stopped for good
            for process in (*_stopped(sent), self._supervisor):
                processes.send(process, signal.SIGCONT)
            raise

    def _choose(self, kind: FaultKind, ranks: Mapping[int, ProcessInfo]) -> dict[str, int]:
        victim = self._chosen.choice(sorted(ranks))
        others = [rank for rank in sorted(ranks) if rank != victim]
        if self._blocks_of is not None:  # also who is only stopped for a moment: a busy machine may make it longer
            others = [rank for rank in others if rank // self._blocks_of == victim // self._blocks_of]
        if not others and any(act.whom == OTHER for act in kind.acts):
            raise Missed(f"rank {victim} has no other rank beside it")
        return {VICTIM: victim} | ({OTHER: self._chosen.choice(others)} if others else {})

    def _carry_out(
        self,
        kind: FaultKind,
        whom: Mapping[str, int],
        ranks: Mapping[int, ProcessInfo],
        sent: list[Sent],
        over: Callable[[], bool],
    ) -> Injected:
        before = frozenset(processes.all_processes().values())
        step = self._view.newest
        for act in kind.acts:
            if act.whom == JOINER:
                target = self._joiner(whom[VICTIM], before, over)
            else:
                target = self._supervisor if act.whom == SUPERVISOR else ranks[whom[act.whom]]
            self._wait(self._chosen.uniform(*act.after))
            self._refuse_without_handler(kind, act, target)
            if act.once_it_waits:
                self._wait_until_it_waits(target, _stopped(sent))
            at = time.time()
            if not processes.send(target, act.number) and act.number != signal.SIGCONT:
                raise Missed(f"pid {target.pid} had ended")
            sent.append((act, target, time.time() if act.number == signal.SIGCONT else at))
        return Injected(
            kind=kind,
            at=sent[0][2],
            step=step,
            lost_at=_lost(kind, whom, sent),
            words=_words(sent, whom),
            may_be_lost_at=_stopped_for_long(sent, whom, self._held_s),
        )

    def _refuse_without_handler(self, kind: FaultKind, act: Act, target: ProcessInfo) -> None:
        if kind.needs_handlers and act.number in BY_HANDLER and not processes.handles(target, act.number):
            raise Missed(f"pid {target.pid} has no handler for signal {act.number}")

    def _wait_until_it_waits(self, target: ProcessInfo, stopped: Collection[ProcessInfo]) -> None:
        """Whoever is stopped makes the others wait, and goes on for a moment when it has been stopped for too long."""
        for _ in range(_TRIES):
            until = time.monotonic() + self._held_s
            while time.monotonic() < until:
                ran = processes.ran_s(target)
                self._wait(_STANDS_STILL_S)
                if processes.ran_s(target) - ran <= _RAN_AT_MOST_S:
                    return
            for number, pause in ((signal.SIGCONT, 2 * self._held_s), (signal.SIGSTOP, 0.0)):
                for process in stopped:
                    processes.send(process, number)
                self._wait(pause)
        raise Missed(f"the main thread of pid {target.pid} never waited")

    def _joiner(self, rank: int, before: Collection[ProcessInfo], over: Callable[[], bool]) -> ProcessInfo:
        """The new process of a rank: a child of `ntp run` that says so, or a fork of the process that forks ranks."""
        until = time.monotonic() + self._joiner_s
        while time.monotonic() < until and not over():
            tree = processes.below(self._supervisor.pid, processes.all_processes())
            forking = {process.pid for process in tree if process.parent == self._supervisor.pid}
            for process in tree.difference(before):
                rank_variable = processes.environment(process.pid).get("RANK")
                is_forked = rank_variable is None and process.parent in forking & _pids(before)
                if rank_variable == str(rank) or is_forked:
                    return process
            self._wait(_LOOK_S)
        raise Missed(f"nobody took the place of rank {rank}")


def _pids(some: Collection[ProcessInfo]) -> set[int]:
    return {process.pid for process in some}


def _stopped(sent: list[Sent]) -> list[ProcessInfo]:
    return [process for act, process, _ in sent if act.number == signal.SIGSTOP]


def _rank(act: Act, whom: Mapping[str, int]) -> int:
    return whom[VICTIM if act.whom == JOINER else act.whom]


def _stopped_for_long(sent: list[Sent], whom: Mapping[str, int], held_s: float) -> tuple[tuple[int, float], ...]:
    """Each rank that was, and since when."""
    began = {process: at for act, process, at in reversed(sent) if act.number == signal.SIGSTOP}
    return tuple(
        (_rank(act, whom), began[process])
        for act, process, at in sent
        if act.number == signal.SIGCONT and act.whom in RANKS and at - began[process] > held_s
    )


def _lost(kind: FaultKind, whom: Mapping[str, int], sent: list[Sent]) -> tuple[tuple[int, float], ...]:
    """By the first signal that each got which loses it."""
    at = dict[str, float]()
    for act, _, when in sent:
        if act.whom in kind.loses and act.number != signal.SIGCONT:
            at.setdefault(act.whom, when)
    return tuple((whom[VICTIM if name == JOINER else name], when) for name, when in at.items())


def _words(sent: list[Sent], whom: Mapping[str, int]) -> str:
    first = sent[0][2]
    parts = []
    for act, process, at in sent:
        name = act.whom if act.whom in (SUPERVISOR, JOINER) else f"rank {whom[act.whom]}"
        number = f"signal {act.number}"
        with contextlib.suppress(ValueError):
            number = signal.Signals(act.number).name
        parts.append(f"{number} to {name} (pid {process.pid}) after {at - first:.3f} s")
    return ", ".join(parts)
