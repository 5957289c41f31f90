"""Loaders that are built on demand, and again from another sample.

Megatron builds its loaders once, on the first slot of each TP group. A repeated step needs its samples again, maybe by
another share of the batch, and maybe on a slot that has just become the first of its group, or on a stage that has
become the first or the last. So every slot of a group has the data sets, which are maps of files, and of every group if
layers may move; and a `Rewindable` in place of each loader: it reads nothing, and starts no worker, until it is asked.
Megatron counts the consumed samples of the job, in its arguments.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core import parallel_state

type Make = Callable[[Any, int], Any]
"""(data set, consumed samples) -> a loader."""


class Rewindable:
    """An iterator over a loader's batches that can restart from another sample."""

    def __init__(self, make: Callable[[int], Any], consumed: int, *, note: Callable[[Any], None] | None = None) -> None:
        """`note` is called with the samples of each batch, if the loader knows them."""
        self._make, self._consumed, self._note = make, consumed, note
        self._batches: Iterator[Any] | None = None
        self._ahead: deque[Any] = deque()
        """What a loader has asked of its sampler, and not yielded yet."""

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
        """Continue after this number of consumed samples."""
        self._batches, self._consumed = None, consumed
        self._ahead.clear()

    def _look_into(self, loader: Any) -> None:
        """Observe the sampler of a loader; torch's loaders do not allow replacing it."""
        sampler = getattr(loader, "batch_sampler", None)
        if sampler is not None:
            vars(loader)["batch_sampler"] = _Seen(sampler, self._ahead)


class _Seen:
    """A sampler that notes its batches as they are asked for."""

    def __init__(self, sampler: Any, ahead: deque[Any]) -> None:
        self._sampler, self._ahead = sampler, ahead

    def __iter__(self) -> Iterator[Any]:
        for batch in self._sampler:
            self._ahead.append(batch)
            yield batch

    def __len__(self) -> int:
        return len(self._sampler)


class SampleHooks:
    """Wraps Megatron's data sets and loaders."""

    def __init__(self, args: Any, *, noted: bool = False) -> None:
        """`noted`: whether anyone needs the numbers of the drawn samples."""
        self._args, self._noted = args, noted
        self.drawn: list[int] = []
        """Samples that this process has drawn from the training set in this section, if they are noted."""
        self.on_every_stage = False
        """Whether any stage may become the first or the last, which read samples."""
        self._sets: tuple[Any, Any, Any] = (None, None, None)
        self._training: list[Rewindable] = []
        self._validation: list[Rewindable] = []
        self.make_training: Callable[[Make], Make] = lambda even: even
        """Wraps Megatron's way to make the training loader, for the current layout."""

    def data_sets(self, original: Any) -> Any:
        """`build_train_valid_test_datasets`: build them on every slot of a TP group as on its first, and if layers may
        move on every stage as on the first."""

        @functools.wraps(original)
        def build(*args: Any, **kwargs: Any) -> Any:
            parallel_state.set_tensor_model_parallel_rank(0)
            parallel_state.set_pipeline_model_parallel_rank(0 if self.on_every_stage else None)
            try:
                self._sets = original(*args, **kwargs)
            finally:
                parallel_state.set_tensor_model_parallel_rank(None)
                parallel_state.set_pipeline_model_parallel_rank(None)
            return self._sets

        return build

    def loader(self, original: Any) -> Any:
        """`build_pretraining_data_loader`: build it later, and as often as needed."""

        @functools.wraps(original)
        def build(dataset: Any, consumed: int) -> Any:
            if dataset is None:
                return None
            training = dataset is self._sets[0]

            def make(consumed: int) -> Any:
                return (self.make_training(original) if training else original)(dataset, consumed)

            is_first = training and not self._training  # each chunk of a model has a loader, of the same samples
            loader = Rewindable(make, consumed, note=self.drawn.extend if is_first and self._noted else None)
            if training:
                self._training.append(loader)
            elif dataset is self._sets[1]:
                self._validation.append(loader)
            return loader

        return build

    def rewind(self) -> None:
        """Rewind the loaders to what Megatron has counted as consumed."""
        for loader in self._training:
            loader.rewind(self._args.consumed_train_samples)
        for loader in self._validation:
            loader.rewind(self._args.consumed_valid_samples)
