"""How a supervisor wakes the ranks of its host when there is a newer epoch, so that none has to look again and again.

The epoch itself stands in shared memory (`heartbeat.py`); a ring says no more than "look". It is a datagram to a socket
of the rank's own, with a name that follows from the file's path and the slot. The name is no file: there is nothing to
remove, and it is free as soon as the process is gone. A ring that is lost, and one from somebody else, do no harm,
because a rank looks by itself as well, only seldom. Where the name is taken (the process that sat in the slot before
has not ended yet) it looks often.

A thread that looked every 5 ms took a hundredth of a core of each rank, in jobs that lose nobody. The system loses no
ring: it refuses one only where ten wait that were not heard yet. So to look once in a second is often enough.
"""

import contextlib
import hashlib
import socket
from collections.abc import Iterable
from pathlib import Path

_LOOK_S = 1.0
"""For when a ring was lost."""
_LOOK_OFTEN_S = 0.005


class WakeUp:
    """A rank's."""

    def __init__(self, path: Path, slot: int) -> None:
        self._name = _name(path, slot)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(_LOOK_S)
        try:
            self._socket.bind(self._name)
        except OSError:
            self._socket.settimeout(_LOOK_OFTEN_S)

    def wait(self) -> None:
        """Until it is time to look."""
        with contextlib.suppress(TimeoutError):
            self._socket.recv(1)

    def wake(self) -> None:
        """Whoever waits in this process."""
        _ring([self._name])

    def close(self) -> None:
        """Nobody waits any more."""
        self._socket.close()


def ring(path: Path, slots: Iterable[int]) -> None:
    """As the supervisor: those of these slots that are processes of this host."""
    _ring([_name(path, slot) for slot in slots])


def _ring(names: Iterable[str]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ringing:
        ringing.setblocking(False)
        for name in names:
            with contextlib.suppress(OSError):  # nobody is there, or it has been rung often
                ringing.sendto(b"\0", name)


def _name(path: Path, slot: int) -> str:
    told = hashlib.blake2b(str(path.resolve()).encode(), digest_size=16).hexdigest()
    return f"\0ntp/{told}/{slot}"
