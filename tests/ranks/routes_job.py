"""The ranks of `test_routes.py`: one reduction after another, by both routes, of known gradients."""

import dataclasses
import functools

import torch
import torch.distributed as dist

from benchmarks.routed import Routed, connect, small_nominal
from ntp_plugin.planning.topology import parse_slots
from ntp_plugin.reduction.core_lanes import CoreShards, CoreSums
from ntp_plugin.reduction.gradient_lanes import GradientLanes, only

RATE = 0.5
"""Of the plain descent that the sharded optimizer does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """Results of a slot: route -> tensor -> values, and their places in the full tensor."""

    replica: int
    index: dict
    values: dict


def reduce_by_all_routes(rank, tp, dp, losses, spoil=None):
    """For each loss: what this slot has in the end, or nothing where it is lost."""
    connect(rank, tp * dp)
    nominal, outcomes = small_nominal(tp, dp), []
    for loss in losses:
        routed = Routed(nominal, parse_slots([loss], nominal.topology), rank.slot, spoil)
        outcomes.append(everything(routed) if routed.lives else None)
    dist.barrier()
    dist.destroy_process_group()
    return outcomes


def everything(routed):
    names = [tensor.name for tensor in routed.tensors]
    buckets = [names[:2], names[2:]]
    direct = [functools.partial(GradientLanes, only(routed.lanes, names)) for names in buckets]
    via_core = [CoreSums(routed.core_exchange.only(names)).begin for names in buckets]
    found = {
        "direct": sums(routed, buckets, direct),
        "via_core": sums(routed, buckets, via_core),
        "repeated": sums(routed, buckets, via_core),
        "sharded": weights(routed, buckets, [CoreShards(routed.core_exchange.only(names)) for names in buckets]),
    }
    return Ended(
        replica=routed.slot.replica,
        index={tensor.name: routed.index(tensor).numpy() for tensor in routed.tensors},
        values={route: {name: value.numpy() for name, value in values.items()} for route, values in found.items()},
    )


def begun(begins, tensors, buckets):
    """All buckets are under way at once, as with overlap."""
    return [begin({name: tensors[name] for name in names}) for begin, names in zip(begins, buckets, strict=True)]


def sums(routed, buckets, begins):
    """A second step finds nothing left of the first."""
    for _ in range(2):
        gradients = routed.gradients()
        for reduction in begun(begins, gradients, buckets):
            reduction.finish()
    return gradients


def weights(routed, buckets, sharded):
    """Weights, the same in all replicas, after a step of plain descent on the shards."""
    values = routed.mine(0)
    shards = [
        shard
        for lanes, names in zip(sharded, buckets, strict=True)
        for shard in lanes.shard(names, {name: values[name] for name in names}, dtype=torch.float64)
    ]
    for reduction in begun([lanes.begin for lanes in sharded], routed.gradients(), buckets):
        reduction.finish()
    with torch.no_grad():
        for shard in shards:
            shard.parameter -= RATE * shard.gradient
        for lanes in sharded:
            lanes.begin_spread()
        for lanes in sharded:
            lanes.finish_spread()
    return values
