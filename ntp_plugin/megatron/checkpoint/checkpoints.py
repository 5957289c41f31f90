"""Checkpoints of a degraded layout, equal to those of the nominal one.

A `torch_dist` checkpoint holds whole tensors. Each rank describes where its parts are in them, and a rank that loads
asks for other parts. Megatron describes even shares of the TP group; here the description is by units. The entry of a
cut parameter becomes a factory, of the kind that Megatron has for SwiGLU: it makes one slice for each range of the
whole tensor that the slot holds, and merges loaded slices into the local tensor. A factory does the same with anything
of the parameter's shape, so Megatron's optimizers save and load their state through it. Neither side has to know how
the other was cut, and the nominal layout can be either side.

Which replica writes. All replicas hold the whole model, and exactly one may write a slice. Megatron counts replicas by
their rank in a data-parallel group, and distributes the writing there shard by shard; in a degraded layout these groups
have gaps, and shards of other sizes. Here the surviving replicas are counted, and the writing is distributed tensor by
tensor, all parts of a tensor to one replica, so that the shares of work stay close to each other.

Megatron's arguments in a checkpoint are those of the nominal layout, so `--use-checkpoint-args` finds the same in both.

What is not saved. Megatron saves random number generators by the stage and TP slot of the nominal layout, and some of
these slots are lost. Nothing that a degraded layout accepts draws from them in training: dropout is zero, or its masks
are a function of the sample. So they are not saved, as with `--no-save-rng`, which a loading job sees; and a degraded
job that loads keeps its own. The state of the rerun machine is not saved either: it names ranks, and samples of their
shares.

After loading, all replicas compare digests of their weights, as at the start of any degraded job.
"""

import contextlib
import copy
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory
from megatron.training import checkpointing, get_args

from ntp_plugin.errors import Refused
from ntp_plugin.megatron.checkpoint.expert_checkpoints import is_of_experts
from ntp_plugin.megatron.layers.uneven_layers import cut_of
from ntp_plugin.megatron.layout import Layout
from ntp_plugin.megatron.moved_layers import nominal_stages
from ntp_plugin.megatron.reduction.lane_sync import LaneSync
from ntp_plugin.planning.spans import Spans
from ntp_plugin.planning.units import Tensor

_LOG = logging.getLogger(__name__)
TORCH = "torch"
"""Megatron's older format: one file for each slot of a replica."""

type Entry = Any
"""`ShardedTensor`, `ShardedTensorFactory` or `ShardedObject`."""


