"""Which micro-batches of the job a rank draws, and its position among them. PURE: knows no loader.

Nominally the rank of replica `r` draws its own micro-batches from its own loader, `per_step` for each step, through one
data epoch after the other. So a micro-batch of the job is named by (data epoch, replica, index in the data epoch).
While another rank is lost, a rank also draws some of that rank's: numbers of `planning/batch_split.py`, in the order of
the share.

A step need not end where a data epoch does. Its micro-batches of the earlier data epoch come first.
"""

import dataclasses
from collections.abc import Iterator, Sequence


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One micro-batch of the job, as the loader of its nominal rank numbers it."""

    number: int
    """In the global batch of its step."""
    data_epoch: int
    replica: int
    index: int


def micro_batches(step: int, numbers: Sequence[int], *, per_step: int, per_data_epoch: int) -> list[MicroBatch]:
    """The micro-batches of a step, counted from 0, by their numbers in its global batch, in the order of drawing."""
    found = []
    for number in numbers:
        replica, place = divmod(number, per_step)
        data_epoch, index = divmod(step * per_step + place, per_data_epoch)
        found.append(MicroBatch(number=number, data_epoch=data_epoch, replica=replica, index=index))
    return sorted(found, key=lambda one: one.data_epoch)


class Stream:
    """The position of a rank: the next micro-batch to draw, and its step."""

    def __init__(self, *, per_step: int, per_data_epoch: int, numbers: Sequence[int]) -> None:
        self.per_step, self.per_data_epoch = per_step, per_data_epoch
        self.step, self.drawn = 0, 0
        self.restarts = 0
        """How often it went back: what was drawn before is stale."""
        self.numbers: tuple[int, ...] = ()
        """The micro-batches of each global batch that are drawn here."""
        self._deal(numbers)

    def _deal(self, numbers: Sequence[int]) -> None:
        self.numbers = tuple(numbers)
        self._now = self._of(self.step)

    def _of(self, step: int) -> list[MicroBatch]:
        return micro_batches(step, self.numbers, per_step=self.per_step, per_data_epoch=self.per_data_epoch)

    def order_of(self, step: int) -> list[int]:
        """The numbers of the micro-batches of a step, in the order of drawing."""
        return [one.number for one in self._of(step)]

    def peek(self) -> MicroBatch:
        """The next micro-batch."""
        return self._now[self.drawn]

    def draw(self) -> None:
        """Advance to the next micro-batch."""
        self.drawn += 1
        if self.drawn == len(self._now):
            self.step, self.drawn = self.step + 1, 0
            self._now = self._of(self.step)

    def ahead(self, data_epoch: int) -> Iterator[MicroBatch]:
        """Yield all micro-batches from here to the end of a data epoch, to prepare them; nothing is drawn."""
        return self._ahead(data_epoch, self.step, self.drawn)

    def _ahead(self, data_epoch: int, step: int, at: int) -> Iterator[MicroBatch]:
        now = self._of(step)
        while now[at].data_epoch <= data_epoch:
            yield now[at]
            at += 1
            if at == len(now):
                step, at = step + 1, 0
                now = self._of(step)

    def data_epoch_of(self, step: int) -> int:
        """The data epoch in which a step begins."""
        return step * self.per_step // self.per_data_epoch

    def first_step_of(self, data_epoch: int) -> int:
        """The first step that begins in a data epoch."""
        return -(-data_epoch * self.per_data_epoch // self.per_step)

    def restart(self, step: int, numbers: Sequence[int]) -> None:
        """Continue from the first micro-batch of a step, with these numbers of each global batch."""
        self.step, self.drawn, self.restarts = step, 0, self.restarts + 1
        self._deal(numbers)
