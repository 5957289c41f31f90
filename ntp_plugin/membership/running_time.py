"""Measures how long this process has waited, without the time in which it was stopped itself.

A process that is stopped (SIGSTOP, a suspended machine) and resumes finds that every deadline has passed, and would
judge all others late. So between two readings of this clock at most `MOST_S` count: a waiting process reads it far more
often than that while it runs.
"""

import time
from collections.abc import Callable

MOST_S = 0.5
"""Most seconds that one pause counts. Waits poll ten times a second; on a busy machine some time is not counted, so
that a limit is reached later, never earlier."""


class RunningTime:
    """Counts the seconds in which this process ran, since it was created or `begin_again` was called."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, most_s: float = MOST_S) -> None:
        """`most_s`: longest pause that counts in full, for callers that poll less often."""
        self._clock, self._most_s = clock, most_s
        self.begin_again()

    def begin_again(self) -> None:
        """Restart the count."""
        self._seconds, self._looked_at = 0.0, self._clock()

    def seconds(self) -> float:
        """Return the count so far; call this repeatedly while waiting."""
        now = self._clock()
        self._seconds += min(now - self._looked_at, self._most_s)
        self._looked_at = now
        return self._seconds
