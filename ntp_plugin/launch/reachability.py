"""Tests whether hosts can connect to each other: every host listens at an endpoint, and the others connect to it.

An endpoint accepts a connection and closes it without a byte. It is bound to the address by which its host reaches the
job's store.
"""

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Mapping

type Address = tuple[str, int]


class RefusingEndpoint:
    """A listening socket that accepts each connection and closes it at once, on a thread of its own."""

    def __init__(self, address: str) -> None:
        self._listener = socket.create_server((address, 0))
        host, port = self._listener.getsockname()[:2]
        self.address: Address = (host, port)
        self._thread = threading.Thread(target=self._answer, name="ntp-endpoint", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        with contextlib.suppress(OSError):  # wakes the thread; an unconnected socket says so
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _answer(self) -> None:
        while True:
            try:
                knocking, _ = self._listener.accept()
            except OSError:  # closed
                return
            knocking.close()


def unreachable(endpoints: Mapping[int, Address], *, timeout_s: float) -> tuple[int, ...]:
    """Connect to all endpoints at once; return the hosts that do not answer within the timeout."""
    waiting = selectors.DefaultSelector()
    for host, address in endpoints.items():
        knocking = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
        knocking.setblocking(False)
        knocking.connect_ex(address)
        waiting.register(knocking, selectors.EVENT_WRITE, host)
    reached, deadline = set(), time.monotonic() + timeout_s
    while waiting.get_map() and (left := deadline - time.monotonic()) > 0:
        for key, _ in waiting.select(left):
            answered: socket.socket = key.fileobj  # type: ignore[assignment]
            if not answered.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                reached.add(key.data)
            waiting.unregister(answered)
            answered.close()
    for key in list(waiting.get_map().values()):
        key.fileobj.close()  # type: ignore[union-attr]
    waiting.close()
    return tuple(sorted(endpoints.keys() - reached))
