"""How long this process has waited, without the time in which it was stopped itself.

A process that is stopped (SIGSTOP, a suspended machine) and goes on finds that every deadline has passed, and would
take all others for late. So of the time from one look at this clock to the next no more than `MOST_S` counts: whoever
waits looks far more often than that while it runs.
"""

import time
from collections.abc import Callable

MOST_S = 0.5
"""Of one pause. Waits look ten times a second; on a busy machine some of the time is not counted, so that a limit is
reached later, never earlier."""


class RunningTime:
    """Seconds since it was made or began again, as far as this process ran."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, most_s: float = MOST_S) -> None:
        """`most_s`: of one pause, for who looks more rarely."""
        self._clock, self._most_s = clock, most_s
        self.begin_again()

    def begin_again(self) -> None:
        """Count from now on."""
        self._seconds, self._looked_at = 0.0, self._clock()

    def seconds(self) -> float:
        """How many there are; call it again and again."""
        now = self._clock()
        self._seconds += min(now - self._looked_at, self._most_s)
        self._looked_at = now
        return self._seconds
