"""Finds the sockets that process groups opened, and shuts them from outside.

Gloo's `abort()` does nothing, and a collective with a lost peer would wait for its full time limit. Breaking its
sockets does end it. A socket is identified by descriptor *and* inode, so that a descriptor that was closed and reused
elsewhere is never touched.

All groups are interrupted together, so one scan before and one after serve any number of them: a scan asks the kernel
for every descriptor of this process, about a hundred.
"""

import contextlib
import os
import socket
import stat
from collections.abc import Callable, Iterable, Iterator

type SocketAction = Callable[[socket.socket], object]
type SocketId = tuple[int, str]
"""A descriptor, and its expected target ("socket:[inode]")."""


class Connections:
    """The sockets of all groups of this process."""

    def __init__(self) -> None:
        self._sockets: frozenset[SocketId] = frozenset()

    @contextlib.contextmanager
    def made_here(self, *, instead: bool = False) -> Iterator[None]:
        """Record the sockets that groups open in this block; with `instead`, shut and forget all earlier ones."""
        before = open_sockets()
        try:
            yield
        finally:
            found = connected_since(before)
            self._sockets = found if instead else self._sockets | found

    def shut(self) -> int:
        """Break all connections, from any thread; return how many there were."""
        return shut(self._sockets)


def open_sockets() -> frozenset[SocketId]:
    """List all sockets of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  (a recovery looks twice for each group: paths are slow)
        descriptor = int(name)
        inode = _inode(descriptor)
        if inode:
            found.add((descriptor, inode))
    return frozenset(found)


def connected_since(before: frozenset[SocketId]) -> frozenset[SocketId]:
    """The connected sockets that were opened since `before`; listeners are left out."""
    return frozenset(found for found in open_sockets() - before if _with_socket(found, socket.socket.getpeername))


def shut(sockets: Iterable[SocketId]) -> int:
    """Break both directions of the sockets that are still open; return how many. Their owner closes them."""
    return sum(_with_socket(found, lambda open_: open_.shutdown(socket.SHUT_RDWR)) for found in sockets)


def _with_socket(found: SocketId, act: SocketAction) -> bool:
    """Act on a duplicate of the descriptor, if it is still the same socket; return whether that succeeded."""
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
    """The target of a socket's descriptor, as /proc names it; empty if it is no socket, or closed."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return ""
    return f"socket:[{found.st_ino}]" if stat.S_ISSOCK(found.st_mode) else ""
