"""What accelerate and the Trainer believe of the world: how many ranks there are, which one this is, who writes.

accelerate reads both once. While ranks are lost, its collectives need the present numbers, and a new first rank has to
write logs and checkpoints. Only the loss is scaled by the nominal number of ranks, since the window weighs it by the
ranks that are there.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import recursively_apply
from transformers.trainer_callback import ProgressCallback

from ntp_plugin.recovery.elastic_rank import ElasticRank


class World:
    """Keeps accelerate's view of the world as it is."""

    def __init__(self, trainer: Any, rank: ElasticRank) -> None:
        self._trainer, self._rank = trainer, rank
        self._local: int = trainer.args.local_process_index
        self._slots_here = range(rank.place.slot - self._local, rank.place.slot + 1)
        """The slots of this host up to this one."""
        self._seen = (-1, -1)

    def follow(self) -> None:
        """Have accelerate and the Trainer know the present ranks."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if (rank, ranks) == self._seen:
            return
        self._seen = rank, ranks
        there = self._rank.groups.members
        local = sum(slot in there for slot in self._slots_here) - 1
        _set(process_index=rank, num_processes=ranks, local_process_index=local)
        state = self._trainer.state
        state.is_world_process_zero, state.is_local_process_zero = not rank, not local
        if not rank:
            self._show_progress()

    @contextlib.contextmanager
    def nominal(self) -> Iterator[None]:
        """Have accelerate know the nominal number of ranks, while a loss is computed."""
        _set(num_processes=self._rank.place.slots)
        try:
            yield
        finally:
            _set(num_processes=dist.get_world_size())

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Have it know the present number again, for a collective in between."""
        _set(num_processes=dist.get_world_size())
        try:
            yield
        finally:
            _set(num_processes=self._rank.place.slots)

    @contextlib.contextmanager
    def gathers_alone(self, is_alone: Callable[[], bool]) -> Iterator[None]:
        """Have accelerate gather this rank's values as if all nominal ranks had them, where it is alone. A loss that
        gathers metrics would wait for ranks that have another number of micro-batches.

        Args:
            is_alone: Asked at each gather: a forward that a loss interrupts goes on alone.
        """
        accelerator = self._trainer.accelerator

        def or_alike(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def gather(data: Any, *args: Any, **kwargs: Any) -> Any:
                return self._alike(data) if is_alone() else original(data, *args, **kwargs)

            return gather

        accelerator.gather = or_alike(accelerator.gather)
        accelerator.gather_for_metrics = or_alike(accelerator.gather_for_metrics)
        try:
            yield
        finally:
            del accelerator.gather, accelerator.gather_for_metrics

    def _alike(self, data: Any) -> Any:
        return recursively_apply(self._repeated, data)

    def _repeated(self, tensor: Any) -> Any:
        return torch.cat([tensor[None] if tensor.ndim == 0 else tensor] * self._rank.place.slots)

    def _show_progress(self) -> None:
        """Give a new first rank the bar that `ProgressCallback` makes when the training begins."""
        trainer = self._trainer
        bars: list[Any] = [one for one in trainer.callback_handler.callbacks if isinstance(one, ProgressCallback)]
        for bar in bars:
            if bar.training_bar is None:
                bar.on_train_begin(trainer.args, trainer.state, trainer.control)


def _set(**values: int) -> None:
    for state in (PartialState, AcceleratorState):
        state._shared_state.update(values)


def split_over_present_ranks(loader: Any) -> None:
    """Have an evaluation's loader share its batches among the ranks that are there."""
    for sharded in (loader.batch_sampler, loader.dataset):
        if hasattr(sharded, "num_processes") and hasattr(sharded, "process_index"):
            sharded.num_processes, sharded.process_index = dist.get_world_size(), dist.get_rank()
