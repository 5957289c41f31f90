"""Negative controls: in each of them one thing is wrong on purpose, and the comparison must notice.

Called in a rank, before Megatron starts: what is spoilt stays so for the life of the process.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from ntp_plugin.megatron.lane_sync import LaneSync
from ntp_plugin.megatron.uneven_layers import UnevenLayers
from ntp_plugin.planning import spans as sp
from ntp_plugin.planning.spans import Spans
from ntp_plugin.training import core_seats
from ntp_plugin.training.core_seats import CoreSeat
from ntp_plugin.training.gradient_lanes import Slice


def scale_by_replicas() -> None:
    """1 / DP, as if all replicas ran as many micro-batches."""
    _put(LaneSync, "scale", property(lambda sync: 1 / sync._layout.topology.dp))


def norms_not_synced() -> None:
    """The slot that the hurt replica has lost keeps its own replica's gradients of what is replicated."""
    reduce = LaneSync.finalize

    def finalize(sync: LaneSync, *args: Any, **kwargs: Any) -> None:
        odd = any(slot.tp == sync._layout.slot.tp for slot in sync._layout.lost)
        named = dict(sync.model.module.named_parameters())
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
        named = dict(sync.model.module.named_parameters())
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


def units_to_the_wrong_core() -> None:
    """A slot that lends to two cores of its group exchanges what is as long for both."""
    find = core_seats.find_seat

    @functools.wraps(find)
    def exchanged(*args: Any, **kwargs: Any) -> CoreSeat:
        seat = find(*args, **kwargs)
        lent = [place for place, slices in enumerate(seat.out) if slices and place != seat.place]
        if len(lent) < 2:
            return seat
        out = [{piece.name: piece for piece in slices} for slices in seat.out]
        one, other = out[lent[0]], out[lent[1]]
        for name in one.keys() & other.keys():
            if sp.size(one[name].ranges) == sp.size(other[name].ranges):
                one[name], other[name] = other[name], one[name]
        return dataclasses.replace(seat, out=tuple(tuple(slices.values()) for slices in out))

    core_seats.find_seat = exchanged


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


def _put(owner: type, name: str, spoilt: object) -> None:
    setattr(owner, name, spoilt)
