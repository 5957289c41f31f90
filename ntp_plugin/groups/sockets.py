"""The sockets that process groups opened, found again, and shut from outside.

Gloo's `abort()` does nothing, and a collective whose peer is gone would wait for its full time limit. What does end it
is that its sockets break. A socket is remembered by descriptor *and* inode, so that a descriptor that was closed and
used again by somebody else is never touched.

All groups are broken off together, so one look before and one after serve any number of them: a look asks the kernel
for every descriptor of this process, and there are a hundred.
"""

import contextlib
import os
import socket
import stat
from collections.abc import Callable, Iterable, Iterator

type SocketAction = Callable[[socket.socket], object]
type SocketId = tuple[int, str]
"""A descriptor, and what it must still point to ("socket:[inode]")."""


class Connections:
    """Those of all groups of this process."""

    def __init__(self) -> None:
        self._sockets: frozenset[SocketId] = frozenset()

    @contextlib.contextmanager
    def made_here(self, *, instead: bool = False) -> Iterator[None]:
        """Find what groups open in this block; `instead` of all that are known, which are shut."""
        before = open_sockets()
        try:
            yield
        finally:
            found = connected_since(before)
            self._sockets = found if instead else self._sockets | found

    def shut(self) -> int:
        """Break them all; from any thread. Returns how many there were."""
        return shut(self._sockets)


def open_sockets() -> frozenset[SocketId]:
    """All sockets of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  (a recovery looks twice for each group: paths are slow)
        descriptor = int(name)
        inode = _inode(descriptor)
        if inode:
            found.add((descriptor, inode))
    return frozenset(found)


def connected_since(before: frozenset[SocketId]) -> frozenset[SocketId]:
    """The sockets with a peer that were opened since `before`; listeners are left out."""
    return frozenset(found for found in open_sockets() - before if _with_socket(found, socket.socket.getpeername))


def shut(sockets: Iterable[SocketId]) -> int:
    """Break both directions of those that are still open; returns how many. Their owner closes them."""
    return sum(_with_socket(found, lambda open_: open_.shutdown(socket.SHUT_RDWR)) for found in sockets)


def _with_socket(found: SocketId, act: SocketAction) -> bool:
    """Act on a duplicate of the descriptor, if it is still the same socket; whether that went well."""
    descriptor, inode = found
    try:
        duplicate = os.dup(descriptor)
    except OSError:
        return False
    if _inode(duplicate) != inode:
        os.close(duplicate)
        return False
    with socket.socket(fileno=duplicate) as open_:
        try:
            act(open_)
        except OSError:  # not connected, or no longer
            return False
    return True


def _inode(descriptor: int) -> str:
    """What a descriptor of a socket points to, as /proc names it; nothing where it is none, or closed."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return ""
    return f"socket:[{found.st_ino}]" if stat.S_ISSOCK(found.st_mode) else ""
