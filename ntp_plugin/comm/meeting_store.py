"""The store through which the members of a group find each other's addresses, with waits that a break-out ends.

Gloo asks the store for the address of each peer, and waits for those that have not come yet. On a bare TCPStore such a
wait cannot be ended from outside, and it holds the connection for as long: a member that dies on the way into a group
would hold up the others, and their next attempt, for the full time limit. This store looks again and again instead.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import Store

POLL_S = 0.001


class MeetingStore(Store):
    """Another store, but whoever waits in it asks `check` between two looks, which may raise."""

    def __init__(self, inner: Store, check: Callable[[], None]) -> None:
        super().__init__()
        self._inner, self._check = inner, check

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until all keys are there; raises what `check` raises, and after the timeout torch's error."""
        deadline = time.monotonic() + (timeout or self.timeout).total_seconds()
        while not self._inner.check(list(keys)):
            self._check()
            if time.monotonic() > deadline:
                missing = [key for key in keys if not self._inner.check([key])]
                if not missing:  # they have come just now
                    return
                raise DistStoreError(f"nobody has set {', '.join(missing)} in time")
            time.sleep(POLL_S)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._inner.get(key)

    def set(self, key: str, value: Any) -> None:
        self._inner.set(key, value)

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
