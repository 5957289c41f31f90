"""Makes the folders of a run in shared memory, for its heartbeats and its copies, and finds the folders of dead runs.

A run that is killed cannot clean up after itself. So its folder holds a file lock that lives exactly as long as the
process. A process that makes a new folder removes the others whose lock is free, except those that are to stay.

Other users of the host can create folders of the same names in the same place. These are ignored everywhere
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
"""Prefix of folders with copies of training state."""
EXCERPTS = "ntp-excerpt-"
"""Prefix of folders with one version of a live run, during an export."""
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
        """Make the folder, and remove the folders of dead runs with the same prefix.

        Args:
            prefix: What the name begins with.
            parent: Where to make it; shared memory by default.
            sparing: Returns whether the folder of a dead run stays.
            removing: Called with each folder before it is removed.
        """
        beside = parent or shared_memory()
        for left in list(left_by_the_dead(beside, prefix)):
            if sparing(left):
                continue
            with contextlib.suppress(OSError, NotPrivate), free(left):  # or another run removes it, or resumes from it
                removing(left)
                shutil.rmtree(left, ignore_errors=True)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=beside))
        # The lock file gets its name once it is locked: until then no process takes the folder for one of a dead run.
        unnamed = self.path / f"{_OWNER}.new"
        self._lock = os.open(unnamed, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.write(self._lock, str(os.getpid()).encode())
        unnamed.rename(self.path / _OWNER)

    def remove(self) -> None:
        """Remove the folder with its contents, and free the lock."""
        shutil.rmtree(self.path)
        os.close(self._lock)

    def empty(self) -> None:
        """Remove all folders in it, but keep the lock."""
        for path in self.path.iterdir():
            if path.is_dir():
                shutil.rmtree(path)

    def leave(self) -> None:
        """Free the lock and keep the folder, which then counts as one of a dead run."""
        os.close(self._lock)


def owner(path: Path) -> int | None:
    """Return the pid of the process that made a folder, alive or dead; None if it is no folder of a run."""
    try:
        return int((path / _OWNER).read_text())
    except (OSError, ValueError):
        return None


def shared_memory() -> Path:
    """Return the parent of the folders of runs."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


def left_by_the_dead(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield this user's folders with this prefix whose lock is free."""
    for folder in private_folders(parent, prefix):
        with contextlib.suppress(OSError, NotPrivate), free(folder, shared=True):  # or it was just removed
            yield folder


@contextlib.contextmanager
def free(folder: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold the lock of a dead run's folder within a `with` block.

    Args:
        folder: The folder of a run.
        shared: Let other processes hold it as well, to read it or to resume from it; none can remove it then.

    Raises:
        BlockingIOError: A live run owns it.
        FileNotFoundError: It has no lock, so it is no folder of a run.
        NotPrivate: It does not belong to this user alone, or does not exist any more.
    """
    with opened(folder) as there:
        lock = os.open(_OWNER, os.O_RDWR | os.O_NOFOLLOW, dir_fd=there)
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)
