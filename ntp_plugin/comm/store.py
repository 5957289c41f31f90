"""The small store that agreement needs, on any torch store (a TCPStore, a prefix of the rendezvous' own).

Connections are opened at start and never while recovering: opening one takes a name look-up, which can stall for
seconds just when names are in trouble. A store object is one connection and serves one thread.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

from torch.distributed.distributed_c10d import Store


class KeyStore(Protocol):
    """Keys that are written once."""

    def read(self, key: str) -> str | None:
        """The value, or None while nobody has created the key. Never waits."""

    def create(self, key: str, value: str) -> str:
        """Create the key unless somebody has; returns the value that it has now."""

    def present(self, keys: Sequence[str]) -> bool:
        """Whether all these keys were created. Never waits."""


class TorchStore:
    """A `KeyStore` on one connection of a torch store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self, key: str) -> str | None:
        if not self._store.check([key]):
            return None
        return str(self._store.get(key).decode())

    def create(self, key: str, value: str) -> str:
        return str(self._store.compare_set(key, "", value).decode())

    def present(self, keys: Sequence[str]) -> bool:
        return bool(self._store.check(list(keys)))

    def wait(self, key: str, timeout_s: float) -> None:
        """Block this connection until the key is created; raises torch's error at the timeout."""
        self._store.wait([key], timedelta(seconds=timeout_s))
