"""The process groups of the route over core slots, and this rank's way through them.

Every rank makes all of them, in one order: one of the slots of each replica, and one of the ranks that are each core.
The first is apart from Megatron's TP group, which is at work while something is lent.
"""

from typing import Any

import torch.distributed as dist

from ntp_plugin.megatron.layout import Layout
from ntp_plugin.planning.recovery_plan import RecoveryPlan
from ntp_plugin.planning.topology import Slot
from ntp_plugin.training import core_seats
from ntp_plugin.training.core_lanes import Crossing


def make_crossing(layout: Layout, plan: RecoveryPlan) -> Crossing | None:
    """None where this rank's stage does not go over cores."""
    mine = None
    for route, units in zip(plan.routes, plan.nominal.units.stages, strict=True):
        if route.cores is None:
            continue
        cores, standing = route.cores, layout.standing
        groups = [layout.topology.group(replica, route.stage) for replica in standing.replicas]
        living = [[slot for slot in group if slot in layout.ranks] for group in groups]
        members = [cores.members(core, standing) for core in range(len(cores.cores))]
        domain, same = _mine_of(layout, living), _mine_of(layout, members)
        if layout.slot.stage == route.stage:
            seat = core_seats.find_seat(
                cores, units, tp=layout.topology.tp, pattern=layout.pattern, slot=layout.slot.tp
            )
            mine = Crossing(seat, domain=domain, members=same)
    return mine


def _mine_of(layout: Layout, groups: list[list[Slot]]) -> Any:
    """All of these groups are made; the one that this rank is in."""
    made = [dist.new_group([layout.ranks[slot] for slot in slots]) for slots in groups]
    return next((group for group, slots in zip(made, groups, strict=True) if layout.slot in slots), None)
