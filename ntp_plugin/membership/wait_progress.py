"""What a process shows of itself while it waits for others: that it waits, and that the loop of its wait still turns.

A flag alone would prove too little: a signal handler that never returns, entered in the middle of a wait, leaves it set
for ever. So whoever waits calls `poll` each time its loop turns, and a rank that has stopped polling is hung, whatever
its flag says. Imports no torch.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple


class Movement(NamedTuple):
    """What the heartbeat of a process tells of it."""

    moved_at: float
    """When it last entered or left a wait for others."""
    polled_at: float | None = None
    """When the loop of the wait that it is in last turned; None: it does not wait."""
    done: bool = False
    """It waits for the end of the job, and for nothing else."""


class CollectiveWait:
    """A context in which this process waits for others; no generator, because a step has many."""

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
        """Record that the wait loop still turns."""
        self._polled_at = time.monotonic()

    @contextlib.contextmanager
    def at_the_end(self) -> Iterator["CollectiveWait"]:
        """This process has nothing left to do, and waits for others that may have."""
        self._done = True
        try:
            with self:
                yield self
        finally:
            self._done = False

    def movement(self) -> Movement:
        """What the heartbeat tells of it."""
        return Movement(self._moved_at, self._polled_at if self._depth > 0 else None, self._done)
