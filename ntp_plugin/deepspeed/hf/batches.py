"""The batches of the Trainer's loader: which samples each nominal rank has, and how a lost rank's are drawn.

accelerate cuts one batch sampler over the ranks (`BatchSamplerShard`), so every rank runs through the batches of all.
`RecordedBatches` stands for that sampler and remembers what it yields in a data epoch. The rank's own batches come from
its own loader, with its workers and draws. A micro-batch that was dealt from a lost rank is drawn here, from the data
set and through the loader's own collate function.
"""

import contextlib
import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch.utils.data._utils.fetch import _MapDatasetFetcher

_KEPT = 2
"""Data epochs that are remembered: a step that is taken again may have begun in the one before."""


class RecordedBatches:
    """The batch sampler under accelerate's shards; all but the recording is the original's."""

    def __init__(self, original: Any, book: "BatchBook") -> None:
        self._original, self._book = original, book

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._book.begin(self._original))

    def __len__(self) -> int:
        return len(self._original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class Listed:
    """A batch sampler that yields what was recorded."""

    def __init__(self, batches: list[list[int]], like: Any) -> None:
        self._batches = batches
        self.batch_size, self.drop_last = getattr(like, "batch_size", None), getattr(like, "drop_last", False)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


class BatchBook:
    """The batches of all nominal ranks, data epoch by data epoch."""

    def __init__(self, loader: Any, *, generator: torch.Generator | None = None) -> None:
        """Record the batches of a loader, whose sampler may have a generator of its own."""
        self._loader, self._shard, self._generator = loader, loader.batch_sampler, generator
        self._original = self._shard.batch_sampler
        self._shard.batch_sampler = RecordedBatches(self._original, self)
        self.data_epoch = 0
        """The data epoch that the loop is in."""
        self.draws: dict[int, Any] = {}
        """Data epoch -> the state of the random number generators before its batches were drawn."""
        self._batches: dict[int, list[list[int]]] = {}
        self._of_rank: dict[tuple[int, int], list[list[int]]] = {}

    def begin(self, sampler: Any) -> list[list[int]]:
        """Draw and remember the batches of the current data epoch; of one that is known, return them."""
        epoch = self.data_epoch
        if epoch in self._batches:
            return self._batches[epoch]
        if epoch in self.draws:  # a joining rank draws what the others have drawn
            return self._drawn(epoch)
        self.draws[epoch] = self._states()
        self._remember(epoch, [list(batch) for batch in sampler])
        return self._batches[epoch]

    def _drawn(self, epoch: int) -> list[list[int]]:
        if epoch not in self._batches:
            now = generators()
            states, of_sampler = self.draws[epoch]
            set_generators(states)
            if self._generator is not None:  # it stays where it is after the draws, as on the other ranks
                self._generator.set_state(of_sampler)
            self._loader.set_epoch(self.iteration(epoch))
            self._remember(epoch, [list(batch) for batch in self._original])
            set_generators(now)
            self._loader.set_epoch(self.iteration(self.data_epoch))
        return self._batches[epoch]

    def _states(self) -> tuple[Any, Any]:
        return generators(), None if self._generator is None else self._generator.get_state()

    def iteration(self, epoch: int) -> int:
        """Return the number of a data epoch as the loader counts it."""
        return epoch

    def _remember(self, epoch: int, batches: list[list[int]]) -> None:
        for old in [known for known in self._batches if known <= epoch - _KEPT]:
            del self._batches[old], self.draws[old]
        self._batches[epoch] = batches
        self._of_rank = {key: found for key, found in self._of_rank.items() if key[0] in self._batches}

    def samples(self, epoch: int, rank: int, index: int) -> list[int]:
        """Return the samples of a nominal rank's micro-batch, by its index in the data epoch."""
        if (epoch, rank) not in self._of_rank:
            shard = copy.copy(self._shard)
            shard.batch_sampler, shard.process_index = Listed(self._drawn(epoch), self._original), rank
            self._of_rank[epoch, rank] = [list(batch) for batch in shard]
        return self._of_rank[epoch, rank][index]

    def draw(self, epoch: int, rank: int, index: int) -> Any:
        """Return a nominal rank's micro-batch, as its loader would; this rank's random draws stay as they are."""
        loader = self._loader
        with unchanged_generators():
            fetcher: Any = _MapDatasetFetcher(loader.dataset, True, loader.collate_fn, False)
            batch = fetcher.fetch(self.samples(epoch, rank, index))
        return batch if loader.device is None else send_to_device(batch, loader.device)


def generators() -> tuple[Any, Any, Any]:
    """Return the state of Python's, numpy's and torch's generators on the CPU, from which samplers draw."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_generators(states: tuple[Any, Any, Any]) -> None:
    """Restore that state."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@contextlib.contextmanager
def unchanged_generators() -> Iterator[None]:
    """Restore the generators at the end."""
    states = generators()
    try:
        yield
    finally:
        set_generators(states)
