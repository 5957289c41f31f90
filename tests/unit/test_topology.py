import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntp_plugin.errors import BelowMinimum, ConfigError
from ntp_plugin.planning.topology import Slot, SurvivingReplicas, Topology, parse_slots


def layout(tp=4, pp=2, dp=3, gpus_per_node=4):
    return Topology(tp=tp, pp=pp, dp=dp, gpus_per_node=gpus_per_node, nodes_per_rack=2, racks_per_power_row=2)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
def test_ranks_and_slots_are_one_to_one_in_megatrons_order(tp, pp, dp):
    topology = layout(tp, pp, dp)
    slots = [topology.slot_of(rank) for rank in range(topology.size)]
    assert [topology.rank_of(slot) for slot in slots] == list(range(topology.size))
    assert slots[: tp * dp] == [Slot(replica=r, stage=0, tp=t) for r in range(dp) for t in range(tp)]


def test_with_dp_last_stages_are_counted_before_replicas_as_megatron_does():
    """`order="tp-cp-ep-pp-dp"`: TP fastest, then the parts of a sequence, then stages."""
    topology = dataclasses.replace(layout(tp=2, pp=2, dp=4), cp=2, dp_last=True)
    slots = [topology.slot_of(rank) for rank in range(topology.size)]
    assert [topology.rank_of(slot) for slot in slots] == list(range(topology.size))
    groups = [(slot.replica, slot.stage) for slot in slots[::2]]
    assert groups == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]


# ---------------------------------------------------------------- context parallelism


def sharing(lost, *, tp=2, pp=1, dp=8, cp=4):
    """The replicas of each context group that share its sequences, without the slots named as lost."""
    topology = dataclasses.replace(layout(tp, pp, dp), cp=cp)
    surviving = SurvivingReplicas(topology=topology, lost=parse_slots(lost, topology), min_tp_width=1)
    return [surviving.sharing(context) for context in range(topology.contexts)], surviving


@pytest.mark.parametrize(
    ("lost", "first"),
    [
        ([], (0, 1, 2, 3)),
        (["r1.s0.t0"], (0, 2)),
        (["r0.s0.t1", "r3.s0.t0"], (1, 2)),
        (["r0.s0.t0", "r1.s0.t0", "r3.s0.t0"], (2,)),
        (["r0", "r1", "r2", "r3"], ()),
    ],
)
def test_as_many_replicas_share_a_sequence_as_divide_it(lost, first):
    """The sequence is cut in 2 x 4 parts, which divide over 4, 2 or 1 replicas."""
    found, surviving = sharing(lost)
    assert found == [first, (4, 5, 6, 7)]
    assert not surviving.degraded, "all replicas of a context group have the full width"
    assert set(surviving.replicas) == {*first, 4, 5, 6, 7}


def test_the_error_says_that_a_replica_of_a_context_group_needs_all_its_slots():
    _, surviving = sharing(["r0.s0.t0", "r1.s0.t1"], dp=2, cp=2)
    with pytest.raises(BelowMinimum, match=r"has a stage with 1 of 2 TP slots, and with context parallelism a replica"):
        surviving.require_a_replica()


def test_a_replica_without_a_part_of_the_sequence_is_idle():
    _, surviving = sharing(["r1.s0.t0"])
    assert list(map(str, surviving.idle())) == ["r1.s0.t1", "r3.s0.t0", "r3.s0.t1"]


@given(st.integers(1, 8), st.integers(1, 3), st.data())
def test_a_context_group_uses_all_the_living_it_can(cp, contexts, data):
    lost = data.draw(st.sets(st.integers(0, cp * contexts - 1)))
    found, surviving = sharing([f"r{replica}" for replica in sorted(lost)], tp=1, dp=cp * contexts, cp=cp)
    for context, replicas in enumerate(found):
        living = [replica for replica in range(context * cp, (context + 1) * cp) if replica not in lost]
        assert set(replicas) <= set(living)
        more = range(len(replicas) + 1, len(living) + 1)
        assert not replicas or cp % len(replicas) == 0
        assert all(cp % degree for degree in more)
        assert bool(replicas) == bool(living)
    again = SurvivingReplicas(
        topology=surviving.topology, lost=surviving.lost | frozenset(surviving.idle()), min_tp_width=1
    )
    assert again.replicas == surviving.replicas, "who is idle is not used, also where it counts as lost"


# ---------------------------------------------------------------- names


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
    assert surviving.patterns_of_segment(0) == {(1,): (0,)}
    assert surviving.patterns_of_segment(1) == {}


def test_a_host_is_lost_when_all_its_slots_are():
    topology = layout()
    surviving = SurvivingReplicas(topology=topology, lost=parse_slots(["node2", "r0.s0.t0"], topology), min_tp_width=1)
    assert surviving.lost_nodes == (2,)
