"""A DataLoader that follows the stream.

A loader whose `DistributedSampler` is that of this rank's nominal place is followed from its first iterator on. While
nobody is lost it yields what it would have yielded, in its own workers, from the same draws of random numbers. After a
restart the batches are drawn from the sampler's other ranks as well. Which loader is the training's is known when the
engine goes forward to train: the one that was drawn from last. Others, as of an evaluation, are never restarted.

An iterator belongs to the turn in which it was made. It ends where the next micro-batch is of a later turn; so the
loop of a process that comes in late goes through the turns that are over in no time. A loop that trains must not leave
a turn before its end: then nobody would know which micro-batches a step has.
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
    """The loaders of one sampler: a framework may make a new one for each turn."""

    def __init__(self, sampler: Any, stream: Stream) -> None:
        self.stream = stream
        self.trains = False
        """Whether the engine goes forward with what is drawn."""
        self.sampler = sampler
        """That of this rank's nominal place."""
        self._turns, self._drawn_since = 0, 0
        self._epochs: list[int] = []
        """That the sampler was set to, turn by turn."""
        self.in_hand: deque[int] = deque()
        """Drawn by the loop, and not gone forward with: how often the stream had restarted by then."""
        self._orders: dict[tuple[int, int], list[int]] = {}
        self._between = False
        """Whether the loop stands behind a turn's end."""

    def turn(self, loader: Any, original: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
        """An iterator through one turn."""
        if self._turns and self.stream.peek().turn < self._turns and self._drawn_since == self.stream.restarts:
            raise Refused(
                f"the loop left its loader in turn {self._turns - 1}, after {self.stream.peek().index} of"
                f" {self.stream.per_turn} micro-batches",
                way_out="let it go to the end of the loader; a smaller data set makes turns shorter",
            )
        turn, self._turns, self._between = self._turns, self._turns + 1, False
        self._epochs.append(self.sampler.epoch)
        return _Turn(self, turn, functools.partial(self._prepare, loader, original))

    def _prepare(self, loader: Any, original: Callable[[Any], Iterator[Any]], turn: int, *, again: bool) -> Any:
        """Batches from where the stream is to the end of a turn."""
        wanted = (self._indices(one, loader) for one in self.stream.ahead(turn))
        like = DataLoader(
            loader.dataset,
            batch_sampler=_Wanted(wanted),
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
        )
        with torch.random.fork_rng(devices=[], enabled=again):  # the first one draws what the loader's own would have
            return original(like)

    def _indices(self, one: MicroBatch, loader: Any) -> list[int]:
        if (one.turn, one.replica) not in self._orders:
            self._orders = {of: order for of, order in self._orders.items() if of[0] >= one.turn - 1}
            other = copy.copy(self.sampler)
            # Of a turn that this process has not begun: as the newest, which is right where nobody sets epochs.
            other.rank, other.epoch = one.replica, self._epochs[min(one.turn, len(self._epochs) - 1)]
            self._orders[one.turn, one.replica] = list(other)
        size = loader.batch_size
        return self._orders[one.turn, one.replica][one.index * size : (one.index + 1) * size]

    @property
    def is_where_the_stream_is(self) -> bool:
        """Not behind a turn that has ended long since: inside of one, or where the next one begins."""
        ahead = self.stream.peek()
        return not self._between or (ahead.turn, ahead.index) == (self._turns, 0)

    @property
    def is_in_the_turn(self) -> bool:
        """Whether the loop has begun the turn that the step begins in."""
        return self.stream.turn_of(self.stream.step) < self._turns

    # ------------------------------------------------ by the engine

    def drawn(self) -> None:
        """The loop has one more in its hand."""
        self._drawn_since = self.stream.restarts
        self.in_hand.append(self.stream.restarts)
        self.stream.draw()

    def hand_over(self) -> bool | None:
        """The engine goes forward with the oldest that was drawn: whether it is of the window; None where the loop has
        drawn none."""
        return self.in_hand.popleft() == self.stream.restarts if self.in_hand else None

    def ended(self) -> None:
        """A turn is over: where nothing of it was for training, nothing of it will be."""
        self._between = True
        if not self.trains:
            self.in_hand.clear()


class _Turn:
    """What the loop iterates over."""

    def __init__(self, followed: Followed, turn: int, prepare: Any) -> None:
        self._followed, self._turn, self._prepare = followed, turn, prepare
        self._restarts = followed.stream.restarts
        self._batches = prepare(turn, again=False)

    def __iter__(self) -> "_Turn":
        return self

    def __next__(self) -> Any:
        stream = self._followed.stream
        if self._restarts != stream.restarts:
            self._restarts = stream.restarts
            self._batches = self._prepare(self._turn, again=True)
        if stream.peek().turn > self._turn:
            self._followed.ended()
            raise StopIteration
        batch = next(self._batches)
        self._followed.drawn()
        Loaders.last = self._followed
        return batch


class _Wanted:
    """A batch sampler for one iterator."""

    def __init__(self, batches: Iterator[list[int]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches


class Loaders:
    """Of this process."""

    follow: Callable[[Any], Stream | None] = staticmethod(lambda _: None)
    """Which stream a loader follows; once there is an engine that can lose ranks."""
    last: Followed | None = None
    """That was drawn from."""
    _followed: ClassVar[weakref.WeakKeyDictionary[Any, Followed]] = weakref.WeakKeyDictionary()

    @classmethod
    def evaluate(cls) -> None:
        """The engine goes forward, and not to train: with what was drawn from another loader than the training's."""
        if cls.last is not None and not cls.last.trains and cls.last.in_hand:
            cls.last.hand_over()

    @classmethod
    def of(cls, loader: Any) -> Followed | None:
        """None where it goes on as it is."""
        known = cls._followed.get(loader.sampler)
        if known is not None and known.trains:
            return known
        stream = cls.follow(loader)
        if stream is None:
            return None
        cls._followed[loader.sampler] = followed = Followed(loader.sampler, stream)
        return followed


def can_follow(loader: Any, *, replica: int, replicas: int) -> bool:
    """Whether a loader is that of a nominal place, so that those of others are known."""
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
        return original(loader) if followed is None else followed.turn(loader, original)

    return iterate
