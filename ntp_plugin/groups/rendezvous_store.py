"""The store through which the members of a group find each other's addresses, with interruptible waits.

Gloo asks the store for the address of each peer, and waits for peers that have not come yet. On a bare TCPStore such a
wait cannot be ended from outside, and it blocks the connection: a member that dies on the way into a group would delay
the others, and their next attempt, for the full time limit. This store polls instead.

An address is written once, so a found one is cached until gloo takes it, which asks three times for each peer; its own
address, which gloo asks for as well, is not looked up at all. A round trip wakes the store's process, and each member
makes hundreds while a job regroups.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import Store

from ntp_plugin.membership.store import look_up

FIRST_POLL_S, LAST_POLL_S = 0.001, 0.005
"""First and longest polling interval, each half as long again as the one before: all polls wake the same process."""
_ADDRESS = "/reconfigure/"
"""Part of the keys of all addresses, and of no others."""


class RendezvousStore(Store):
    """Wraps a store; a wait in it calls `check` between two polls, which may raise."""

    def __init__(self, inner: Store, check: Callable[[], None]) -> None:
        super().__init__()
        self._inner, self._check = inner, check
        self._addresses: dict[str, bytes] = {}
        """Addresses found or written, and not yet taken."""

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist; raises what `check` raises, and torch's error after the timeout."""
        deadline = time.monotonic() + (timeout or self.timeout).total_seconds()
        pause = FIRST_POLL_S
        while missing := [key for key in keys if not self._is_there(key)]:
            self._check()
            if time.monotonic() > deadline:
                raise DistStoreError(f"no process has set {', '.join(missing)} in time")
            time.sleep(pause)
            pause = min(1.5 * pause, LAST_POLL_S)

    def _is_there(self, key: str) -> bool:
        if _ADDRESS not in key:
            return self._inner.check([key])
        if key not in self._addresses and (value := look_up(self._inner, key)) is not None:
            self._addresses[key] = value
        return key in self._addresses

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._addresses.pop(key, None) or self._inner.get(key)

    def set(self, key: str, value: Any) -> None:
        self._inner.set(key, value)
        if _ADDRESS in key:
            self._addresses[key] = bytes(value)

    def add(self, key: str, amount: int) -> int:
        return self._inner.add(key, amount)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._inner.compare_set(key, expected, desired)

    def check(self, keys: list[str]) -> bool:
        return self._inner.check(keys)

    def delete_key(self, key: str) -> bool:
        return self._inner.delete_key(key)

    def num_keys(self) -> int:
        return self._inner.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        self._inner.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        timeout: timedelta = self._inner.timeout  # type: ignore[attr-defined]
        return timeout
