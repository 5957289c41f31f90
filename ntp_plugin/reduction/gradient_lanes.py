"""Sums gradients over the replicas, lane by lane.

A lane is the ranks that hold the same units, one of each replica (`planning/lanes.py`). A rank is in one lane while its
stage has full width in all replicas, and in a few more when some replica is degraded. For each of its lanes it packs
the slices of all gradients that belong there into one flat buffer, and sums it over the lane; nothing crosses a TP
group. All lanes are under way at once; `finish` waits, and puts the sums back where the slices came from.

Every gradient element of a cut parameter is in exactly one lane, and all members of a lane leave it with the same bits.
Replicated parameters use the lane that covers all ranks. There one slot of each replica is `counted`, and the others
add zeros: their gradients are the same, and would count once per slot of the replica. So the sums are bit for bit the
same everywhere, which lanes of different members could not guarantee with three or more replicas.

All members of a lane pack in the same order: parameters as given, the units of each in ascending order, wherever they
lie in memory. Lanes are issued in the order given, which must be the same everywhere.

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
    """The ranges along `dim` of one gradient that belong to a lane, in the lane's order.

    `places` are their ranges in the full tensor, along the dim that it is cut by, for callers that need them.
    """

    name: str
    dim: int
    ranges: Spans
    places: Spans = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GradientLane:
    """What this rank adds to one lane. Without a group the rank is alone in it, and its gradients are the sums."""

    group: dist.ProcessGroup | None
    slices: tuple[Slice, ...]
    counted: bool = True


def only(lanes: Sequence[GradientLane], names: Collection[str]) -> list[GradientLane]:
    """The lanes with the slices of these gradients alone."""
    return [
        dataclasses.replace(lane, slices=tuple(part for part in lane.slices if part.name in names)) for lane in lanes
    ]


class GradientLanes:
    """One reduction: started when the gradients are computed, and finished before they are used."""

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
    """The number of elements in slices of tensors with these shapes."""
    return sum(sp.size(part.ranges) * math.prod(shapes[part.name]) // shapes[part.name][part.dim] for part in slices)


def pack(slices: Sequence[Slice], gradients: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Copy the slices into one flat tensor, each joined along its dim first: members hold it in different ranges."""
    return torch.cat([torch.cat(_parts(part, gradients), part.dim).reshape(-1) for part in slices])


def unpack(slices: Sequence[Slice], gradients: Mapping[str, torch.Tensor], buffer: torch.Tensor) -> None:
    """Copy a packed buffer back into the slices."""
    start = 0
    for lane_slice in slices:
        parts = _parts(lane_slice, gradients)
        lengths = [part.shape[lane_slice.dim] for part in parts]
        shape = list(parts[0].shape)
        shape[lane_slice.dim] = sum(lengths)
        values = buffer[start : start + math.prod(shape)].view(shape)
        at = 0
        for part, length in zip(parts, lengths, strict=True):
            part.copy_(values.narrow(lane_slice.dim, at, length))
            at += length
        start += values.numel()
    assert start == buffer.numel(), "a buffer is used up by the slices that it was packed from"


def _parts(lane_slice: Slice, gradients: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    gradient = gradients[lane_slice.name]
    return [gradient.narrow(lane_slice.dim, start, stop - start) for start, stop in lane_slice.ranges]
