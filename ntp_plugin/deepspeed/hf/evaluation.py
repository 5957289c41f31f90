"""An evaluation while ranks are lost: over the batches of the nominal ranks, in their order.

The Trainer takes one batch of each rank at a time, a row, divides losses by the labelled tokens of the row, and gathers
what it has computed. If the ranks that are left cut the data set anew, rows would be others, and so would the metrics,
by which the Trainer stops early or keeps its best model. So a row stays that of the nominal ranks, and is gathered in
several parts: in part `j` rank `p` of `m` computes the batch of nominal rank `j * m + p`. What fills up the last part
is dropped.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard
from accelerate.utils import recursively_apply, send_to_device

from ntp_plugin.deepspeed.hf.batches import Listed
from ntp_plugin.deepspeed.loaders import like


def can_be_in_rows(loader: Any) -> bool:
    """Whether the batches of all nominal ranks are known."""
    return type(loader) is DataLoaderShard and type(loader.batch_sampler) is BatchSamplerShard


class NominalRows:
    """Stands for the loader of an evaluation."""

    def __init__(self, loader: Any, trainer: Any, *, nominal: int) -> None:
        self._loader, self._trainer, self._nominal = loader, trainer, nominal
        self.dataset = loader.dataset
        self._ranks = dist.get_world_size()
        self._parts = -(-nominal // self._ranks)
        self._batches = self._of_nominal_ranks()
        self._truncates = trainer.gather_function != trainer.accelerator.gather
        self._row = self._part = 0
        self._items: Any = None
        self.end_of_dataloader, self.remainder = False, -1
        if not loader._drop_last:
            self.remainder = len(loader.dataset) % (loader.batch_sampler.batch_size * nominal)

    def _of_nominal_ranks(self) -> list[list[list[int]]]:
        shard = copy.copy(self._loader.batch_sampler)
        shard.num_processes, drawn = self._nominal, [list(batch) for batch in shard.batch_sampler]
        found = []
        for rank in range(self._nominal):
            shard.batch_sampler, shard.process_index = Listed(drawn, self._loader.batch_sampler.batch_sampler), rank
            found.append([list(batch) for batch in shard])
        return found

    def __len__(self) -> int:
        return len(self._batches[0]) * self._parts

    def __iter__(self) -> Iterator[Any]:
        state, loader = self._trainer.accelerator.gradient_state, self._loader
        mine = [self._batch_of(*divmod(number, self._parts)) for number in range(len(self))]
        state._add_dataloader(self)
        for number, batch in enumerate(like(loader, mine)):
            self._row, self._part = divmod(number, self._parts)
            self.end_of_dataloader = number == len(self) - 1
            yield batch if loader.device is None else send_to_device(batch, loader.device)
        state._remove_dataloader(self)

    def _batch_of(self, row: int, part: int) -> list[int]:
        return self._batches[min(part * self._ranks + dist.get_rank(), self._nominal - 1)][row]

    def gather(self, data: Any, **_: Any) -> Any:
        """Gather a part of a row, without what fills it up."""
        return recursively_apply(self._kept, self._trainer.accelerator.gather(data))

    def _kept(self, gathered: torch.Tensor) -> torch.Tensor:
        each, before = len(gathered) // self._ranks, self._part * len(gathered)
        wanted = self._nominal * each
        if self._truncates and self.remainder > 0 and self._row == len(self._batches[0]) - 1:
            wanted = min(wanted, self.remainder)
        return gathered[: max(0, wanted - before)]

    def count_items(self, count: Callable[[Any], Any], inputs: Any) -> Any:
        """Return the labelled tokens of the row; all ranks call it for each part.

        Args:
            count: Counts those of one batch; None where the Trainer counts none.
            inputs: This rank's batch of the part.
        """
        here = count(inputs)
        if here is None:
            return None
        if self._part == 0:
            stands_for = len(range(dist.get_rank(), self._nominal, self._ranks))
            others = [self._batch_of(self._row, part) for part in range(1, stands_for)]
            counts = [count(self._loader.collate_fn([self.dataset[sample] for sample in one])) for one in others]
            self._items = self._trainer.accelerator.gather(here + sum(counts)).sum()
        return self._items
