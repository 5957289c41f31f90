"""A rank of a job whose copies are measured: it records its clocks and plants what its kind asks for.

Planted is what copies are compared with, or what a check must detect: bytes moved in place of copies, a processor for
the copying threads, sleep, waste.
"""

import dataclasses
import hashlib
import os
import threading
import time
import types
from collections.abc import Container, Sequence
from typing import Any

from benchmarks.bare_copies import Bare
from benchmarks.copies_alone import RANKS, SHARERS, TP, bytes_wanted
from ntp_plugin.copies.replicator import Replicator, Snapshot
from ntp_plugin.recovery.job_copies import JobCopies
from ntp_plugin.telemetry import Copied
from ntp_plugin.testing.ranks import Rank
from tests.harness.parity.live import Lived, Play

SHORT, LONG = 6, 48
"""Samples of a step, of 64 tokens each."""
COPYING = "ntp-copies"
"""How the names of all threads begin that make or take copies."""
_SOMETHING = bytes(1 << 16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """Clocks of copies, and of the job that makes them."""

    what: str
    mode: str
    samples: int = LONG
    per_host: int = 0
    tp: int = TP
    dp: int = RANKS // TP
    spared: bool = False
    """Whether they have a processor of their own."""
    bare: bool = False
    """Whether in their place as many bytes are moved, by as few calls as there may be."""
    asleep: float = 0.0
    """Of each step with a copy the thread that trains sleeps so much."""
    wasteful: float = 0.0
    """Of all processors' time in such a step the threads that make copies waste so much."""

    @property
    def short(self) -> bool:
        """Whether its ratio is judged by itself."""
        return self.samples == SHORT

    @property
    def alike(self) -> "Kind":
        """The kind of a job apart from the length of its steps."""
        return dataclasses.replace(self, what="", samples=0)

    @property
    def explained(self) -> bool:
        """Whether it is compared with what as many bytes take."""
        return not (self.spared or self.bare or self.asleep)

    @property
    def judged(self) -> bool:
        """Whether any claim is on it."""
        return not (self.bare or self.asleep or self.wasteful)


@dataclasses.dataclass(frozen=True)
class Clocked(Play):
    """A rank that writes down what its clocks say where each step begins."""

    kind: Kind = Kind(what="near copies", mode="near")

    def _play(self, rank: Rank) -> Lived:
        read, begun, begin = list[list[Any]](), set[int](), JobCopies.begin

        def read_and_begin(copies: JobCopies) -> None:
            if self.kind.bare:  # nothing is looked for either
                copies._parts, copies._carried = list, types.SimpleNamespace(extras=dict)
            clocks = time.monotonic(), time.process_time(), time.thread_time(), _of_threads_that_copy()
            read.append([rank.slot, copies.state_of, *clocks])
            begin(copies)
            begun.update([copies.state_of] if copies._last == copies.state_of else [])

        setattr(JobCopies, "begin", read_and_begin)  # noqa: B010  (a plain assignment is not for methods)
        if self.kind.spared:
            _have_copies_made_on_the_last_processor()
        if self.kind.bare:
            _have_bytes_moved(self.kind)
        if self.kind.asleep:
            _have_it_sleep(self.kind.asleep, read, begun)
        if self.kind.wasteful:
            _have_it_wasted(self.kind.wasteful, read)
        lived = super()._play(rank)
        rank.write(read)
        return lived


def _of_threads_that_copy() -> float:
    """Processor seconds of those that make copies here, and of those that take what others send."""
    those = [thread.ident for thread in threading.enumerate() if thread.name.startswith(COPYING)]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in those if ident is not None)


def _have_copies_made_on_the_last_processor() -> None:
    """Bind the copying threads to one processor, and all else to the others."""
    *others, last = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, others)
    begin = threading.Thread.run

    def run(thread: threading.Thread) -> None:
        if thread.name.startswith(COPYING):
            os.sched_setaffinity(threading.get_native_id(), [last])
        begin(thread)

    setattr(threading.Thread, "run", run)  # noqa: B010


def _have_bytes_moved(kind: Kind) -> None:
    """In place of copies."""
    bare = Bare(bytes_wanted(kind.tp) // (kind.tp * kind.dp), kind.mode, sharers=len(SHARERS))

    def moved(made: Replicator, snapshot: Snapshot, *_: Any) -> bool:
        began = time.monotonic()
        size = bare.move(made._taken.set)
        made._near = True
        seconds = time.monotonic() - began
        made._done(Copied(step=snapshot.version.step, size=size, taken_s=seconds, seconds=seconds, far=0))
        return True

    setattr(Replicator, "_copy", moved)  # noqa: B010


def _have_it_sleep(part: float, read: Sequence[Sequence[Any]], begun: Container[int]) -> None:
    """In each step with a copy, once that is taken."""
    wait = Replicator.wait_until_taken

    def wait_and_sleep(made: Replicator) -> None:
        wait(made)
        if len(read) > 1 and read[-1][1] in begun:
            time.sleep(part * (read[-1][2] - read[-2][2]))

    setattr(Replicator, "wait_until_taken", wait_and_sleep)  # noqa: B010


def _have_it_wasted(part: float, read: Sequence[Sequence[Any]]) -> None:
    """Waste processor time in each rank after its copy; no memory is read for it."""
    copy, of_a_rank = Replicator._copy, part * (os.cpu_count() or 1) / RANKS

    def copy_and_waste(made: Replicator, *asked: Any) -> bool:
        ok = copy(made, *asked)
        until = time.thread_time() + (of_a_rank * (read[-1][2] - read[-2][2]) if len(read) > 1 else 0.0)
        while time.thread_time() < until:
            hashlib.blake2b(_SOMETHING)
        return ok

    setattr(Replicator, "_copy", copy_and_waste)  # noqa: B010