class CheckpointHooks:
    """Replaces Megatron's description of what it saves and loads."""

    def __init__(self, layout: Layout, args: Any, sync: LaneSync) -> None:
        self._layout, self._args, self._sync = layout, args, sync
        is_alike = layout.surviving.is_nominally_cut  # else stages of different replicas have other tensors
        self._shared_out = is_alike and bool(getattr(args, "ckpt_fully_parallel_save", True))

    # ------------------------------------------------ Megatron's functions

    def state(self, original: Any) -> Any:
        """`generate_state_dict`, which both saving and loading call."""

        @functools.wraps(original)
        def generate(
            args: Any, model: Any, optimizer: Any, opt_param_scheduler: Any, rng_state: Any, **kwargs: Any
        ) -> Any:
            save_args = copy.copy(args)
            save_args.no_save_rng = True
            save_args.world_size = self._layout.topology.size  # this layout has fewer ranks; all else is nominal
            vars(save_args).update(nominal_stages(args))
            chunks = [_Recut(chunk, self.recut) for chunk in model]
            kwargs["rerun_state"] = None
            state = original(save_args, chunks, optimizer, opt_param_scheduler, None, **kwargs)
            if rng_state is not None:
                state["rng_state"] = LocalNonpersistentObject(rng_state.data)  # not saved; keeps its own on loading
            return state

        return generate

    def in_torch_dist(self, original: Any) -> Any:
        """`save_checkpoint`: in this format, whatever `--ckpt-format` says."""

        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            if self._args.ckpt_format != TORCH:
                return original(*args, **kwargs)
            if self._layout.slot == self._layout.slots[0]:
                _LOG.warning(
                    "this checkpoint is in the format torch_dist, since --ckpt-format torch has one file for each slot,"
                    " and some are lost; a job with --ntp-enable loads either"
                )
            with as_torch_dist(self._args):
                return original(*args, **kwargs)

        return save

    def load(self, original: Any) -> Any:
        """`load_checkpoint`: raise unless the loaded weights are the same in all replicas."""

        @functools.wraps(original)
        def load(*args: Any, **kwargs: Any) -> Any:
            _refuse_files_of_slots(self._args)
            loaded = original(*args, **kwargs)
            self._sync.require_equal_units()
            return loaded

        return load

    def share_out_nothing(self, _: Any) -> Any:
        """`FullyParallelSaveStrategyWrapper.apply_saving_parallelization`: the entries already say which replica
        writes."""
        return lambda *_: None

    def each_for_itself(self, _: Any) -> Any:
        """`FullyParallelLoadStrategyWrapper.load`: every rank reads what it holds."""
        return lambda wrapper, *args, **kwargs: wrapper.base_strategy.load(*args, **kwargs)

    # ------------------------------------------------ entries

    def recut(self, state: dict[str, Entry]) -> dict[str, Entry]:
        """Return the entries of a model, cut by units, each with the replica that writes it."""
        others = {name: entry for name, entry in state.items() if not is_of_experts(entry)}
        writers = self._writers(list(others.values()))
        return state | {
            name: self._entry(entry, writer) for (name, entry), writer in zip(others.items(), writers, strict=True)
        }

    def _entry(self, entry: Entry, writer: int) -> Entry:
        place = self._replicas.index(self._layout.slot.replica)
        number = (place - writer) % len(self._replicas)
        entry = dataclasses.replace(entry, replica_id=(*entry.replica_id[:-1], number))
        cut = cut_of(entry.data)
        if cut is None:
            return entry
        tensor, family = cut
        return in_slices(entry, tensor, tensor.local_index(self._layout.held(family)))

    @property
    def _replicas(self) -> Sequence[int]:
        return self._layout.surviving.replicas

    def _writers(self, entries: list[Entry]) -> list[int]:
        """Return which replica writes each entry: the one with the least to write so far. All slots of a stage
        agree."""
        work = [0] * (len(self._replicas) if self._shared_out else 1)
        found = []
        for entry in entries:
            found.append(work.index(min(work)))
            work[found[-1]] += _elements(entry)
        return found


@contextlib.contextmanager
def as_torch_dist(args: Any) -> Iterator[None]:
    """Have Megatron save in the format that fits all layouts."""
    before = args.ckpt_format, args.use_dist_ckpt
    args.ckpt_format, args.use_dist_ckpt = "torch_dist", True
    try:
        yield
    finally:
        args.ckpt_format, args.use_dist_ckpt = before


def in_the_format_found(original: Any) -> Any:
    """`load_checkpoint` of a job with `--ckpt-format torch`: in whichever format the job before it has saved."""

    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        job_args = get_args()
        found = _format_found(job_args)
        with as_torch_dist(job_args) if found == checkpointing.CheckpointType.GLOBAL else contextlib.nullcontext():
            return original(*args, **kwargs)

    return load


def _format_found(args: Any) -> Any:
    """Return Megatron's name for the format of the checkpoint that is to be loaded; None if there is none."""
    return checkpointing._load_base_checkpoint(args.load, args, rank0=True)[-1] if args.load else None


def _refuse_files_of_slots(args: Any) -> None:
    if args.ckpt_format == TORCH and _format_found(args) == checkpointing.CheckpointType.LEGACY:
        raise Refused(
            f"the checkpoint in {args.load} has one file for each slot of the nominal layout, and some slots are lost",
            fix="start with full-width replicas, and save once with --ckpt-format torch_dist",
        )


