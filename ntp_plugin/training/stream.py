"""Which micro-batches of the whole job a rank computes, and where it is among them.

Nominally the rank of replica `r` draws its own micro-batches from its own loader, `per_step` for each step, turn after
turn through the data. A micro-batch of the job is so named by (turn, replica, index in the turn). While somebody is
lost a rank draws some of theirs besides: numbers of `planning/batch_split.py`, in the order of the share.

Steps need not end where a turn does. What a step has of the turn before comes first.

Pure: knows no loader.
"""

import dataclasses
from collections.abc import Iterator, Sequence


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One micro-batch of the job, as the loader of its nominal rank numbers it."""

    turn: int
    replica: int
    index: int


def micro_batches(step: int, numbers: Sequence[int], *, per_step: int, per_turn: int) -> list[MicroBatch]:
    """Those of a step, from 0 on, by their numbers in its global batch."""
    found = []
    for number in numbers:
        replica, place = divmod(number, per_step)
        turn, index = divmod(step * per_step + place, per_turn)
        found.append(MicroBatch(turn=turn, replica=replica, index=index))
    return sorted(found, key=lambda one: one.turn)


class Stream:
    """Where a rank is: the next micro-batch to be drawn, of which step."""

    def __init__(self, *, per_step: int, per_turn: int, numbers: Sequence[int]) -> None:
        self.per_step, self.per_turn = per_step, per_turn
        self.step, self.drawn = 0, 0
        self.restarts = 0
        """How often it went back: what was drawn before is stale."""
        self.numbers: tuple[int, ...] = ()
        """Of the micro-batches of a global batch, those that are drawn here."""
        self._deal(numbers)

    def _deal(self, numbers: Sequence[int]) -> None:
        self.numbers = tuple(numbers)
        self._now = self._of(self.step)

    def _of(self, step: int) -> list[MicroBatch]:
        return micro_batches(step, self.numbers, per_step=self.per_step, per_turn=self.per_turn)

    def peek(self) -> MicroBatch:
        """The next one."""
        return self._now[self.drawn]

    def draw(self) -> None:
        """It has been drawn."""
        self.drawn += 1
        if self.drawn == len(self._now):
            self.step, self.drawn = self.step + 1, 0
            self._now = self._of(self.step)

    def ahead(self, turn: int) -> Iterator[MicroBatch]:
        """All from here to the end of a turn, for who prepares them before they are drawn; nothing is drawn."""
        return self._ahead(turn, self.step, self.drawn)

    def _ahead(self, turn: int, step: int, at: int) -> Iterator[MicroBatch]:
        now = self._of(step)
        while now[at].turn <= turn:
            yield now[at]
            at += 1
            if at == len(now):
                step, at = step + 1, 0
                now = self._of(step)

    def turn_of(self, step: int) -> int:
        """That a step begins in."""
        return step * self.per_step // self.per_turn

    def first_step_of(self, turn: int) -> int:
        """That begins in a turn."""
        return -(-turn * self.per_turn // self.per_step)

    def restart(self, step: int, numbers: Sequence[int]) -> None:
        """From the first micro-batch of a step on, with these numbers of each global batch."""
        self.step, self.drawn, self.restarts = step, 0, self.restarts + 1
        self._deal(numbers)
