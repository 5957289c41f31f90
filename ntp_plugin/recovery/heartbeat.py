"""What the supervisor of a host and its ranks tell each other, through a file in shared memory.

A rank writes its own record, that it lives and moves; the supervisor writes the newest epoch that it has seen in the
job's store, so that one look at the store serves all ranks of a host. Nobody waits for anybody. When a beat came is
told by the supervisor's clock alone, as the moment at which it saw the count change.

Nobody locks anything, so what must be read together is in one word of eight bytes, which is stored in one go: when
a rank last moved, whether it waits, and whether it leaves. The count of its beats is stored after it.

A rank that is ready to run, and gets no CPU, does not hang: on a loaded machine the time for which the system has kept
it waiting is no time in which it stood still.
"""

import contextlib
import dataclasses
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from ntp_plugin.recovery.bell import ring

_WORD = 8
_EPOCH, _FIRST_RECORD, _WORDS_OF_A_RECORD = 0, 1, 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """What a rank last wrote."""

    count: int
    moved_at: float
    """On the monotonic clock, which is one for all processes of a host, and later by what it waited for a CPU since."""
    waiting: bool
    leaving: bool = False
    """It was the last one: the process ends."""


class HeartbeatFile:
    """The newest epoch, and the records of all slots of the job; those of other hosts stay empty."""

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

    def tell_epoch(self, epoch: int, slots: Iterable[int]) -> None:
        """And have these look, if it is a newer one."""
        newer = epoch > self._words[_EPOCH]
        self._words[_EPOCH] = epoch
        if newer:
            ring(self.path, slots)

    def newest_epoch(self) -> int:
        return self._words[_EPOCH]

    def write(self, slot: int, beat: Beat) -> None:
        at = _FIRST_RECORD + slot * _WORDS_OF_A_RECORD
        self._words[at + 1] = int(beat.moved_at * 1e9) << 2 | beat.leaving << 1 | beat.waiting
        self._words[at] = beat.count

    def read(self, slot: int) -> Beat:
        at = _FIRST_RECORD + slot * _WORDS_OF_A_RECORD
        count, state = self._words[at], self._words[at + 1]
        return Beat(count=count, moved_at=(state >> 2) / 1e9, waiting=bool(state & 1), leaving=bool(state & 2))


class Heart:
    """Beats for one rank, on a thread of its own."""

    def __init__(
        self,
        file: HeartbeatFile,
        slot: int,
        *,
        every_s: float,
        moved: Callable[[], tuple[float, bool]],
        starved: Callable[[], float] | None = None,
    ) -> None:
        """`moved` tells when the rank last moved, and whether it waits for others now; `starved`, for how long in all
        it has waited for a CPU (by default: the thread that makes this heart)."""
        self._file, self._slot, self._every_s, self._moved = file, slot, every_s, moved
        self._wait_for_cpu = WaitForCpu(threading.get_native_id())
        self._starved = starved or self._wait_for_cpu
        self._moved_last = 0.0
        self._starved_before = self._starved_last = self._starved()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="ntp-heart", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, if it was started, and say that there will be no more beats."""
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
            moved_at, waiting = self._moved_or_starved()
            with contextlib.suppress(ValueError):  # the file was closed under us, at the end
                self._file.write(self._slot, Beat(count=count, moved_at=moved_at, waiting=waiting))
            if self._stopping.wait(self._every_s):
                return

    def _moved_or_starved(self) -> tuple[float, bool]:
        moved_at, waiting = self._moved()
        starved = self._starved()
        if moved_at != self._moved_last:  # somewhere since the last look
            self._moved_last, self._starved_before = moved_at, self._starved_last
        self._starved_last = starved
        return moved_at if waiting else moved_at + starved - self._starved_before, waiting


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
