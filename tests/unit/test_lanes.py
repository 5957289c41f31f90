import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ntp_plugin.config.sections import Hardware
from ntp_plugin.planning.recovery_plan import Nominal
from ntp_plugin.planning.routes import plan_route
from ntp_plugin.planning.topology import Slot
from tests.unit import properties
from tests.unit.strategies import jobs, losses, make_job


@st.composite
def degraded_jobs(draw):
    """Replicas are narrower in these, as in no context group."""
    nominal = Nominal.of(draw(jobs(contexts=(1,))))
    return nominal, draw(losses(nominal))


@given(degraded_jobs())
def test_lanes_are_exactly_the_owner_tuples_and_reach_everybody(case):
    properties.lanes_are_the_owner_tuples(*case)


@given(degraded_jobs())
def test_both_routes_reduce_exactly_the_same_elements(case):
    properties.both_routes_give_every_slot_the_same_sums(*case)


@given(degraded_jobs())
def test_cores_get_their_units_and_give_them_back(case):
    properties.cores_get_their_units_and_give_them_back(*case)


@given(degraded_jobs())
@settings(max_examples=30)
def test_a_full_width_stage_keeps_the_frameworks_reduction_with_tp_slots_as_lanes(case):
    nominal, lost = case
    surviving = nominal.surviving(lost)
    for stage, units in enumerate(nominal.units.stages):
        route = plan_route(surviving, units, stage, wanted="auto", gradient_bytes=4, hardware=Hardware())
        if surviving.patterns_of_segment(stage):
            assert route.route in ("direct", "via_core")
        else:
            assert route.route == "framework"
            assert [lane.tp for lane in route.lanes.lanes] == list(range(nominal.topology.tp))
            assert not any(lane.detours for lane in route.lanes.lanes)


def _route(*, launch_us: float, wanted: str = "auto", tp: int = 16):
    job = make_job(
        parallel={"tp": tp, "dp": 4},
        model={"layers": 2, "hidden": 1024, "heads": 64, "ffn": 16384, "vocab": 32000},
        ntp={"granule": 1, "copies": {"count": 0}},
    )
    nominal = Nominal.of(job)
    surviving = nominal.surviving(frozenset({Slot(replica=1, stage=0, tp=3), Slot(replica=2, stage=0, tp=9)}))
    hardware = Hardware(lane_launch_us=launch_us)
    return plan_route(surviving, nominal.units.stages[0], 0, wanted=wanted, gradient_bytes=4, hardware=hardware)


def test_the_cost_picks_direct_where_collectives_are_cheap_and_via_core_where_they_are_dear():
    assert _route(launch_us=0.0).route == "direct"
    assert _route(launch_us=1000.0).route == "via_core"
    assert _route(launch_us=1000.0, wanted="direct").route == "direct"
    dear = _route(launch_us=1000.0)
    assert dear.core_cost.cost_ns < dear.direct_cost.cost_ns
    assert dear.core_cost.communicators == 15 < dear.direct_cost.communicators


@pytest.mark.parametrize("tp", [4, 8, 16])
def test_direct_sends_at_most_a_twentieth_more_than_the_widest_slot_must(tp):
    route = _route(launch_us=0.0, tp=tp)
    assert route.direct_cost.nic_bytes <= 1.05 * route.least_nic_bytes
