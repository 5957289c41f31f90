"""A DataLoader that can go back, and yield a lost rank's micro-batches; it follows `training/stream.py`.

A loader is followed from its first iterator on if its `DistributedSampler` is that of this rank's nominal position.
While nobody is lost it yields the same batches as before, from its own workers and the same random draws. After a
restart the batches also come from the sampler's other ranks. The engine's training forward shows which loader is for
training: the one that was drawn from last. Others, such as an evaluation's, are never restarted.

An iterator belongs to the data epoch in which it was made. It ends when the next micro-batch belongs to a later data
epoch; so the loop of a process that joins late runs quickly through the data epochs that are over. A training loop must
not leave a data epoch before its end: then nobody would know which micro-batches a step has.
"""

import copy
import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from ntp_plugin.errors import Refused
from ntp_plugin.training.stream import MicroBatch, Stream


class Followed:
    """The loaders of one sampler: a framework may make a new one for each data epoch."""

    def __init__(self, sampler: Any, stream: Stream) -> None:
        self.stream = stream
        self.trains = False
        """Whether the engine trains on what is drawn."""
        self.sampler = sampler
        """The sampler of this rank's nominal position."""
        self._data_epochs_begun, self._drawn_since = 0, 0
        self._epochs: list[int] = []
        """The epoch that the sampler was set to, data epoch by data epoch."""
        self.in_hand: deque[int] = deque()
        """Batches that the loop has drawn and not used: for each, how often the stream had restarted by then."""
        self._orders: dict[tuple[int, int], list[int]] = {}
        self._between = False
        """Whether the loop is past the end of a data epoch."""

    def begin_data_epoch(self, loader: Any, original: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
        """Return an iterator through one data epoch."""
        begun = self._data_epochs_begun
        if begun and self.stream.peek().data_epoch < begun and self._drawn_since == self.stream.restarts:
            raise Refused(
                f"the loop left its loader in data epoch {begun - 1}, after {self.stream.peek().index} of"
                f" {self.stream.per_data_epoch} micro-batches",
                fix="let it go to the end of the loader; a smaller data set makes data epochs shorter",
            )
        self._data_epochs_begun, self._between = begun + 1, False
        self._epochs.append(self.sampler.epoch)
        return _DataEpochIterator(self, begun, functools.partial(self._prepare, loader, original))

    def _prepare(self, loader: Any, original: Callable[[Any], Iterator[Any]], data_epoch: int, *, again: bool) -> Any:
        """Return batches from the current position of the stream to the end of a data epoch."""
        wanted = (self._indices(one, loader) for one in self.stream.ahead(data_epoch))
        of_these = like(loader, _Wanted(wanted), generator=loader.generator)
        with torch.random.fork_rng(devices=[], enabled=again):  # the first one draws like the loader's own
            return original(of_these)

    def _indices(self, one: MicroBatch, loader: Any) -> list[int]:
        if (one.data_epoch, one.replica) not in self._orders:
            self._orders = {of: order for of, order in self._orders.items() if of[0] >= one.data_epoch - 1}
            other = copy.copy(self.sampler)
            # A data epoch that this process has not begun counts as the newest, which is right if nobody sets epochs.
            other.rank, other.epoch = one.replica, self._epochs[min(one.data_epoch, len(self._epochs) - 1)]
            self._orders[one.data_epoch, one.replica] = list(other)
        size = loader.batch_size
        return self._orders[one.data_epoch, one.replica][one.index * size : (one.index + 1) * size]

    @property
    def is_where_the_stream_is(self) -> bool:
        """False if the loop is past a data epoch that ended long ago; True within one, or where the next one begins."""
        ahead = self.stream.peek()
        return not self._between or (ahead.data_epoch, ahead.index) == (self._data_epochs_begun, 0)

    @property
    def has_begun_the_data_epoch(self) -> bool:
        """Whether the loop has begun the data epoch in which the step begins."""
        return self.stream.data_epoch_of(self.stream.step) < self._data_epochs_begun

    # ------------------------------------------------ called by the engine

    def drawn(self) -> None:
        """Note that the loop has drawn one more batch."""
        self._drawn_since = self.stream.restarts
        self.in_hand.append(self.stream.restarts)
        self.stream.draw()

    def hand_over(self) -> bool | None:
        """Take the oldest drawn batch for a forward: True if it belongs to the accumulation window, False if it is
        stale, None if the loop has drawn none."""
        return self.in_hand.popleft() == self.stream.restarts if self.in_hand else None

    def ended(self) -> None:
        """Note the end of a data epoch: if nothing of it was for training, nothing of it will be."""
        self._between = True
        if not self.trains:
            self.in_hand.clear()


class _DataEpochIterator:
    """The iterator that the loop sees."""

    def __init__(self, followed: Followed, data_epoch: int, prepare: Any) -> None:
        self._followed, self._data_epoch, self._prepare = followed, data_epoch, prepare
        self._restarts = followed.stream.restarts
        self._batches = prepare(data_epoch, again=False)

    def __iter__(self) -> "_DataEpochIterator":
        return self

    def __next__(self) -> Any:
        stream = self._followed.stream
        if self._restarts != stream.restarts:
            self._restarts = stream.restarts
            self._batches = self._prepare(self._data_epoch, again=True)
        if stream.peek().data_epoch > self._data_epoch:
            self._followed.ended()
            raise StopIteration
        batch = next(self._batches)
        self._followed.drawn()
        Loaders.last = self._followed
        return batch


def like(loader: Any, batches: Any, *, generator: torch.Generator | None = None) -> Any:
    """Return a loader of other batches that reads and collates them as this one does."""
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=generator,
        prefetch_factor=loader.prefetch_factor,
    )


class _Wanted:
    """A batch sampler for one iterator."""

    def __init__(self, batches: Iterator[list[int]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches


class Loaders:
    """The loaders of this process."""

    follow: Callable[[Any], Stream | None] = staticmethod(lambda _: None)
    """Returns the stream that a loader follows; set once there is an engine that can lose ranks."""
    last: Followed | None = None
    """The loader that was drawn from last."""
    _followed: ClassVar[weakref.WeakKeyDictionary[Any, Followed]] = weakref.WeakKeyDictionary()

    @classmethod
    def evaluate(cls) -> None:
        """Take a batch of a loader that is not for training, for a forward that does not train."""
        if cls.last is not None and not cls.last.trains and cls.last.in_hand:
            cls.last.hand_over()

    @classmethod
    def of(cls, loader: Any) -> Followed | None:
        """Return the loader that follows a stream, or None if it is left as it is."""
        known = cls._followed.get(loader.sampler)
        if known is not None and known.trains:
            return known
        stream = cls.follow(loader)
        if stream is None:
            return None
        cls._followed[loader.sampler] = followed = Followed(loader.sampler, stream)
        return followed


def can_follow(loader: Any, *, replica: int, replicas: int) -> bool:
    """Whether a loader belongs to a nominal position, so that those of the other ranks are known."""
    sampler = getattr(loader, "sampler", None)
    return (
        isinstance(sampler, DistributedSampler)
        and type(loader.batch_sampler) is BatchSampler
        and (sampler.rank, sampler.num_replicas) == (replica, replicas)
    )


def dealt(original: Any) -> Any:
    """`DataLoader.__iter__`."""

    @functools.wraps(original)
    def iterate(loader: Any) -> Any:
        if isinstance(getattr(loader, "batch_sampler", None), _Wanted):
            return original(loader)
        followed = Loaders.of(loader) if hasattr(loader, "sampler") else None
        return original(loader) if followed is None else followed.begin_data_epoch(loader, original)

    return iterate
