from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntp_plugin.config.sections import CopyPolicy
from ntp_plugin.errors import Refused
from ntp_plugin.planning.parity_groups import share_parities
from ntp_plugin.planning.topology import Topology
from tests.unit import properties


def cluster(nodes, *, per_node=4, per_rack=1, lacking=0):
    """The last host may have fewer slots than the others."""
    size = nodes * per_node - lacking
    return Topology(tp=1, pp=1, dp=size, gpus_per_node=per_node, nodes_per_rack=per_rack, racks_per_power_row=2)


@st.composite
def parity_clusters(draw):
    far, per_rack, sharers = (
        draw(st.sampled_from(["node", "rack", "power"])),
        draw(st.integers(1, 3)),
        draw(st.integers(2, 4)),
    )
    size = {"node": 1, "rack": per_rack, "power": 2 * per_rack}[far]
    nodes = size * draw(st.integers(sharers, 8)) + draw(st.integers(1, size))
    lost = draw(st.sets(st.integers(0, nodes - 1), max_size=nodes - 1))
    topology = cluster(nodes, per_node=3, per_rack=per_rack, lacking=draw(st.integers(0, 2)))
    return topology, CopyPolicy(mode=f"xor:{sharers}", far=far), tuple(sorted(lost))


@given(parity_clusters())
def test_every_slot_shares_with_other_domains_and_the_parity_host_is_in_none_of_them(case):
    properties.parities_protect(*case)


@given(st.integers(2, 5), st.integers(1, 4), st.data())
def test_every_host_holds_as_many_parities_in_the_gth_part_of_the_room(sharers, turns, data):
    """This holds if the domains divide into groups, or the places of a host cover all of them."""
    domains = sharers * data.draw(st.integers(2, 4))
    topology = cluster(domains, per_node=sharers * turns)
    parities = share_parities(topology, CopyPolicy(mode=f"xor:{sharers}"), ())
    groups = {parities.group_of(topology.slot_of(rank)) for rank in range(topology.size)}
    kept = Counter(group.parity_host for group in groups)
    assert set(kept.values()) == {turns}
    assert len(kept) == domains


def test_one_domain_more_than_members_is_enough_and_parity_hosts_rotate():
    topology = cluster(3, per_node=3)
    parities = share_parities(topology, CopyPolicy(mode="xor:2"), ())
    groups = {parities.group_of(topology.slot_of(rank)) for rank in range(9)}
    assert Counter(group.parity_host for group in groups) == {0: 2, 1: 2, 2: 2}
    assert sorted(len(group.members) for group in groups) == [1, 1, 1, 2, 2, 2]


def test_members_hold_each_others_parity_when_no_outside_host_is_left():
    topology = cluster(3, per_node=1)
    parities = share_parities(topology, CopyPolicy(mode="xor:2"), (2,))
    first, second = (parities.group_of(topology.slot_of(rank)) for rank in (0, 1))
    assert ([slot.replica for slot in first.members], first.parity_host) == ([0], 1)
    assert ([slot.replica for slot in second.members], second.parity_host) == ([1], 0)
    alone = share_parities(topology, CopyPolicy(mode="xor:2"), (1, 2))
    assert alone.group_of(topology.slot_of(0)) is None


def test_a_long_list_is_abbreviated():
    topology = cluster(16_384, per_node=8)
    parities = share_parities(topology, CopyPolicy(mode="xor:8"), (5, 77))
    assert len(parities.resettled) <= 4
    assert all(group.parity_host not in (5, 77) for groups in parities.resettled.values() for group in groups)


@pytest.mark.parametrize(
    ("mode", "nodes", "per_rack", "far", "message"),
    [
        (
            "xor:3",
            3,
            1,
            "node",
            "needs 3 node domains .* 3 hosts of 4 GPUs make 3.*at most xor:2 here, or copies.mode = copy.$",
        ),
        ("xor:2", 4, 2, "rack", r"needs 2 rack domains .* make 2\. Fix: copies.mode = copy, or copies.far"),
        ("xor:2", 1, 1, "node", "1 hosts of 4 GPUs make 1"),
    ],
)
def test_too_few_domains_are_refused_with_the_numbers_and_a_fix(mode, nodes, per_rack, far, message):
    with pytest.raises(Refused, match=message):
        share_parities(cluster(nodes, per_rack=per_rack), CopyPolicy(mode=mode, far=far), ())
