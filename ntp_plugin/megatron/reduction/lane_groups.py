"""Which process groups the lanes of a layout need. PURE.

Every rank makes all of them, at once and in this order, whether it is a member or not:

    lane        slots that hold the same units of a segment, if gradients go directly
    segment     all slots that have a segment, for replicated parameters
    shared      slots that hold the same rows of an embedding that is in two stages
    domain      the slots of one replica's stage, for the exchange over cores: apart from Megatron's own TP group, which
                is busy while something is lent
    core        the slots that are the same core in each replica
    expert      slots that hold the same experts of a stage
    dispatch    the slots that are left of an expert group that has lost some, which exchange tokens
    column      the same over all stages, for the norm of their gradients
    all         all slots that train, if others are present as well
"""

from collections.abc import Mapping
from typing import Any

from ntp_plugin.megatron.layout import SHARED, Layout
from ntp_plugin.planning.expert_groups import in_group, plan_expert_lanes
from ntp_plugin.planning.lanes import plan_shared_lanes
from ntp_plugin.planning.recovery_plan import RecoveryPlan
from ntp_plugin.planning.topology import Slot

type Key = tuple[str, int, int]
"""Kind, segment (the stage, unless layers have moved), and number."""
type Wanted = dict[Key, tuple[Slot, ...]]
type Made = Mapping[Key, Any]


def wanted_groups(layout: Layout, plan: RecoveryPlan) -> Wanted:
    """Return all groups, with their members."""
    wanted: Wanted = {}
    surviving = layout.surviving
    segments = plan.nominal.segments(surviving).stages
    for route in plan.routes:
        segment = route.segment
        if route.cores is None:
            wanted |= {
                ("lane", segment, number): tuple(lane.members(surviving))
                for number, lane in enumerate(route.lanes.lanes)
            }
        else:
            domains = ((replica, layout.topology.group(replica, segment)) for replica in surviving.replicas)
            wanted |= {
                ("domain", segment, replica): tuple(slot for slot in group if slot in layout.ranks)
                for replica, group in domains
            }
            wanted |= {
                ("core", segment, core): tuple(route.cores.members(core, surviving))
                for core in range(len(route.cores.cores))
            }
        stages = {replica: surviving.stage_of(replica, segment) for replica in surviving.replicas}
        wanted["segment", segment, 0] = tuple(slot for slot in layout.slots if slot.stage == stages[slot.replica])
        experts = plan_expert_lanes(surviving, segments[segment].experts, segment)
        wanted |= {("expert", segment, number): lane.members for number, lane in enumerate(experts)}
    if layout.idle:
        wanted["all", 0, 0] = layout.slots
    for slots in layout.reduced_expert_groups:
        group = in_group(layout.topology, slots[0])
        wanted["dispatch", group.stage, group.replica] = slots
        key = "column", 0, group.replica
        wanted[key] = (*wanted.get(key, ()), *slots)
    shared = plan_shared_lanes(surviving, plan.nominal.segments(surviving), SHARED)
    return wanted | {("shared", 0, number): tuple(members) for number, (members, _) in enumerate(shared)}
