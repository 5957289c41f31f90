"""Negative controls: in each of them one thing is wrong on purpose, and the comparison must notice.

Called in a rank, before Megatron starts: what is spoilt stays so for the life of the process.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch

from ntp_plugin.megatron.lane_sync import LaneSync
from ntp_plugin.megatron.pipeline import Pipeline
from ntp_plugin.megatron.uneven_layers import UnevenLayers
from ntp_plugin.planning.spans import Spans
from ntp_plugin.training.gradient_lanes import GradientLane, Slice


def scale_by_replicas() -> None:
    """1 / DP, as if all replicas ran as many micro-batches."""
    _put(LaneSync, "scale", property(lambda sync: 1 / sync._layout.topology.dp))


def norms_not_synced() -> None:
    """The slot that the hurt replica has lost keeps its own replica's gradients of what is replicated."""
    reduce = LaneSync.finalize

    def finalize(sync: LaneSync, *args: Any, **kwargs: Any) -> None:
        odd = any(slot.tp == sync._layout.slot.tp for slot in sync._layout.lost)
        named = sync.parameters
        whole = [named[name] for name, tensor in sync.tensors.items() if not tensor.family] if odd else []
        before = [parameter.main_grad.clone() for parameter in whole]
        reduce(sync, *args, **kwargs)
        for parameter, own in zip(whole, before, strict=True):
            parameter.main_grad.copy_(own)

    _put(LaneSync, "finalize", finalize)


def gate_and_up_swapped() -> None:
    """A hurt replica takes the gradients of one half for those of the other."""
    plan = LaneSync._slices

    def slices(sync: LaneSync, units: Mapping[str, Spans]) -> tuple[Slice, ...]:
        named = sync.parameters
        return tuple(
            _swapped(piece, named[piece.name].shape[piece.dim] // 2)
            if sync._layout.pattern and len(sync.tensors[piece.name].runs) == 2
            else piece
            for piece in plan(sync, units)
        )

    _put(LaneSync, "_slices", slices)


def _swapped(piece: Slice, half: int) -> Slice:
    parts = [part for a, b in piece.ranges for part in ((a, min(b, half)), (max(a, half), b)) if part[0] < part[1]]
    other = tuple((a + half, b + half) if b <= half else (a - half, b - half) for a, b in parts)
    return Slice(name=piece.name, dim=piece.dim, ranges=other)


def vocabulary_row_shifted() -> None:
    """A hurt replica looks its tokens up one row beside."""
    build = UnevenLayers.embedding

    def embedding(layers: UnevenLayers, original: Any) -> Any:
        init = build(layers, original)

        @functools.wraps(original)
        def shifted(module: Any, *args: Any, **kwargs: Any) -> None:
            init(module, *args, **kwargs)
            if layers._layout.pattern:
                module.vocab_start_index += 1
                module.vocab_end_index += 1

        return shifted

    _put(UnevenLayers, "embedding", embedding)


def norm_not_synced() -> None:
    """Each replica clips by the norm that it found."""
    _put(LaneSync, "norm", lambda _, original: original)


def activations_of_another_micro_batch() -> None:
    """A hurt replica sends on what it has made of the micro-batch before."""
    operations = Pipeline._operations
    before: list[torch.Tensor] = []

    def late(pipeline: Pipeline, *, tensor_send_next: torch.Tensor | None, **said: Any) -> Any:
        if tensor_send_next is not None:
            before.append(tensor_send_next.clone())
            tensor_send_next = before[-2:][0]
        return operations(pipeline, tensor_send_next=tensor_send_next, **said)

    _put(Pipeline, "_operations", late)


def shared_rows_not_summed() -> None:
    """Each stage steps its copy of the word embedding by its own gradient."""
    make = LaneSync._shared_lanes

    def alone(sync: LaneSync) -> list[GradientLane]:
        return [dataclasses.replace(lane, group=None) for lane in make(sync)]

    _put(LaneSync, "_shared_lanes", alone)


def _put(owner: type, name: str, spoilt: object) -> None:
    setattr(owner, name, spoilt)
