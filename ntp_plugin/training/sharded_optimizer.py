"""Optimizer state sharded over the members of each lane (ZeRO-1, lane by lane).

The members of a lane hold the same units, so each of them needs to keep the optimizer's state of a part of them only.
What a lane holds is packed into one flat buffer, in the lane's order, padded to equal shards. A step sums the
gradients so that each member gets its shard of them, applies the optimizer to its shard, and gathers the parameters
back from all.

In a whole layout the lanes are the TP slots, which is how frameworks shard anyway. When a slot is lost only its own
lane falls apart into lanes of what was dealt; the members and shards of all others stay.

A shard is an ordinary `nn.Parameter` in the precision of the optimizer; which optimizer it is given to is not our
business, as long as that is element-wise. Every element is in exactly one shard of the whole job, so a norm over all
shards counts everything once.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist

from ntp_plugin.training.gradient_lanes import GradientLane, only, pack, unpack

type Tensors = Mapping[str, torch.Tensor]


class LaneShard:
    """This member's shard of what a lane holds."""

    def __init__(self, lane: GradientLane, parameters: Tensors, *, dtype: torch.dtype) -> None:
        self.lane, self._parameters = lane, parameters
        self._members = dist.get_world_size(lane.group) if lane.group is not None else 1
        self._place = dist.get_rank(lane.group) if lane.group is not None else 0
        with torch.no_grad():
            mine = self._mine(self._packed(parameters))
            self.parameter = torch.nn.Parameter(mine.to(dtype, copy=True))
        self.gradient = torch.zeros_like(self.parameter)
        """Of the shard, when a step's sums are finished."""
        self._under_way: tuple[dist.Work | None, torch.Tensor] | None = None

    def start(self, gradients: Tensors) -> None:
        """Begin to sum; each member will have its shard of the sums."""
        assert self._under_way is None, "one step at a time"
        buffer = self._packed(gradients)
        if not self.lane.counted:
            buffer.zero_()
        if self.lane.group is None:
            self._under_way = None, buffer
            return
        mine = torch.empty_like(self._mine(buffer))
        work = dist.reduce_scatter_tensor(mine, buffer, group=self.lane.group, async_op=True)
        self._under_way = work, mine

    def finish(self) -> None:
        """Have the sums in `gradient`."""
        assert self._under_way is not None, "it was begun"
        work, mine = self._under_way
        if work is not None:
            work.wait()
        self.gradient.copy_(mine)
        self._under_way = None

    def spread(self) -> None:
        """Give every member the parameters that all shards together make."""
        mine = self.parameter.detach().to(next(iter(self._parameters.values())).dtype)
        whole = mine
        if self.lane.group is not None:
            whole = torch.empty(mine.numel() * self._members, dtype=mine.dtype, device=mine.device)
            dist.all_gather_into_tensor(whole, mine, group=self.lane.group)
        unpack(self.lane.slices, self._parameters, whole[: self._elements])

    def _packed(self, tensors: Tensors) -> torch.Tensor:
        """Flat, and padded to equal shards."""
        flat = pack(self.lane.slices, tensors)
        self._elements = flat.numel()
        return torch.nn.functional.pad(flat, (0, -flat.numel() % self._members))

    def _mine(self, buffer: torch.Tensor) -> torch.Tensor:
        size = buffer.numel() // self._members
        return buffer[self._place * size : (self._place + 1) * size]


class LaneShards:
    """This member's shards of some lanes, which are summed together."""

    def __init__(self, lanes: Sequence[GradientLane]) -> None:
        self._lanes = lanes
        self._shards: list[LaneShard] = []

    def shard(self, names: Collection[str], parameters: Tensors, *, dtype: torch.dtype) -> list[LaneShard]:
        """Shards of these parameters, one for each lane that has some; what an optimizer treats alike has its own."""
        fresh = [LaneShard(lane, parameters, dtype=dtype) for lane in only(self._lanes, names) if lane.slices]
        self._shards += fresh
        return fresh

    def begin(self, gradients: Tensors) -> "LaneShards":
        """Begin to sum."""
        for shard in self._shards:
            shard.start(gradients)
        return self

    def finish(self) -> None:
        """Have every shard's sums."""
        for shard in self._shards:
            shard.finish()

    def scale_gradients(self, factor: float) -> None:
        for shard in self._shards:
            shard.gradient.mul_(factor)

    def spread(self) -> None:
        """Give every member the parameters."""
        for shard in self._shards:
            shard.spread()
