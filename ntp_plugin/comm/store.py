"""The small store that agreement needs, on any torch store (a TCPStore, a prefix of the rendezvous' own).

Connections are opened at start and never while recovering: opening one takes a name look-up, which can stall for
seconds just when names are in trouble. A store object is one connection and serves one thread.
"""

import contextlib
import socket
from collections.abc import Iterator, Sequence
from typing import Protocol

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from ntp_plugin.errors import StoreLost


class KeyStore(Protocol):
    """Keys that are written once."""

    def read(self, key: str) -> str | None:
        """The value, or None while nobody has created the key. Never waits."""

    def create(self, key: str, value: str) -> str:
        """Create the key unless somebody has; returns the value that it has now."""

    def present(self, keys: Sequence[str]) -> bool:
        """Whether all these keys were created. Never waits."""


class TorchStore:
    """A `KeyStore` on one connection of a torch store; raises `StoreLost` when the connection breaks."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self, key: str) -> str | None:
        with _answered():
            value = look_up(self._store, key)
            return None if value is None else value.decode()

    def create(self, key: str, value: str) -> str:
        with _answered():
            return str(self._store.compare_set(key, "", value).decode())

    def present(self, keys: Sequence[str]) -> bool:
        with _answered():
            return bool(self._store.check(list(keys)))

    def count(self, key: str, more: int = 0) -> int:
        """Add to a counter, which begins at 0, and return it: for beats, the one thing that is not written once."""
        with _answered():
            return int(self._store.add(key, more))


def look_up(store: Store, key: str) -> bytes | None:
    """The value, or None: in one round trip, where a check and a get take two. A value is never one zero byte."""
    value: bytes = store.compare_set(key, _NOBODYS, _NOBODYS)  # sets nothing: this is not what a missing key expects
    return None if value == _NOBODYS.encode() else value


_NOBODYS = "\0"


@contextlib.contextmanager
def _answered() -> Iterator[None]:
    try:
        yield
    except DistError as error:
        reason = str(error).splitlines()[0]
        raise StoreLost(
            f"the job's store does not answer ({reason})",
            way_out="restart the job from its last checkpoint; `ntp store` keeps a store outside of the nodes",
        ) from error


def serve(host: str, port: int) -> TCPStore:
    """A store that lives as long as the object, and listens on this address alone."""
    listener = socket.create_server((host, port), backlog=4096)
    here = listener.getsockname()
    # torch takes the listening socket over, and closes it.
    return TCPStore(host, here[1], None, True, wait_for_workers=False, master_listen_fd=listener.detach())


def own_address(towards: tuple[str, int]) -> str:
    """The address that this host has on the way to another; nothing is sent."""
    family, kind, _, _, target = socket.getaddrinfo(*towards, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
