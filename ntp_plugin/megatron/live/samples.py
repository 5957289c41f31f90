"""Loaders that are made when they are asked for a sample, and made again from another one on.

Megatron builds its loaders once, on the first slot of each TP group. A step that is taken again needs its samples
again, maybe by another share of the batch, and maybe on a slot that is the first of its group only now. So every slot
of a group has the data sets, which are maps of files, and a `Rewindable` in place of each loader: nothing is read, and
no worker started, until it is asked. How many samples the job has consumed is counted by Megatron, in its arguments.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core import parallel_state

type Make = Callable[[Any, int], Any]
"""(data set, consumed samples) -> a loader."""


class Rewindable:
    """An iterator over a loader's batches."""

    def __init__(self, make: Callable[[int], Any], consumed: int, *, note: Callable[[Any], None] | None = None) -> None:
        """`note` is told which samples each batch has, where the loader says that."""
        self._make, self._consumed, self._note = make, consumed, note
        self._batches: Iterator[Any] | None = None
        self._ahead: deque[Any] = deque()
        """What a loader has asked of its sampler, and not handed out yet."""

    def __iter__(self) -> "Rewindable":
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            loader = self._make(self._consumed)
            if self._note is not None:
                self._look_into(loader)
            self._batches = iter(loader)
        batch = next(self._batches)
        if self._note is not None and self._ahead:
            self._note(self._ahead.popleft())
        return batch

    def __len__(self) -> int:
        return len(self._make(0))

    def rewind(self, consumed: int) -> None:
        """The next sample is the one after so many."""
        self._batches, self._consumed = None, consumed
        self._ahead.clear()

    def _look_into(self, loader: Any) -> None:
        """torch's loaders keep their sampler from being replaced, but it only has to be looked at."""
        sampler = getattr(loader, "batch_sampler", None)
        if sampler is not None:
            vars(loader)["batch_sampler"] = _Seen(sampler, self._ahead)


class _Seen:
    """A sampler whose batches are noted as they are asked for."""

    def __init__(self, sampler: Any, ahead: deque[Any]) -> None:
        self._sampler, self._ahead = sampler, ahead

    def __iter__(self) -> Iterator[Any]:
        for batch in self._sampler:
            self._ahead.append(batch)
            yield batch

    def __len__(self) -> int:
        return len(self._sampler)


class SampleHooks:
    """What is put around Megatron's data sets and loaders."""

    def __init__(self, args: Any, *, noted: bool = False) -> None:
        """`noted`: whether somebody wants to know which samples were drawn."""
        self._args, self._noted = args, noted
        self.drawn: list[int] = []
        """By this process, from the training set, since the section was begun; if they are noted."""
        self._sets: tuple[Any, Any, Any] = (None, None, None)
        self._training: list[Rewindable] = []
        self._validation: list[Rewindable] = []
        self.make_training: Callable[[Make], Make] = lambda even: even
        """How the training loader is made in the layout of now, of how Megatron makes it."""

    def data_sets(self, original: Any) -> Any:
        """`build_train_valid_test_datasets`: on every slot of a TP group as on its first."""

        @functools.wraps(original)
        def build(*args: Any, **kwargs: Any) -> Any:
            parallel_state.set_tensor_model_parallel_rank(0)
            try:
                self._sets = original(*args, **kwargs)
            finally:
                parallel_state.set_tensor_model_parallel_rank(None)
            return self._sets

        return build

    def loader(self, original: Any) -> Any:
        """`build_pretraining_data_loader`: later, and as often as it takes."""

        @functools.wraps(original)
        def build(dataset: Any, consumed: int) -> Any:
            if dataset is None:
                return None
            training = dataset is self._sets[0]

            def make(consumed: int) -> Any:
                return (self.make_training(original) if training else original)(dataset, consumed)

            loader = Rewindable(make, consumed, note=self.drawn.extend if training and self._noted else None)
            if training:
                self._training.append(loader)
            elif dataset is self._sets[1]:
                self._validation.append(loader)
            return loader

        return build

    def rewind(self) -> None:
        """To what Megatron has counted as consumed."""
        for loader in self._training:
            loader.rewind(self._args.consumed_train_samples)
        for loader in self._validation:
            loader.rewind(self._args.consumed_valid_samples)
