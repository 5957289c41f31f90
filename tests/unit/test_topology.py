import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntp_plugin.errors import ConfigError
from ntp_plugin.planning.topology import Slot, SurvivingReplicas, Topology, parse_slots


def layout(tp=4, pp=2, dp=3, gpus_per_node=4):
    return Topology(tp=tp, pp=pp, dp=dp, gpus_per_node=gpus_per_node, nodes_per_rack=2, racks_per_power_row=2)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
def test_ranks_and_slots_are_one_to_one_in_megatrons_order(tp, pp, dp):
    topology = layout(tp, pp, dp)
    slots = [topology.slot_of(rank) for rank in range(topology.size)]
    assert [topology.rank_of(slot) for slot in slots] == list(range(topology.size))
    assert slots[: tp * dp] == [Slot(replica=r, stage=0, tp=t) for r in range(dp) for t in range(tp)]


@given(st.integers(0, 2), st.integers(0, 1), st.integers(0, 3))
def test_a_slots_name_is_read_back(replica, stage, tp):
    slot = Slot(replica=replica, stage=stage, tp=tp)
    assert parse_slots([str(slot)], layout()) == {slot}


def test_names_of_more_than_one_slot():
    topology = layout()
    assert parse_slots(["r1.s0"], topology) == set(topology.group(1, 0))
    assert parse_slots(["r1"], topology) == set(topology.group(1, 0)) | set(topology.group(1, 1))
    assert parse_slots(["node1"], topology) == set(topology.group(1, 0))
    assert parse_slots(["r0.s0.t1, r2.s1.t3", "r0.s0.t1"], topology) == {
        Slot(replica=0, stage=0, tp=1),
        Slot(replica=2, stage=1, tp=3),
    }


@pytest.mark.parametrize(
    "word", ["", "r", "x1", "r1.t2", "r1.s0.t4", "r3", "r0.s2", "node6", "r-1", "r1.s0.t1.x", "r\u0661"]
)
def test_an_invalid_slot_name_is_refused(word):
    with pytest.raises(ConfigError, match=r"does not name a slot|is not in this layout"):
        parse_slots([word], layout())


def test_groups_are_sorted_into_nominal_degraded_and_dropped():
    topology = layout()
    lost = parse_slots(["r0.s0.t1", "r1.s1.t0,r1.s1.t1,r1.s1.t2", "r1.s0.t0"], topology)
    surviving = SurvivingReplicas(topology=topology, lost=lost, min_tp_width=2)
    assert surviving.dropped == {1}
    assert surviving.degraded == {(0, 0): (1,)}
    assert surviving.replicas == (0, 2)
    assert [str(slot) for slot in surviving.idle()] == ["r1.s0.t1", "r1.s0.t2", "r1.s0.t3", "r1.s1.t3"]
    assert surviving.patterns_of_stage(0) == {(1,): (0,)}
    assert surviving.patterns_of_stage(1) == {}


def test_a_host_is_lost_when_all_its_slots_are():
    topology = layout()
    surviving = SurvivingReplicas(topology=topology, lost=parse_slots(["node2", "r0.s0.t0"], topology), min_tp_width=1)
    assert surviving.lost_nodes == (2,)
