"""The Trainer's loader, as the accumulation window sees one: it hands over what the Trainer's loop computes next."""

from collections import deque
from collections.abc import Sequence
from typing import Any


class TrainerFeed:
    """Stands for a `Followed` loader (`deepspeed/loaders.py`)."""

    trains = True
    is_where_the_stream_is = has_begun_the_data_epoch = True

    def __init__(self, loader: Any) -> None:
        self.sampler = _Samples(loader)
        self.stream = _Stream()
        self.in_hand: deque[int] = deque()
        """For each micro-batch that is about to be computed, how often the window had restarted by then."""

    def give(self) -> None:
        """Have the next forward compute a micro-batch of the window."""
        self.in_hand.clear()
        self.in_hand.append(self.stream.restarts)

    def hand_over(self) -> bool | None:
        """Take it: True if it belongs to the accumulation window, False if the window has restarted since, None if
        there is none."""
        return self.in_hand.popleft() == self.stream.restarts if self.in_hand else None


class _Samples:
    """What is compared of the samples across ranks."""

    def __init__(self, loader: Any) -> None:
        self.dataset = loader.dataset


class _Stream:
    """The place in the data: the Trainer's loop knows it."""

    def __init__(self) -> None:
        self.restarts = 0
        self.numbers: tuple[int, ...] = ()

    def restart(self, _step: int, numbers: Sequence[int]) -> None:
        self.restarts, self.numbers = self.restarts + 1, tuple(numbers)

    def data_epoch_of(self, _step: int) -> int:
        """No data epoch is reported: a joining rank gets its place from the others."""
        return 0
