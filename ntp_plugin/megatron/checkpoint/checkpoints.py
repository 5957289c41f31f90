"""Checkpoints of a degraded layout, which are the same as those of the nominal one.

A `torch_dist` checkpoint holds whole tensors. Each rank tells where the parts that it has stand in them, and whoever
loads one asks for other parts. Megatron tells that in even shares of the TP group; here it is told by units. An entry
of a cut parameter becomes a factory, of the kind that Megatron has for SwiGLU: of a tensor it makes one piece for each
range of the whole that the slot holds, and of the pieces that were loaded the tensor again. Since a factory makes the
same of whatever has the parameter's shape, Megatron's optimizers save and load their state through it by themselves.
So neither side has to know how the other was cut, a whole layout included.

Which replica writes. All replicas have all of a model, and exactly one may write a piece. Megatron counts replicas by
their rank in a data-parallel group, and shares the writing out there shard by shard; in a degraded layout these groups
have gaps, and shards of other sizes. Here it is counted by the replicas that stand, and the writing is shared out to
them tensor by tensor, all parts of a tensor to one replica, the largest share of work never far from the others'.

What is left out. Generators of random numbers are saved by the stage and TP slot of the nominal layout, for some of
which there is nobody. Nothing that a degraded layout accepts draws from them while it trains: dropout is zero, or its
masks are a function of the sample. So they are not saved, as with `--no-save-rng`, which tells that to whoever loads;
and a degraded job that loads keeps its own. Nor is the state of the rerun machine: it names ranks, and samples of
their shares.

After loading, the weights of all replicas are compared by their digests, as at the start of any degraded job.
"""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory

from ntp_plugin.megatron.layers.uneven_layers import cut_of
from ntp_plugin.megatron.layout import Layout
from ntp_plugin.megatron.reduction.lane_sync import LaneSync
from ntp_plugin.planning.spans import Spans
from ntp_plugin.planning.units import Tensor

type Entry = Any
"""`ShardedTensor`, `ShardedTensorFactory` or `ShardedObject`."""


class CheckpointHooks:
    """What is put in place of Megatron's description of what it saves and loads."""

    def __init__(self, layout: Layout, args: Any, sync: LaneSync) -> None:
        self._layout, self._sync = layout, sync
        self._shared_out = bool(getattr(args, "ckpt_fully_parallel_save", True))

    # ------------------------------------------------ Megatron's functions

    def state(self, original: Any) -> Any:
        """`generate_state_dict`, which both saving and loading call."""

        @functools.wraps(original)
        def generate(
            args: Any, model: Any, optimizer: Any, opt_param_scheduler: Any, rng_state: Any, **said: Any
        ) -> Any:
            told = copy.copy(args)
            told.no_save_rng = True
            chunks = [_Recut(chunk, self.recut) for chunk in model]
            said["rerun_state"] = None
            state = original(told, chunks, optimizer, opt_param_scheduler, None, **said)
            if rng_state is not None:
                state["rng_state"] = LocalNonpersistentObject(rng_state.data)  # not saved; its own when it is loaded
            return state

        return generate

    def load(self, original: Any) -> Any:
        """`load_checkpoint`: nobody trains on weights that are not the same in all replicas."""

        @functools.wraps(original)
        def load(*args: Any, **kwargs: Any) -> Any:
            loaded = original(*args, **kwargs)
            self._sync.require_equal_units()
            return loaded

        return load

    def share_out_nothing(self, _: Any) -> Any:
        """`FullyParallelSaveStrategyWrapper.apply_saving_parallelization`: who writes is in the entries already."""
        return lambda *_: None

    def each_for_itself(self, _: Any) -> Any:
        """`FullyParallelLoadStrategyWrapper.load`: every rank reads what it holds."""
        return lambda wrapper, *args, **kwargs: wrapper.base_strategy.load(*args, **kwargs)

    # ------------------------------------------------ entries

    def recut(self, state: dict[str, Entry]) -> dict[str, Entry]:
        """The entries of a model, by units and with the replica that writes each."""
        writers = self._writers(list(state.values()))
        return {name: self._entry(entry, writer) for (name, entry), writer in zip(state.items(), writers, strict=True)}

    def _entry(self, entry: Entry, writer: int) -> Entry:
        place = self._replicas.index(self._layout.slot.replica)
        number = (place - writer) % len(self._replicas)
        entry = dataclasses.replace(entry, replica_id=(*entry.replica_id[:-1], number))
        cut = cut_of(entry.data)
        if cut is None:
            return entry
        tensor, family = cut
        return in_pieces(entry, tensor, tensor.local_index(self._layout.held(family)))

    @property
    def _replicas(self) -> Sequence[int]:
        return self._layout.surviving.replicas

    def _writers(self, entries: list[Entry]) -> list[int]:
        """Which of the replicas writes each entry: the one with least to write so far. All slots of a stage agree."""
        work = [0] * (len(self._replicas) if self._shared_out else 1)
        found = []
        for entry in entries:
            found.append(work.index(min(work)))
            work[found[-1]] += _elements(entry)
        return found


class _Recut:
    """A chunk of the model, as far as saving and loading ask it."""

    def __init__(self, chunk: Any, recut: Callable[[dict[str, Entry]], dict[str, Entry]]) -> None:
        self._chunk, self._recut = chunk, recut

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Entry]:
        return self._recut(self._chunk.sharded_state_dict(*args, **kwargs))


def _elements(entry: Entry) -> int:
    """Of the whole tensor, so that it is the same for all of its slots."""
    cut = cut_of(entry.data)
    if cut is not None:
        return cut[0].elements
    return entry.data.numel() if isinstance(entry.data, torch.Tensor) else 0


def in_pieces(entry: Entry, whole: Tensor, places: Spans) -> ShardedTensorFactory:
    """An entry whose data stand at these places of a whole tensor, along the dim that is cut, in this order.

    Megatron puts the layers of a model in one tensor, along axes before the parameter's own. A piece has these axes
    itself: it is not a matter of even shares, and there they cannot be added later.
    """
    even = next(iter(nested_values([entry.build() if isinstance(entry, ShardedTensorFactory) else entry])))
    ahead = even.prepend_axis_num
    before, shape = even.global_offset[:ahead], (*even.global_shape[:ahead], *whole.shape)
    lengths = [stop - start for start, stop in places]

    def build(key: str, data: torch.Tensor, replica_id: Any, _: Any) -> list[ShardedTensor]:
        assert data.shape[whole.dim] == sum(lengths), "a slot saves what it holds"
        parts = torch.split(data.detach()[(None,) * ahead], lengths, ahead + whole.dim)
        return [
            ShardedTensor(
                key=key,
                data=part,
                dtype=part.dtype,
                local_shape=tuple(part.shape),
                global_shape=shape,
                global_offset=(*before, *(start if dim == whole.dim else 0 for dim in range(len(whole.shape)))),
                axis_fragmentations=None,
                replica_id=replica_id,
                allow_shape_mismatch=even.allow_shape_mismatch,
            )
            for part, (start, _) in zip(parts, places, strict=True)
        ]

    def merge(parts: list[torch.Tensor]) -> torch.Tensor:
        merged = parts[0] if len(parts) == 1 else torch.cat(parts, ahead + whole.dim)
        assert math.prod(merged.shape[:ahead]) == 1, "a parameter is of one layer"
        return merged.view(merged.shape[ahead:])

    return ShardedTensorFactory(
        key=entry.key, data=entry.data, build_fn=build, merge_fn=merge, replica_id=entry.replica_id
    )
