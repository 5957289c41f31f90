"""This rank's way over core slots, in the groups that were made for it (`lane_groups.py`)."""

from ntp_plugin.megatron.lane_groups import Made, Wanted
from ntp_plugin.megatron.layout import Layout
from ntp_plugin.planning.recovery_plan import RecoveryPlan
from ntp_plugin.training import core_seats
from ntp_plugin.training.core_lanes import Crossing


def find_crossing(layout: Layout, plan: RecoveryPlan, wanted: Wanted, made: Made) -> Crossing | None:
    """None where this rank's stage does not go over cores."""
    stage = layout.slot.stage
    cores = plan.routes[stage].cores
    if cores is None:
        return None
    mine = {key[0]: made[key] for key, members in wanted.items() if layout.slot in members and key[1] == stage}
    units = plan.nominal.units.stages[stage]
    seat = core_seats.find_seat(cores, units, tp=layout.topology.tp, pattern=layout.pattern, slot=layout.slot.tp)
    return Crossing(seat, domain=mine["domain"], members=mine.get("core"))
