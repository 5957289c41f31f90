"""Folders of a run in shared memory, where its heartbeats beat, and its copies are kept; gone with the run, or found by
the next one.

A run that is killed cannot clean up after itself. So its folder holds a lock that lives exactly as long as the process
does, and whoever makes a folder removes those beside it whose lock is free, but for those that are to stay.

Other users of the host can create folders of the same names in the same place. They are ignored everywhere
(`private_folders.py`): they are neither listed, nor read, nor locked, nor removed.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ntp_plugin.private_folders import NotPrivate, opened, private_folders

COPIES = "ntp-copies-"
"""How the folders begin in which copies of training state are kept."""
EXCERPTS = "ntp-excerpt-"
"""Those for a version of a run that lives, while somebody exports it."""
_OWNER = "owner"


class RunFolder:
    """A new folder that this process owns until `remove`, or until it ends."""

    def __init__(
        self,
        prefix: str,
        parent: Path | None = None,
        *,
        sparing: Callable[[Path], bool] = lambda _: False,
        removing: Callable[[Path], None] = lambda _: None,
    ) -> None:
        """Those of dead runs go, all but those that it is `sparing`; `removing` is told of each."""
        beside = parent or shared_memory()
        for left in list(left_by_the_dead(beside, prefix)):
            if sparing(left):
                continue
            with contextlib.suppress(OSError, NotPrivate), free(left):  # or another run removes it, or resumes from it
                removing(left)
                shutil.rmtree(left, ignore_errors=True)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=beside))
        # It gets its name when it is locked: until then nobody takes it for that of a dead run.
        unnamed = self.path / f"{_OWNER}.new"
        self._lock = os.open(unnamed, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.write(self._lock, str(os.getpid()).encode())
        unnamed.rename(self.path / _OWNER)

    def remove(self) -> None:
        """With all that is in it."""
        shutil.rmtree(self.path)
        os.close(self._lock)

    def empty(self) -> None:
        """Of all but its lock."""
        for path in self.path.iterdir():
            if path.is_dir():
                shutil.rmtree(path)

    def leave(self) -> None:
        """It stays, as that of a dead run, until the next run comes."""
        os.close(self._lock)


def owner(path: Path) -> int | None:
    """The pid of the process that made a folder, also where it is dead; None for what is no such folder."""
    try:
        return int((path / _OWNER).read_text())
    except (OSError, ValueError):
        return None


def shared_memory() -> Path:
    """Where folders of runs are."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


def left_by_the_dead(parent: Path, prefix: str) -> Iterator[Path]:
    """This user's folders whose lock is free."""
    for folder in private_folders(parent, prefix):
        with contextlib.suppress(OSError, NotPrivate), free(folder, shared=True):  # or it was just removed
            yield folder


@contextlib.contextmanager
def free(folder: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold the lock of a run's folder, so that nobody owns it meanwhile.

    Args:
        folder: That of a run.
        shared: Several may look at a folder, or resume from it, at the same time; nobody can remove it then.

    Raises:
        BlockingIOError: A run that lives owns it.
        FileNotFoundError: It has no lock, so that it is no folder of a run.
        NotPrivate: It is not this user's alone, or is gone.
    """
    with opened(folder) as there:
        lock = os.open(_OWNER, os.O_RDWR | os.O_NOFOLLOW, dir_fd=there)
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)
