"""A loader of accelerate that the loop trains on: it goes back, and yields a lost rank's micro-batches.

`accelerate.data_loader.DataLoaderShard` reads one batch ahead and sends it to the device. A rank's own micro-batches
come from its own iterator in the same order and with the same random draws, as long as nobody is lost. Those that were
dealt from a lost rank are drawn from the data set (`hf/batches.py`).

All ranks draw equally often. So they number their draws alike, and after a loss all agree up to which draw the batches
are stale (`AccelerateLoop.line_up`).
"""

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from accelerate.utils import send_to_device

from ntp_plugin.deepspeed.hf.batches import BatchBook, Listed
from ntp_plugin.deepspeed.loaders import like


@dataclasses.dataclass(frozen=True, slots=True)
class DrawnBatch:
    """A micro-batch that the loop has drawn."""

    restarts: int
    """How often the window had restarted by then; -1 if it counts for nothing."""
    is_last: bool
    """Whether it is the last one of this rank's share of a step."""


class Cursor:
    """The next micro-batch to draw."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.step = self.place = self.restarts = 0
        self.numbers: tuple[int, ...] = tuple(numbers)

    def restart(self, step: int, numbers: Sequence[int]) -> None:
        """Continue from the first micro-batch of a step; called by the accumulation window."""
        self.step, self.place, self.numbers = step, 0, tuple(numbers)
        self.restarts += 1

    def advance(self, share: int) -> None:
        """Go on by one micro-batch, in a step that has so many here."""
        self.place += 1
        if self.place == share:
            self.step, self.place = self.step + 1, 0

    def data_epoch_of(self, _step: int) -> int:
        """No data epoch is reported here: a joining rank goes by steps (`joining.py`)."""
        return 0


class LoopBook(BatchBook):
    """The batches of all nominal ranks; the sampler may have a generator that ranks synchronize."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader, generator=loader.synchronized_generator)
        self._first_iteration = 0

    def start(self) -> None:
        """Forget what was drawn: the data epoch that begins now is the first one."""
        self.data_epoch, self._first_iteration = 0, int(self._loader.iteration)
        self.draws.clear()
        self._batches.clear()
        self._of_rank.clear()

    def open(self) -> None:
        """Draw the batches of the data epoch, if they are not drawn yet: a joining rank must know how."""
        self.begin(self._original)

    def iteration(self, epoch: int) -> int:
        """Return the number of a data epoch as the loader counts it."""
        return self._first_iteration + epoch


