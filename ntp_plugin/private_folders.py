"""Checks on an open descriptor that a folder belongs to this user alone.

Runs leave folders in `/dev/shm` and `/tmp`, where every user of the host can create folders, files and links with any
name and any modification time. So a name proves nothing. A folder counts as ours when it is a folder and no symbolic
link, this user owns it, and nobody else may read, write or enter it. All checks use one descriptor, so that nobody can
replace the folder between two checks. Other users cannot rename or remove it afterwards, because both places have the
sticky bit.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ntp_plugin.errors import ConfigError

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class NotPrivate(ConfigError):
    """The path is not a folder to which this user alone has access."""


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[int]:
    """Open a private folder for the duration of a `with` block.

    Args:
        folder: The path, whose last part must not be a symbolic link.

    Yields:
        A descriptor of the folder, for `dir_fd`.

    Raises:
        NotPrivate: The path is no folder, belongs to another user, or is open to others.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        what = "is a symbolic link" if folder.is_symlink() else f"cannot be opened as a folder ({reason})"
        raise _refusal(folder, what) from error
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise _refusal(folder, f"belongs to uid {found.st_uid}, and this is uid {os.geteuid()}")
        if found.st_mode & _OTHERS:
            raise _refusal(folder, f"has mode {stat.S_IMODE(found.st_mode):04o}, so that others may have written there")
        yield descriptor
    finally:
        os.close(descriptor)


def require_private(folder: Path) -> None:
    """Raise `NotPrivate` unless the folder belongs to this user alone."""
    with opened(folder):
        pass


def is_private(folder: Path) -> bool:
    """Return whether the folder belongs to this user alone."""
    try:
        require_private(folder)
    except NotPrivate:
        return False
    return True


def private_folders(parent: Path, prefix: str) -> list[Path]:
    """Return this user's private folders in a folder that all users may write to, sorted by name.

    Args:
        parent: The shared folder, such as `/dev/shm`.
        prefix: What the names begin with.
    """
    return [folder for folder in sorted(parent.glob(f"{prefix}*")) if is_private(folder)]


def changed_at(folder: Path) -> float:
    """Return when the folder was last changed, in seconds since 1970; 0 if it does not exist any more."""
    with contextlib.suppress(OSError):
        return folder.lstat().st_mtime
    return 0.0


def _refusal(folder: Path, what: str) -> NotPrivate:
    return NotPrivate(
        f"{folder} {what}",
        fix="name a folder that belongs to you alone (mode 0700), such as one that `ntp copies list` shows",
    )
