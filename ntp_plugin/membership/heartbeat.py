"""Heartbeats of the ranks of a host, and the newest epoch for them, in a file in shared memory.

A rank writes its own record, which shows that it lives and moves. The supervisor writes the newest epoch that it has
seen in the job's store, so that one poll of the store serves all ranks of a host. Neither side waits for the other. The
supervisor's clock alone dates a heartbeat: its time is when the supervisor saw the count change.

There are no locks, so fields that must be read together share one word of eight bytes, which is stored in one go: when
a rank last moved, whether it waits, whether only for the end, and whether it leaves. The time of its last poll is
stored before that word and read after it, so it is never older than what the word says. The heartbeat count is stored
last.

A rank that is ready to run and gets no CPU is not hung: on a loaded machine the time in which the system has kept it
waiting does not count as time without movement.
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
    """The latest record of a rank."""

    count: int
    moved_at: float
    """On the monotonic clock, which all processes of a host share, plus the time that it has waited for a CPU since."""
    polled_at: float | None
    """When the loop of its current wait last polled, likewise; None: it does not wait for others."""
    done: bool = False
    """It waits for the end of the job only."""
    leaving: bool = False
    """This is the last heartbeat: the process ends."""


class HeartbeatFile:
    """The newest epoch, the number of scans by the supervisor, and the records of all slots of the job; those of other
    hosts stay empty."""

    def __init__(self, path: Path, slots: int) -> None:
        self.path = path
        with path.open("a+b") as file:
            size = (_FIRST_RECORD + _WORDS_OF_A_RECORD * slots) * _WORD
            file.truncate(size)
            self._memory = mmap.mmap(file.fileno(), size)
        # Not with `struct`, which writes zeros before it packs: the other side would sometimes see them.
        self._words = memoryview(self._memory).cast("Q")

    def close(self) -> None:
        """Release the memory; the file stays until its owner removes it."""
        self._words.release()
        self._memory.close()

    def announce_epoch(self, epoch: int, slots: Iterable[int]) -> None:
        """Store the epoch, and wake these slots if it is newer than the stored one."""
        newer = epoch > self._words[_EPOCH]
        self._words[_EPOCH] = epoch
        if newer:
            ring(self.path, slots)

    def newest_epoch(self) -> int:
        return self._words[_EPOCH]

    def count_look(self) -> None:
        """Count one more scan of all ranks by the supervisor, with the losses it found published."""
        self._words[_LOOKS] += 1

    def looks(self) -> int:
        """Number of scans; while it does not grow, no loss on this host would be noticed."""
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
    """Sends the heartbeats of one rank, on a thread of its own."""

    def __init__(
        self,
        file: HeartbeatFile,
        slot: int,
        *,
        every_s: float,
        moved: Callable[[], Movement],
        starved: Callable[[], float] | None = None,
    ) -> None:
        """`moved` returns when the rank last moved, and when its wait last polled, if it waits now. `starved` returns
        for how long in all it has waited for a CPU (by default: the thread that creates this object)."""
        self._file, self._slot, self._every_s, self._moved = file, slot, every_s, moved
        self._wait_for_cpu = WaitForCpu(threading.get_native_id())
        self._starved = starved or self._wait_for_cpu
        starved_by_now = self._starved()
        self._movement, self._polling = _Credited(starved_by_now), _Credited(starved_by_now)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="ntp-heart", daemon=True)

    def start(self) -> None:
        """Begin to send. If a process ends without `stop`, e.g. by an error, the interpreter's exit stops the thread,
        so that the time to unload libraries does not count as silence."""
        self._process = os.getpid()
        atexit.register(self._stop_at_exit)
        self._thread.start()

    def _stop_at_exit(self) -> None:
        if os.getpid() == self._process:  # not in a process that a script has forked
            self.stop()

    def stop(self) -> None:
        """End the thread, if it was started, and announce that no heartbeats follow."""
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
        movement, starved = self._moved(), self._starved()
        moved_at = self._movement.later(movement.moved_at, starved)
        if movement.polled_at is None:
            return movement._replace(moved_at=moved_at)
        return movement._replace(polled_at=self._polling.later(movement.polled_at, starved))


class _Credited:
    """A time that moves later by as long as its thread has been kept from a CPU since."""

    def __init__(self, starved: float) -> None:
        self._at, self._before, self._last = 0.0, starved, starved

    def later(self, at: float, starved: float) -> float:
        """Return `at`, moved later; `starved` is the thread's total wait for a CPU so far."""
        if at != self._at:  # it moved at some time since the last call
            self._at, self._before = at, self._last
        self._last = starved
        return at + starved - self._before


class WaitForCpu:
    """Measures for how many seconds a thread of this process was ready but did not run; 0 if Linux does not tell."""

    def __init__(self, thread: int) -> None:
        """Opens the file once: the descriptors of a process must not change while a group finds its sockets."""
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
        """Close the descriptor."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
