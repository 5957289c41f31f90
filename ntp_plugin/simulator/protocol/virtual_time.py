"""A clock whose events are functions, and the wires with their delays.

A message is never lost for good: both wires stand for TCP, so that a loss is a delay of a retransmission. What a link
between two hosts that is cut has to carry does not come at all.
"""

import heapq
from collections.abc import Callable
from random import Random
from typing import Any

RETRANSMISSION_S = 0.2
"""The least that Linux waits before it sends a TCP segment again (TCP_RTO_MIN)."""


class VirtualTime:
    """What happens next. Events of the same moment come in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self.passed = 0
        """Events so far."""
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._planned = 0

    def after(self, seconds: float, event: Callable[..., None], *facts: Any) -> None:
        """Plan an event."""
        self._planned += 1
        heapq.heappush(self._events, (self.now + seconds, self._planned, event, facts))

    def step(self) -> bool:
        """Let the next event happen; False where there is none."""
        if not self._events:
            return False
        self.now, _, event, facts = heapq.heappop(self._events)
        self.passed += 1
        event(*facts)
        return True


class Wires:
    """Draws how long a message takes; each takes its own time, so that they overtake each other."""

    def __init__(self, random: Random, *, mean_s: float, loss: float) -> None:
        self._random, self._mean_s, self._loss = random, mean_s, loss

    def delay(self) -> float:
        """Return the delay of one message: most come soon, some late, and lost ones later."""
        delay = self._random.expovariate(1 / self._mean_s)
        while self._loss and self._random.random() < self._loss:
            delay += RETRANSMISSION_S
        return delay

    def calm(self) -> None:
        """From here on nothing is lost and nothing is late."""
        self._mean_s, self._loss = min(self._mean_s, 0.002), 0.0
