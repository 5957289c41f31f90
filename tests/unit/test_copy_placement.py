from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntp_plugin.config.sections import CopyPolicy
from ntp_plugin.errors import Refused
from ntp_plugin.planning.copy_placement import place_copies
from ntp_plugin.planning.topology import Topology
from tests.unit import properties


def cluster(nodes, nodes_per_rack=1):
    return Topology(tp=8, pp=1, dp=nodes, gpus_per_node=8, nodes_per_rack=nodes_per_rack, racks_per_power_row=2)


@st.composite
def clusters(draw):
    per_rack, far, count = (
        draw(st.integers(1, 3)),
        draw(st.sampled_from(["node", "rack", "power"])),
        draw(st.integers(0, 2)),
    )
    size = {"node": 1, "rack": per_rack, "power": 2 * per_rack}[far]
    nodes = size * draw(st.integers(count + 1, 5)) + draw(st.integers(0, size - 1))
    lost = draw(st.sets(st.integers(0, nodes - 1), max_size=nodes - 1))
    return cluster(nodes, per_rack), CopyPolicy(count=count, far=far), tuple(sorted(lost))


@given(clusters())
def test_every_living_host_has_its_copies_on_living_hosts_of_other_domains(case):
    properties.far_copies_are_far(*case)


@given(st.integers(2, 12), st.integers(1, 3))
def test_copies_are_spread_evenly_before_a_loss(domains, per_rack):
    nodes = domains * per_rack
    placement = place_copies(cluster(nodes, per_rack), CopyPolicy(far="rack"), ())
    held = Counter(holder for node in range(nodes) for holder in placement.holders(node))
    assert set(held.values()) == {1}


@given(st.integers(6, 20), st.data())
def test_after_a_loss_hosts_differ_by_one_copy_at_most(nodes, data):
    lost = tuple(sorted(data.draw(st.sets(st.integers(0, nodes - 1), max_size=2))))
    placement = place_copies(cluster(nodes), CopyPolicy(), lost)
    held = Counter(holder for node in range(nodes) if node not in lost for holder in placement.holders(node))
    assert max(held.values()) <= 2
    assert placement.resettled.keys() == {((node - 1) % nodes, 1) for node in lost if (node - 1) % nodes not in lost}


def test_too_few_domains_are_refused_with_the_numbers():
    with pytest.raises(Refused, match="1 far copies need 2 whole rack domains, and 3 hosts of 8 GPUs make 1"):
        place_copies(cluster(3, nodes_per_rack=2), CopyPolicy(far="rack"), ())
