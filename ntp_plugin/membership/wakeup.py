"""Wakes the ranks of a host when there is a newer epoch, so that none of them has to poll often.

The epoch itself is in shared memory (`heartbeat.py`); a wake-up only means "look there". It is a datagram to the rank's
own socket, whose name follows from the file's path and the slot. The name is no file: there is nothing to remove, and
it is free as soon as the process has ended. A lost wake-up, and one from another program, do no harm, because a rank
also polls by itself, only seldom. If the name is taken (the slot's earlier process has not ended yet), it polls often.

A thread that polled every 5 ms took a hundredth of a core of each rank, in jobs that lose no rank. The system loses no
wake-up: it refuses one only if ten are pending. So polling once in a second is enough.
"""

import contextlib
import hashlib
import socket
from collections.abc import Iterable
from pathlib import Path

_LOOK_S = 1.0
"""Polling interval, in case a wake-up was lost."""
_LOOK_OFTEN_S = 0.005


class WakeUp:
    """The receiving end of a rank's wake-ups."""

    def __init__(self, path: Path, slot: int) -> None:
        self._name = _name(path, slot)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(_LOOK_S)
        try:
            self._socket.bind(self._name)
        except OSError:
            self._socket.settimeout(_LOOK_OFTEN_S)

    def wait(self) -> None:
        """Block until it is time to look at the epoch."""
        with contextlib.suppress(TimeoutError):
            self._socket.recv(1)

    def wake(self) -> None:
        """Wake the thread that waits in this process."""
        _wake([self._name])

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def ring(path: Path, slots: Iterable[int]) -> None:
    """Wake these slots, as their supervisor; slots without a process on this host are ignored."""
    _wake([_name(path, slot) for slot in slots])


def _wake(names: Iterable[str]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        for name in names:
            with contextlib.suppress(OSError):  # no process is there, or enough wake-ups are pending
                sender.sendto(b"\0", name)


def _name(path: Path, slot: int) -> str:
    digest = hashlib.blake2b(str(path.resolve()).encode(), digest_size=16).hexdigest()
    return f"\0ntp/{digest}/{slot}"
