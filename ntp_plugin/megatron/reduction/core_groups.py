"""This rank's exchange over core slots, in the groups that `lane_groups.py` describes."""

from ntp_plugin.megatron.layout import Layout
from ntp_plugin.megatron.reduction.lane_groups import Made, Wanted
from ntp_plugin.planning.recovery_plan import RecoveryPlan
from ntp_plugin.reduction import core_slices
from ntp_plugin.reduction.core_lanes import CoreExchange


def find_core_exchange(layout: Layout, plan: RecoveryPlan, wanted: Wanted, made: Made) -> CoreExchange | None:
    """Return the exchange, or None if this rank's stage uses no cores."""
    stage = layout.slot.stage
    cores = plan.routes[stage].cores if layout.surviving.is_nominally_cut else None
    if cores is None:
        return None
    mine = {key[0]: made[key] for key, members in wanted.items() if layout.slot in members and key[1] == stage}
    units = plan.nominal.units.stages[stage]
    slices = core_slices.find_core_slices(
        cores, units, tp=layout.topology.tp, pattern=layout.pattern, slot=layout.slot.tp
    )
    return CoreExchange(slices, domain=mine["domain"], members=mine.get("core"))