class LoopFeed:
    """Stands for a `Followed` loader (`deepspeed/loaders.py`)."""

    is_where_the_stream_is = has_begun_the_data_epoch = True

    def __init__(self, loader: Any, *, index: int, each: int, replica: int) -> None:
        self.loader, self.index, self._each, self._replica = loader, index, each, replica
        self.book = LoopBook(loader)
        self.sampler = _LoopSamples(loader)
        self.stream = Cursor(range(replica * each, (replica + 1) * each))
        self.trains = False
        """Whether the engine trains on what is drawn."""
        self.in_hand: deque[DrawnBatch] = deque()
        self.now: DrawnBatch | None = None
        """The micro-batch of the newest forward."""
        self.begun = 0
        """Data epochs that the loop has begun."""
        self.draws = self.stale_until = 0
        """Draws of this rank, and up to which of them batches count for nothing."""
        self.last: Any = None
        """The newest batch."""
        self.length = len(loader.batch_sampler)
        """Micro-batches of a nominal rank in a data epoch."""
        self._own: Iterator[Any] | None = None
        self._fetched = 0
        self._kept: dict[int, Any] = {}

    # ------------------------------------------------ steps and data epochs

    @property
    def steps(self) -> int:
        """Steps in a data epoch; the last one may have fewer micro-batches than others."""
        return -(-self.length // self._each)

    def count(self, step: int) -> int:
        """Return how many micro-batches a step has in each nominal rank."""
        return min(self._each, self.length - step % self.steps * self._each)

    def is_over(self, epoch: int) -> bool:
        """Whether the next micro-batch belongs to a later data epoch."""
        return self.stream.step // self.steps > epoch

    def begin_data_epoch(self) -> int:
        """Begin a data epoch, and return its number. What nobody has trained on is forgotten: a script may look at
        its samples before it trains."""
        if not self.trains:
            self.begun, self.draws = 0, 0
            self.in_hand.clear()
            self.stream.restart(0, self.stream.numbers)
            self.loader.set_epoch(self.loader.iteration)
            self.book.start()
        self.book.data_epoch, self.begun = self.begun, self.begun + 1
        self.loader.begin()
        self.loader.set_epoch(self.loader.iteration)
        self._own = None
        return self.begun - 1

    def read_own(self) -> None:
        """Begin to read this rank's own batches of the data epoch, as its loader does."""
        self._own, self._fetched = iter(self.loader.base_dataloader.__iter__()), 0
        self._kept.clear()
        self.book.open()

    def read_own_from(self, epoch: int, index: int) -> None:
        """Begin in the middle, in a rank that has joined there."""
        mine = [self.book.samples(epoch, self._replica, at) for at in range(index, self.length)]
        self._own, self._fetched = iter(like(self.loader, Listed(mine, self.loader.batch_sampler))), index
        self._kept.clear()

    def end_data_epoch(self) -> None:
        """End it, and the workers that read for it."""
        self._own = None
        self._kept.clear()
        self.loader.iteration += 1
        self.loader.end()
        if not self.trains:
            self.in_hand.clear()

    # ------------------------------------------------ drawing

    def draw(self, share: Sequence[int]) -> Any:
        """Return the next micro-batch of a share."""
        step, place = self.stream.step, self.stream.place
        epoch, of_epoch = divmod(step, self.steps)
        is_last = place == len(share) - 1
        replica, of_step = divmod(share[place], self._each)
        if not place or share[place] != share[place - 1]:
            self.last = self._batch(epoch, replica, of_epoch * self._each + of_step)
        self.loader.end_of_dataloader = is_last and of_epoch == self.steps - 1
        self.in_hand.append(DrawnBatch(self.stream.restarts, is_last))
        self.draws += 1
        self.stream.advance(len(share))
        return self.last

    def draw_stale(self) -> Any:
        """Return a batch that counts for nothing, as other ranks have drawn one."""
        if self.last is None:
            self.last = self.any_batch()
        self.in_hand.append(DrawnBatch(-1, is_last=False))
        self.draws += 1
        return self.last

    def any_batch(self) -> Any:
        """Return a batch of the first samples, for a forward that counts for nothing."""
        loader = self.loader
        size = loader.batch_sampler.batch_size or 1
        batch = loader.collate_fn([loader.dataset[sample] for sample in range(min(size, len(loader.dataset)))])
        return batch if loader.device is None else send_to_device(batch, loader.device)

    def _batch(self, epoch: int, replica: int, index: int) -> Any:
        if replica != self._replica:
            return self.book.draw(epoch, replica, index)
        ahead = min(index + 1, self.length - 1)  # the loader of accelerate is one ahead, too
        while self._own is not None and self._fetched <= ahead:
            self._kept[self._fetched] = next(self._own)
            self._kept.pop(self._fetched - 2 * self._each - 2, None)
            self._fetched += 1
        if index not in self._kept:
            return self.book.draw(epoch, replica, index)
        batch, loader = self._kept[index], self.loader
        return batch if loader.device is None else send_to_device(batch, loader.device, loader._non_blocking)

    # ------------------------------------------------ called by the accumulation window

    def hand_over(self) -> bool | None:
        """Take the oldest drawn batch for a forward: True if it belongs to the accumulation window, False if it is
        stale, None if the loop has drawn none."""
        if not self.in_hand:
            return None
        self.now = self.in_hand.popleft()
        return self.is_fresh(self.now)

    def is_fresh(self, drawn: DrawnBatch) -> bool:
        """Whether a drawn micro-batch belongs to the accumulation window."""
        return drawn.restarts == self.stream.restarts


class _LoopSamples:
    """What is compared of the samples across ranks."""

    def __init__(self, loader: Any) -> None:
        self.dataset = loader.dataset
