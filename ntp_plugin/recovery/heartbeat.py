"""How ranks of a host tell their supervisor that they live and move: a file in shared memory, a record for each slot.

A rank writes its own record only, and the supervisor reads; nobody waits for anybody. When a beat came is told by the
supervisor's clock alone, as the moment at which it saw the count change.
"""

import contextlib
import dataclasses
import mmap
import struct
import threading
from collections.abc import Callable
from pathlib import Path

_RECORD = struct.Struct("=QQB7x")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """What a rank last wrote."""

    count: int
    moves: int
    waiting: bool


class HeartbeatFile:
    """The records of all slots of a host."""

    def __init__(self, path: Path, slots: int) -> None:
        self.path = path
        with path.open("a+b") as file:
            file.truncate(_RECORD.size * slots)
            self._memory = mmap.mmap(file.fileno(), _RECORD.size * slots)

    def close(self) -> None:
        """Let go of the memory; the file stays until its owner removes it."""
        self._memory.close()

    def write(self, slot: int, beat: Beat) -> None:
        _RECORD.pack_into(self._memory, slot * _RECORD.size, beat.count, beat.moves, beat.waiting)

    def read(self, slot: int) -> Beat:
        count, moves, waiting = _RECORD.unpack_from(self._memory, slot * _RECORD.size)
        return Beat(count=count, moves=moves, waiting=bool(waiting))


class Heart:
    """Beats for one rank, on a thread of its own."""

    def __init__(
        self, file: HeartbeatFile, slot: int, *, every_s: float, moved: Callable[[], tuple[int, bool]]
    ) -> None:
        """`moved` tells how often the rank has moved, and whether it waits for others now."""
        self._file, self._slot, self._every_s, self._moved = file, slot, every_s, moved
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="ntp-heart", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, if it was started."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _beat(self) -> None:
        count = self._file.read(self._slot).count
        while True:
            count += 1
            moves, waiting = self._moved()
            with contextlib.suppress(ValueError):  # the file was closed under us, at the end
                self._file.write(self._slot, Beat(count=count, moves=moves, waiting=waiting))
            if self._stopping.wait(self._every_s):
                return
