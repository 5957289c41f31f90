"""Computes the cost of each route of a segment's gradients, and chooses one.

The cost of a route is that of its busiest rank for one reduction of a segment's gradients, in nanoseconds:

    bytes on its NIC / NIC speed  +  bytes in the domain / domain speed  +  collectives x launch cost

A ring all-reduce among k ranks sends 2 (k - 1) / k of the buffer. Collectives are counted per bucket, Megatron's
bucket size being max(40 M, 1 M x replicas) parameters. Both routes reduce the same elements; `direct` sends nothing in
the domain, `via_core` has one collective per core, and one each for the ways there and back. Replicated gradients are
summed once more, over all ranks with the segment, on either route. A segment in which no group is degraded keeps the
framework's own path. Where layers have moved all routes are direct: a rank with several segments would have an exchange
over cores for each.
"""

import dataclasses
from collections import Counter

from ntp_plugin.config.sections import Hardware
from ntp_plugin.planning import spans as sp
from ntp_plugin.planning.core_route import CoreRoute, plan_core_route
from ntp_plugin.planning.lanes import SegmentLanes, UnitsByFamily, busiest_lane_count, plan_lanes
from ntp_plugin.planning.topology import SurvivingReplicas
from ntp_plugin.planning.units import StageUnits

FRAMEWORK, DIRECT, VIA_CORE = "framework", "direct", "via_core"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RouteCost:
    """Cost of one reduction for the busiest rank; `communicators` counts the process groups of the segment."""

    nic_bytes: int
    domain_bytes: int
    collectives: int
    communicators: int
    cost_ns: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SegmentRoute:
    """How the gradients of one segment are reduced."""

    segment: int
    route: str
    lanes: SegmentLanes
    cores: CoreRoute | None
    direct_cost: RouteCost
    core_cost: RouteCost | None
    least_nic_bytes: int
    """Bytes that the widest slot must send in any case: its own units once, replicated parameters included."""


def plan_route(
    surviving: SurvivingReplicas,
    units: StageUnits,
    segment: int,
    *,
    wanted: str,
    gradient_bytes: int,
    hardware: Hardware,
) -> SegmentRoute:
    """Plan the lanes of a segment, and the cheaper route (`wanted="auto"`) or the wanted one."""
    lanes = plan_lanes(surviving, units, segment)
    price = _Price(segment=segment, surviving=surviving, units=units, gradient_bytes=gradient_bytes, hardware=hardware)
    direct = price.direct(lanes)
    degraded = bool(surviving.patterns_of_segment(segment)) and surviving.is_nominally_cut
    cores = plan_core_route(surviving, units, segment) if degraded else None
    core_cost = price.via_core(cores) if cores else None
    route = FRAMEWORK if surviving.is_nominally_cut else DIRECT
    if core_cost:
        cheaper = VIA_CORE if core_cost.cost_ns < direct.cost_ns else DIRECT
        route = cheaper if wanted == "auto" else wanted
    return SegmentRoute(
        segment=segment,
        route=route,
        lanes=lanes,
        cores=cores if route == VIA_CORE else None,
        direct_cost=direct,
        core_cost=core_cost,
        least_nic_bytes=price.least(lanes),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Price:
    segment: int
    surviving: SurvivingReplicas
    units: StageUnits
    gradient_bytes: int
    hardware: Hardware

    def direct(self, lanes: SegmentLanes) -> RouteCost:
        return self._cost(self._busiest(lanes), 0, busiest_lane_count(lanes), len(lanes.lanes))

    def least(self, lanes: SegmentLanes) -> int:
        return _ring(self._busiest(lanes) + self._replicated, len(self.surviving.replicas))

    def via_core(self, cores: CoreRoute) -> RouteCost:
        busiest_core = max(self._bytes(core) for core in cores.cores)
        domain = 0
        for assignment in cores.assignments:
            sent, received = Counter[int](), Counter[int]()
            for hop in assignment.hops:
                size = self._bytes(((hop.family, hop.units),))
                sent[hop.source] += size
                received[hop.target] += size
            # Out and back: each slot sends the units it lends, and returns the units it was lent.
            domain = max([domain, *(sent[slot] + received[slot] for slot in sent | received)])
        lends = any(assignment.hops for assignment in cores.assignments)
        return self._cost(busiest_core, domain, 1 + 2 * lends, len(cores.cores))

    @property
    def _replicated(self) -> int:
        return self.units.replicated_elements * self.gradient_bytes

    def _bytes(self, units: UnitsByFamily) -> int:
        per_unit = self.units.elements_per_unit
        return sum(sp.size(spans) * per_unit[family] for family, spans in units) * self.gradient_bytes

    def _busiest(self, lanes: SegmentLanes) -> int:
        """The most bytes that one rank has in all its lanes together."""
        sizes = [self._bytes(lane.units) for lane in lanes.lanes]
        return max(
            sum(sizes[index] for index in indices)
            for pattern in lanes.patterns
            for indices in lanes.lanes_of(pattern).values()
        )

    @property
    def _ranks(self) -> int:
        """Number of ranks that have this segment."""
        surviving = self.surviving
        lost = (len(surviving.pattern_of_segment(replica, self.segment)) for replica in surviving.replicas)
        return sum(surviving.topology.tp - number for number in lost)

    def _cost(self, busiest: int, domain: int, lanes_of_rank: int, communicators: int) -> RouteCost:
        per_bucket = max(40_000_000, 1_000_000 * self.surviving.topology.dp)
        buckets = -(-self.units.elements // self.surviving.topology.tp // per_bucket)
        hardware = self.hardware
        nic = _ring(busiest, len(self.surviving.replicas)) + _ring(self._replicated, self._ranks)
        collectives = lanes_of_rank * buckets + bool(self._replicated)
        seconds = nic / (hardware.nic_gb_per_s * 1e9) + domain / (hardware.domain_gb_per_s * 1e9)
        return RouteCost(
            nic_bytes=nic,
            domain_bytes=domain,
            collectives=collectives,
            communicators=communicators,
            cost_ns=round(seconds * 1e9 + collectives * hardware.lane_launch_us * 1e3),
        )


def _ring(size: int, members: int) -> int:
    """Bytes that each member sends in an all-reduce."""
    return 2 * (members - 1) * size // members
