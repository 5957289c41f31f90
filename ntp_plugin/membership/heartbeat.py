"""What the supervisor of a host and its ranks tell each other, through a file in shared memory.

A rank writes its own record, that it lives and moves; the supervisor writes the newest epoch that it has seen in the
job's store, so that one look at the store serves all ranks of a host. Nobody waits for anybody. When a beat came is
told by the supervisor's clock alone, as the moment at which it saw the count change.

Nobody locks anything, so what must be read together is in one word of eight bytes, which is stored in one go: when
a rank last moved, whether it waits, whether only for the end, and whether it leaves. When its wait last polled is
stored before that word and read after it, so that it is never older than what the word says. The count of its beats is
stored last.

A rank that is ready to run, and gets no CPU, does not hang: on a loaded machine the time for which the system has kept
it waiting is no time in which it stood still.
"""

import atexit
import contextlib
import dataclasses
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from ntp_plugin.membership.wait_progress import Movement
from ntp_plugin.membership.wakeup import ring

_WORD = 8
_EPOCH, _LOOKS, _FIRST_RECORD = 0, 1, 2
_COUNT, _STATE, _POLLED, _WORDS_OF_A_RECORD = 0, 1, 2, 3


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """What a rank last wrote."""

    count: int
    moved_at: float
    """On the monotonic clock, which is one for all processes of a host, and later by what it waited for a CPU since."""
    polled_at: float | None
    """When the loop of the wait that it stands in last turned, likewise; None: it does not wait for others."""
    done: bool = False
    """It waits for the end of the job, and for nothing else."""
    leaving: bool = False
    """It was the last one: the process ends."""


class HeartbeatFile:
    """The newest epoch, how often the supervisor has looked, and the records of all slots of the job; those of other
    hosts stay empty."""

    def __init__(self, path: Path, slots: int) -> None:
        self.path = path
        with path.open("a+b") as file:
            size = (_FIRST_RECORD + _WORDS_OF_A_RECORD * slots) * _WORD
            file.truncate(size)
            self._memory = mmap.mmap(file.fileno(), size)
        # Not by `struct`, which fills with zeros before it packs: the other side would see them now and then.
        self._words = memoryview(self._memory).cast("Q")

    def close(self) -> None:
        """Let go of the memory; the file stays until its owner removes it."""
        self._words.release()
        self._memory.close()

    def announce_epoch(self, epoch: int, slots: Iterable[int]) -> None:
        """And have these look, if it is a newer one."""
        newer = epoch > self._words[_EPOCH]
        self._words[_EPOCH] = epoch
        if newer:
            ring(self.path, slots)

    def newest_epoch(self) -> int:
        return self._words[_EPOCH]

    def count_look(self) -> None:
        """The supervisor has looked at all ranks of the host once more, and published whom it found lost."""
        self._words[_LOOKS] += 1

    def looks(self) -> int:
        """How often it has: while this number stands still nobody on this host would notice a loss."""
        return self._words[_LOOKS]

    def write(self, slot: int, heartbeat: Heartbeat) -> None:
        at = _FIRST_RECORD + slot * _WORDS_OF_A_RECORD
        waiting = heartbeat.polled_at is not None
        self._words[at + _POLLED] = int((heartbeat.polled_at or 0.0) * 1e9)
        self._words[at + _STATE] = (
            int(heartbeat.moved_at * 1e9) << 3 | heartbeat.done << 2 | heartbeat.leaving << 1 | waiting
        )
        self._words[at + _COUNT] = heartbeat.count

    def read(self, slot: int) -> Heartbeat:
        at = _FIRST_RECORD + slot * _WORDS_OF_A_RECORD
        count, state = self._words[at + _COUNT], self._words[at + _STATE]
        polled_at = self._words[at + _POLLED] / 1e9 if state & 1 else None
        done, leaving = bool(state & 4), bool(state & 2)
        return Heartbeat(count=count, moved_at=(state >> 3) / 1e9, polled_at=polled_at, done=done, leaving=leaving)


class HeartbeatThread:
    """Beats for one rank, on a thread of its own."""

    def __init__(
        self,
        file: HeartbeatFile,
        slot: int,
        *,
        every_s: float,
        moved: Callable[[], Movement],
        starved: Callable[[], float] | None = None,
    ) -> None:
        """`moved` tells when the rank last moved, and when its wait for others last polled, if it waits now; `starved`,
        for how long in all it has waited for a CPU (by default: the thread that makes this heart)."""
        self._file, self._slot, self._every_s, self._moved = file, slot, every_s, moved
        self._wait_for_cpu = WaitForCpu(threading.get_native_id())
        self._starved = starved or self._wait_for_cpu
        starved_by_now = self._starved()
        self._movement, self._polling = _Credited(starved_by_now), _Credited(starved_by_now)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="ntp-heart", daemon=True)

    def start(self) -> None:
        """Begin to beat. A process that ends without `stop`, by an error say, stops when the interpreter does: what it
        takes to unload its libraries is no silence."""
        self._process = os.getpid()
        atexit.register(self._stop_at_exit)
        self._thread.start()

    def _stop_at_exit(self) -> None:
        if os.getpid() == self._process:  # not in a process that a script has forked
            self.stop()

    def stop(self) -> None:
        """End the thread, if it was started, and say that there will be no more beats."""
        atexit.unregister(self._stop_at_exit)
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
            last = self._file.read(self._slot)
            self._file.write(self._slot, dataclasses.replace(last, count=last.count + 1, leaving=True))
        self._wait_for_cpu.close()

    def _beat(self) -> None:
        count = self._file.read(self._slot).count
        while True:
            count += 1
            with contextlib.suppress(ValueError):  # the file was closed under us, at the end
                self._file.write(self._slot, Heartbeat(count=count, **self._moved_or_starved()._asdict()))
            if self._stopping.wait(self._every_s):
                return

    def _moved_or_starved(self) -> Movement:
        told, starved = self._moved(), self._starved()
        moved_at = self._movement.later(told.moved_at, starved)
        if told.polled_at is None:
            return told._replace(moved_at=moved_at)
        return told._replace(polled_at=self._polling.later(told.polled_at, starved))


class _Credited:
    """A time that is told the later, the longer its thread has been kept from a CPU since."""

    def __init__(self, starved: float) -> None:
        self._at, self._before, self._last = 0.0, starved, starved

    def later(self, at: float, starved: float) -> float:
        """`starved` is for how long in all the thread has waited for a CPU by now."""
        if at != self._at:  # somewhere since the last look
            self._at, self._before = at, self._last
        self._last = starved
        return at + starved - self._before


class WaitForCpu:
    """For how many seconds a thread of this process was ready to run and was not run; 0 where Linux does not tell."""

    def __init__(self, thread: int) -> None:
        """Opened once: what a process holds is to be the same at all times."""
        self._descriptor: int | None = None
        with contextlib.suppress(OSError):
            self._descriptor = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY)

    def __call__(self) -> float:
        if self._descriptor is None:
            return 0.0
        try:
            _ran, waited, _turns = os.pread(self._descriptor, 128, 0).split()
        except (OSError, ValueError):
            return 0.0
        return int(waited) / 1e9

    def close(self) -> None:
        """Let go of it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
