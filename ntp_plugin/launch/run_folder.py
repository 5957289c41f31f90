"""The folder of a run in shared memory, where its heartbeats beat; gone with the run, or found by the next one.

A run that is killed cannot clean up after itself. So its folder holds a lock that lives exactly as long as the process
does, and whoever makes a folder removes those beside it whose lock is free.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_OWNER = "owner"


class RunFolder:
    """A new folder that this process owns until `remove`, or until it ends."""

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        beside = parent or _shared_memory()
        for left in _left_by_the_dead(beside, prefix):
            shutil.rmtree(left, ignore_errors=True)  # another run may be removing it as well
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=beside))
        # It gets its name when it is locked: until then nobody takes it for that of a dead run.
        unnamed = self.path / f"{_OWNER}.new"
        self._lock = os.open(unnamed, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / _OWNER)

    def remove(self) -> None:
        """With all that is in it."""
        shutil.rmtree(self.path)
        os.close(self._lock)


def _shared_memory() -> Path:
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


def _left_by_the_dead(parent: Path, prefix: str) -> Iterator[Path]:
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # somebody else's folder, or one whose lock is held, or just removed
            lock = os.open(folder / _OWNER, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield folder
            finally:
                os.close(lock)
