"""Gradients summed over the replicas, lane by lane.

A lane is the ranks that hold the same units, one of each replica (`planning/lanes.py`). A rank is in one lane while
its whole stage is, and in a few more when some replica is degraded. For each of its lanes it packs the slices of all
gradients that belong there into one flat buffer, and sums it over the lane; nothing crosses a TP group. All lanes are
under way at once; `finish` waits, and puts the sums back where the slices came from.

Every gradient element of a cut parameter is in exactly one lane, and all members of a lane leave it with the same
bits. Replicated parameters ride on the lane that covers all ranks. There one slot of each replica is `counted`, and
the others add zeros: their gradients are the same, and would count as often as the replica has slots. So the sums are
bit for bit the same everywhere, which lanes of different members could not promise with three or more replicas.

All members of a lane pack in the same order: parameters as given, the units of each in ascending order, whatever
their places in memory are. Lanes are issued in the order given, which must be one and the same everywhere.

The buffers cost one more copy of the gradients while they are under way. All gradients have one dtype.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist

from ntp_plugin.planning import spans as sp
from ntp_plugin.planning.spans import Spans


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """The ranges along `dim` of one gradient that belong to a lane, in the lane's order; and, where somebody asks for
    it, which places of the whole tensor these are, along the dim that it is cut by."""

    name: str
    dim: int
    ranges: Spans
    places: Spans = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GradientLane:
    """What this rank adds to one lane. Without a group nobody else is in it, and the gradients are the sums."""

    group: dist.ProcessGroup | None
    slices: tuple[Slice, ...]
    counted: bool = True


def only(lanes: Sequence[GradientLane], names: Collection[str]) -> list[GradientLane]:
    """The lanes with the slices of these gradients alone."""
    return [
        dataclasses.replace(lane, slices=tuple(piece for piece in lane.slices if piece.name in names)) for lane in lanes
    ]


class GradientLanes:
    """One reduction: started when the gradients are there, and finished before they are used."""

    def __init__(self, lanes: Sequence[GradientLane], gradients: Mapping[str, torch.Tensor]) -> None:
        """Pack, and begin to sum; until `finish` the gradients stay as they are."""
        self._gradients = gradients
        self._under_way = []
        for lane in lanes:
            if lane.group is not None and lane.slices:
                buffer = pack(lane.slices, gradients)
                if not lane.counted:
                    buffer.zero_()
                self._under_way.append((lane, buffer, dist.all_reduce(buffer, group=lane.group, async_op=True)))

    def finish(self) -> None:
        """Wait, and replace the gradients by their sums."""
        for lane, buffer, work in self._under_way:
            assert work is not None, "this rank is in its lanes"
            work.wait()
            unpack(lane.slices, self._gradients, buffer)
        self._under_way.clear()


def elements(slices: Sequence[Slice], shapes: Mapping[str, Sequence[int]]) -> int:
    """How many elements slices of tensors with these shapes have."""
    return sum(
        sp.size(piece.ranges) * math.prod(shapes[piece.name]) // shapes[piece.name][piece.dim] for piece in slices
    )


def pack(slices: Sequence[Slice], gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """One flat copy of the slices. A slice is put together along its dim first: members hold it in different ranges."""
    return torch.cat([torch.cat(_parts(piece, gradients), piece.dim).reshape(-1) for piece in slices])


def unpack(slices: Sequence[Slice], gradients: Mapping[str, torch.Tensor], buffer: torch.Tensor) -> None:
    """The reverse: every slice gets its part of the buffer."""
    start = 0
    for piece in slices:
        parts = _parts(piece, gradients)
        lengths = [part.shape[piece.dim] for part in parts]
        shape = list(parts[0].shape)
        shape[piece.dim] = sum(lengths)
        values = buffer[start : start + math.prod(shape)].view(shape)
        at = 0
        for part, length in zip(parts, lengths, strict=True):
            part.copy_(values.narrow(piece.dim, at, length))
            at += length
        start += values.numel()
    assert start == buffer.numel(), "a buffer is used up by the slices that it was packed from"


def _parts(piece: Slice, gradients: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    gradient = gradients[piece.name]
    return [gradient.narrow(piece.dim, start, stop - start) for start, stop in piece.ranges]