class _Recut:
    """A model chunk, reduced to what saving and loading call."""

    def __init__(self, chunk: Any, recut: Callable[[dict[str, Entry]], dict[str, Entry]]) -> None:
        self._chunk, self._recut = chunk, recut

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Entry]:
        return self._recut(self._chunk.sharded_state_dict(*args, **kwargs))


def _elements(entry: Entry) -> int:
    """Count the elements of the whole tensor, so that the count is the same for all of its slots."""
    cut = cut_of(entry.data)
    if cut is not None:
        return cut[0].elements
    return entry.data.numel() if isinstance(entry.data, torch.Tensor) else 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Section:
    """A part of a whole tensor, along the dim that is cut, that Megatron saves as a tensor of its own."""

    key: str
    start: int
    size: int

    def of(self, places: Spans) -> Spans:
        """Return the part of some places that is in this section."""
        within = ((max(start, self.start), min(stop, self.start + self.size)) for start, stop in places)
        return tuple((start, stop) for start, stop in within if start < stop)


def _sections(evens: Sequence[ShardedTensor], whole: Tensor) -> list[_Section]:
    """Return the sections that Megatron's own entries of a parameter have: a run each if it names them apart."""
    keys = [even.key for even in evens]
    if len(set(keys)) == 1:
        return [_Section(key=keys[0], start=0, size=whole.shape[whole.dim])]
    starts = [run.start for run in whole.runs]
    ends = [*starts[1:], whole.shape[whole.dim]]
    return [
        _Section(key=key, start=start, size=end - start) for key, start, end in zip(keys, starts, ends, strict=True)
    ]


def in_slices(entry: Entry, whole: Tensor, places: Spans) -> ShardedTensorFactory:
    """Return an entry whose data are at these places of a whole tensor, along the dim that is cut, in this order.

    Megatron stacks the layers of a model in one tensor, along axes before the parameter's own. Each slice gets these
    axes here: slices are not even shares, and Megatron cannot add the axes to them later.
    """
    evens = list(nested_values([entry.build() if isinstance(entry, ShardedTensorFactory) else entry]))
    even, ahead = evens[0], evens[0].prepend_axis_num
    before, around = even.global_offset[:ahead], even.global_shape[:ahead]
    slices = [(section, start, stop) for section in _sections(evens, whole) for start, stop in section.of(places)]
    lengths = [stop - start for _, start, stop in slices]

    def along(others: Sequence[int], size: int) -> tuple[int, ...]:
        return (*others[: whole.dim], size, *others[whole.dim + 1 :])

    def build(key: str, data: torch.Tensor, replica_id: Any, _: Any) -> list[ShardedTensor]:
        assert data.shape[whole.dim] == sum(lengths), "a slot saves what it holds"
        parts = torch.split(data.detach()[(None,) * ahead], lengths, ahead + whole.dim)
        return [
            ShardedTensor(
                key=key + section.key.removeprefix(entry.key),
                data=part,
                dtype=part.dtype,
                local_shape=tuple(part.shape),
                global_shape=(*around, *along(whole.shape, section.size)),
                global_offset=(*before, *along((0,) * len(whole.shape), start - section.start)),
                axis_fragmentations=None,
                replica_id=replica_id,
                allow_shape_mismatch=even.allow_shape_mismatch,
            )
            for part, (section, start, _) in zip(parts, slices, strict=True)
        ]

    def merge(parts: list[torch.Tensor]) -> torch.Tensor:
        merged = parts[0] if len(parts) == 1 else torch.cat(parts, ahead + whole.dim)
        assert math.prod(merged.shape[:ahead]) == 1, "a parameter is of one layer"
        return merged.view(merged.shape[ahead:])

    return ShardedTensorFactory(
        key=entry.key, data=entry.data, build_fn=build, merge_fn=merge, replica_id=entry.replica_id
    )
