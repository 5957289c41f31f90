"""What ranks do for `test_routes.py`: one reduction after another, by both routes, of gradients that are known."""

import dataclasses
import functools
import zlib

import numpy as np
import torch
import torch.distributed as dist

from ntp_plugin.config import schema
from ntp_plugin.config.sections import Job
from ntp_plugin.planning.core_route import plan_core_route
from ntp_plugin.planning.lanes import plan_lanes
from ntp_plugin.planning.recovery_plan import Nominal
from ntp_plugin.planning.shard_layout import lay_out
from ntp_plugin.planning.topology import parse_slots
from ntp_plugin.training.core_lanes import CoreShards, CoreSums, Crossing
from ntp_plugin.training.core_seats import find_seat
from ntp_plugin.training.cuts import global_ranges, local_ranges
from ntp_plugin.training.gradient_lanes import GradientLane, GradientLanes, Slice, only

RATE = 0.5
"""Of the plain descent that the sharded optimizer does."""


def nominal_of(tp, dp):
    """A model whose units do not divide evenly over fewer slots, with all kinds of cuts."""
    tables = {
        "parallel": {"tp": tp, "dp": dp},
        "model": {"layers": 1, "hidden": 4 * tp, "heads": 2 * tp, "groups": tp, "ffn": 5 * tp, "vocab": 7 * tp + 1}
        | {"vocab_multiple": 1, "seq": 4, "gated": True, "bias": True},
        "batch": {"micro_batch": 1, "global_batch": dp},
        "ntp": {"granule": 1, "copies": {"count": 0}},
    }
    return Nominal.of(schema.read(Job, tables, where=""))


def cut_tensors(nominal):
    return [tensor for tensor, _ in nominal.units.stages[0].tensors if tensor.family]


def whole(tensor, salt):
    """The whole gradient of a replica, or the weights."""
    generator = torch.Generator().manual_seed(zlib.crc32(tensor.name.encode()) + salt)
    return torch.randn(tensor.shape, dtype=torch.float64, generator=generator)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routed:
    """What a slot has in the end: tensor -> values, by route, and where they stand in the whole."""

    replica: int
    index: dict
    values: dict


def reduce_by_all_routes(rank, tp, dp, losses, spoil=None):
    """For each loss: what this slot has in the end, or nothing where it is lost."""
    store = dist.TCPStore("127.0.0.1", rank.port, None, False)
    dist.init_process_group("gloo", store=dist.PrefixStore("routes/", store), rank=rank.slot, world_size=tp * dp)
    nominal, outcomes = nominal_of(tp, dp), []
    for loss in losses:
        standing = nominal.standing(parse_slots([loss], nominal.topology))
        outcomes.append(_Routes(nominal, standing, rank.slot, spoil).everything())
    dist.barrier()
    dist.destroy_process_group()
    return outcomes


class _Routes:
    def __init__(self, nominal, standing, rank, spoil):
        self.topology, self.standing = nominal.topology, standing
        self.units, self.tensors = nominal.units.stages[0], cut_tensors(nominal)
        self.slot, self.spoil = self.topology.slot_of(rank), spoil
        self.pattern = standing.pattern(self.slot.replica, 0)
        self.held = {
            family.name: lay_out(family, self.topology.tp, self.pattern).holdings[self.slot.tp]
            for family in self.units.families
        }
        names = [tensor.name for tensor in self.tensors]
        self.buckets = [names[:2], names[2:]]

    def everything(self):
        lanes, crossing = self._lanes(), self._crossing()
        if self.slot in self.standing.lost:
            return None
        direct = [functools.partial(GradientLanes, only(lanes, names)) for names in self.buckets]
        via_core = [CoreSums(crossing.only(names)).begin for names in self.buckets]
        found = {"direct": self._sums(direct), "via_core": self._sums(via_core)}
        found["repeated"] = self._sums(via_core)
        found["sharded"] = self._weights([CoreShards(crossing.only(names)) for names in self.buckets])
        return Routed(
            replica=self.slot.replica,
            index={tensor.name: self._index(tensor) for tensor in self.tensors},
            values={route: {name: value.numpy() for name, value in values.items()} for route, values in found.items()},
        )

    # ------------------------------------------------ groups

    def _group(self, slots):
        return dist.new_group([self.topology.rank_of(slot) for slot in slots])

    def _lanes(self):
        mine = []
        for lane in plan_lanes(self.standing, self.units, 0).lanes:
            members = lane.members(self.standing)
            group, units = self._group(members), dict(lane.units)
            if self.slot in members:
                slices = tuple(
                    Slice(
                        name=tensor.name,
                        dim=tensor.dim,
                        ranges=local_ranges(tensor, self.held[tensor.family], units[tensor.family]),
                    )
                    for tensor in self.tensors
                    if tensor.family in units
                )
                mine.append(GradientLane(group=group, slices=slices))
        return mine

    def _crossing(self):
        route, domain, cores = plan_core_route(self.standing, self.units, 0), None, None
        for replica in self.standing.replicas:
            living = [slot for slot in self.topology.group(replica, 0) if slot not in self.standing.lost]
            group = self._group(living)
            domain = group if self.slot in living else domain
        for core in range(len(route.cores)):
            members = route.members(core, self.standing)
            group = self._group(members)
            cores = group if self.slot in members else cores
        if self.slot in self.standing.lost:
            return None
        seat = find_seat(route, self.units, tp=self.topology.tp, pattern=self.pattern, slot=self.slot.tp)
        if self.spoil is not None:
            seat = self.spoil(seat, self.slot)
        return Crossing(seat, domain=domain, members=cores)

    # ------------------------------------------------ steps

    def _index(self, tensor):
        ranges = global_ranges(tensor, self.held[tensor.family])
        return np.concatenate([np.arange(start, stop) for start, stop in ranges])

    def _mine(self, salt):
        return {
            tensor.name: whole(tensor, salt).index_select(tensor.dim, torch.from_numpy(self._index(tensor)))
            for tensor in self.tensors
        }

    def _of_bucket(self, tensors):
        return [{name: tensors[name] for name in names} for names in self.buckets]

    def _sums(self, begins):
        """All buckets are under way at once, as with overlap; a second step finds nothing left of the first."""
        for _ in range(2):
            gradients = self._mine(1 + self.slot.replica)
            under_way = [begin(part) for begin, part in zip(begins, self._of_bucket(gradients), strict=True)]
            for reduction in under_way:
                reduction.finish()
        return gradients

    def _weights(self, buckets):
        """Weights, the same in all replicas, after a step of plain descent on the shards."""
        weights, gradients = self._mine(0), self._mine(1 + self.slot.replica)
        shards = [
            shard
            for lanes, names in zip(buckets, self.buckets, strict=True)
            for shard in lanes.shard(names, {name: weights[name] for name in names}, dtype=torch.float64)
        ]
        under_way = [lanes.begin(part) for lanes, part in zip(buckets, self._of_bucket(gradients), strict=True)]
        for reduction in under_way:
            reduction.finish()
        with torch.no_grad():
            for shard in shards:
                shard.parameter -= RATE * shard.gradient
            for lanes in buckets:
                lanes.spread()
        return weights
