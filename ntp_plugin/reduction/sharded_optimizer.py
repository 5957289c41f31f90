"""Shards optimizer state over the members of each lane (ZeRO-1, lane by lane).

The members of a lane hold the same units, so each needs to keep the optimizer's state for only a part of them. What a
lane holds is packed into one flat buffer, in the lane's order, padded to equal shards. A step sums the gradients so
that each member gets its shard of them, applies the optimizer to its shard, and gathers the parameters back from all
members. Sums and gathers are begun and finished separately, so that they run while something is computed; each costs
one more copy of what is under way.

In the nominal layout the lanes are the TP slots, which is how frameworks shard anyway. When a slot is lost, only its
own lane falls apart, into lanes of the orphans that were dealt; the members and shards of all others stay.

A shard is an ordinary `nn.Parameter` in the precision of the optimizer. Any element-wise optimizer can step it. Every
element is in exactly one shard of the job, so a norm over all shards counts everything once.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from ntp_plugin.reduction.gradient_lanes import GradientLane, Slice, elements, only, pack, unpack

type Tensors = Mapping[str, torch.Tensor]


type _UnderWay = tuple[dist.Work | None, torch.Tensor]
"""The collective to wait for, if there is one, and the tensor that it fills."""


def _waited(under_way: _UnderWay) -> torch.Tensor:
    work, values = under_way
    if work is not None:
        work.wait()
    return values


class LaneShard:
    """This member's shard of what a lane holds."""

    def __init__(self, lane: GradientLane, parameters: Tensors, *, dtype: torch.dtype) -> None:
        self.lane, self._parameters = lane, parameters
        self._members = dist.get_world_size(lane.group) if lane.group is not None else 1
        # torch's get_rank goes by the world, which differs while only some slots train.
        self._place = lane.group.rank() if lane.group is not None else 0
        with torch.no_grad():
            mine = self._mine(self._packed(parameters))
            self.parameter = torch.nn.Parameter(mine.to(dtype, copy=True))
        self.gradient = torch.zeros_like(self.parameter)
        """The gradient of the shard, when a step's sums are finished."""
        self._sums: _UnderWay | None = None
        self._spread: _UnderWay | None = None

    @property
    def own_elements(self) -> int:
        """How many elements of the lane are in the shard; what follows them is padding."""
        size = self.parameter.numel()
        return min(max(self._elements - self._place * size, 0), size)

    def holds(self) -> Iterator[tuple[Slice, int, int, int]]:
        """Yield each slice with elements in the shard: its first and last flat element, and where they begin in the
        shard."""
        shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        size, at = self.parameter.numel(), 0
        first = self._place * size
        for lane_slice in self.lane.slices:
            count = elements([lane_slice], shapes)
            start, stop = max(first, at), min(first + size, at + count)
            if start < stop:
                yield lane_slice, start - at, stop - at, start - first
            at += count

    def gather(self, mine: torch.Tensor, into: Tensors) -> None:
        """Gather into these tensors what each member has a shard of; all members call this together."""
        whole = mine
        if self.lane.group is not None:
            whole = torch.empty(mine.numel() * self._members, dtype=mine.dtype, device=mine.device)
            dist.all_gather_into_tensor(whole, mine.contiguous(), group=self.lane.group)
        unpack(self.lane.slices, into, whole[: self._elements])

    def cut(self, tensors: Tensors) -> torch.Tensor:
        """This member's shard of the full values."""
        return self._mine(self._packed(tensors))

    def begin_sums(self, gradients: Tensors) -> None:
        """Begin to sum; each member will have its shard of the sums."""
        assert self._sums is None, "one step at a time"
        buffer = self._packed(gradients)
        if not self.lane.counted:
            buffer.zero_()
        if self.lane.group is None:
            self._sums = None, buffer
            return
        mine = torch.empty_like(self._mine(buffer))
        work = dist.reduce_scatter_tensor(mine, buffer, group=self.lane.group, async_op=True)
        self._sums = work, mine

    def finish_sums(self) -> None:
        """Wait for the sums; they are in `gradient`."""
        assert self._sums is not None, "they were begun"
        self.gradient.copy_(_waited(self._sums))
        self._sums = None

    def begin_spread(self) -> None:
        """Begin to give every member the parameters of all shards, with the current values of this shard."""
        assert self._spread is None, "one step at a time"
        mine = self.parameter.detach().to(next(iter(self._parameters.values())).dtype, copy=True)
        if self.lane.group is None:
            self._spread = None, mine
            return
        whole = torch.empty(mine.numel() * self._members, dtype=mine.dtype, device=mine.device)
        work = dist.all_gather_into_tensor(whole, mine, group=self.lane.group, async_op=True)
        self._spread = work, whole

    @property
    def on_its_way(self) -> bool:
        return self._spread is not None

    def finish_spread(self) -> None:
        """Wait for the parameters, if they are under way."""
        if self._spread is not None:
            unpack(self.lane.slices, self._parameters, _waited(self._spread)[: self._elements])
            self._spread = None

    def _packed(self, tensors: Tensors) -> torch.Tensor:
        """Pack the tensors, padded to equal shards."""
        flat = pack(self.lane.slices, tensors)
        self._elements = flat.numel()
        return torch.nn.functional.pad(flat, (0, -flat.numel() % self._members))

    def _mine(self, buffer: torch.Tensor) -> torch.Tensor:
        size = buffer.numel() // self._members
        return buffer[self._place * size : (self._place + 1) * size]


class LaneShards:
    """This member's shards of several lanes, which are summed together."""

    def __init__(self, lanes: Sequence[GradientLane]) -> None:
        self._lanes = lanes
        self._shards: list[LaneShard] = []

    def shard(self, names: Collection[str], parameters: Tensors, *, dtype: torch.dtype) -> list[LaneShard]:
        """Make shards of these parameters, one for each lane that has some. Each optimizer group has its own shards."""
        fresh = [LaneShard(lane, parameters, dtype=dtype) for lane in only(self._lanes, names) if lane.slices]
        self._shards += fresh
        return fresh

    def __iter__(self) -> Iterator[LaneShard]:
        """Iterate over the shards made so far."""
        return iter(self._shards)

    def gather(self, mine: Callable[[LaneShard], torch.Tensor], into: Tensors) -> None:
        """Gather what the members hold shards of into tensors in the parameters' shape; all members call this
        together."""
        for shard in self._shards:
            shard.gather(mine(shard), into)

    def cut(self, tensors: Tensors) -> Iterator[tuple[LaneShard, torch.Tensor]]:
        """Yield the shards, with their values of tensors in the parameters' shape; all members call this together."""
        for shard in self._shards:
            yield shard, shard.cut(tensors)

    def begin(self, gradients: Tensors) -> "LaneShards":
        """Begin to sum."""
        for shard in self._shards:
            shard.begin_sums(gradients)
        return self

    def finish(self) -> None:
        """Wait for every shard's sums."""
        for shard in self._shards:
            shard.finish_sums()

    def scale_gradients(self, factor: float) -> None:
        for shard in self._shards:
            shard.gradient.mul_(factor)

    def begin_spread(self) -> None:
        """Begin to give every member the parameters."""
        for shard in self._shards:
            shard.begin_spread()

    @property
    def on_its_way(self) -> bool:
        """Whether parameters are under way and not in place yet."""
        return any(shard.on_its_way for shard in self._shards)

    def finish_spread(self) -> None:
        """Wait for the parameters, if they are under way."""
        for shard in self._shards:
            shard.finish_spread()
