"""Records that this process waits for others, and that the loop of its wait still polls.

A flag alone proves too little: a signal handler that is entered during a wait and never returns leaves it set for ever.
So a wait calls `poll` in each iteration of its loop, and a rank that has stopped polling is hung, whatever its flag
says. Imports no torch.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple


class Movement(NamedTuple):
    """The times that a heartbeat reports."""

    moved_at: float
    """When the process last entered or left a wait for others."""
    polled_at: float | None = None
    """When the loop of its current wait last polled; None: it does not wait."""
    done: bool = False
    """It waits for the end of the job only."""


class CollectiveWait:
    """A context in which this process waits for others. A class and no generator, because a step has many waits."""

    def __init__(self) -> None:
        self._moved_at = self._polled_at = time.monotonic()
        self._depth, self._done = 0, False

    def __enter__(self) -> "CollectiveWait":
        self._moved_at = self._polled_at = time.monotonic()
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._moved_at, self._depth = time.monotonic(), self._depth - 1

    def poll(self) -> None:
        """Record that the wait loop still runs."""
        self._polled_at = time.monotonic()

    @contextlib.contextmanager
    def at_the_end(self) -> Iterator["CollectiveWait"]:
        """Wait with nothing left to do, for others that may have work."""
        self._done = True
        try:
            with self:
                yield self
        finally:
            self._done = False

    def movement(self) -> Movement:
        """Return the times that the heartbeat reports."""
        return Movement(self._moved_at, self._polled_at if self._depth > 0 else None, self._done)
