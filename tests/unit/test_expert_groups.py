"""Which slot holds which experts after a loss, and which slots sum their gradients."""

import dataclasses
import itertools

import pytest
from hypothesis import given

from ntp_plugin.errors import Refused
from ntp_plugin.planning import expert_groups
from ntp_plugin.planning.shard_layout import lay_out
from ntp_plugin.planning.topology import Slot, SurvivingReplicas
from tests.unit import properties
from tests.unit.strategies import expert_families, job_with_experts, jobs_with_experts


def surviving(topology, *lost):
    return SurvivingReplicas(topology=topology, lost=frozenset(lost), min_tp_width=1)


def test_a_replica_with_a_lost_slot_is_dropped_and_its_group_goes_on():
    topology = job_with_experts(tp=2, dp=4, of_group=4)
    after = surviving(topology, Slot(replica=1, stage=0, tp=1))
    assert after.replicas == (0, 2, 3)
    assert expert_groups.groups_of(after).patterns == {(0, 0): (2, 3)}
    assert expert_groups.members(after, 0, 0) == tuple(topology.group(0, 0))


@given(jobs_with_experts())
def test_every_expert_is_once_in_each_group_that_is_left(found):
    properties.experts_are_once_in_each_group(*found)


@given(jobs_with_experts())
def test_each_group_that_is_left_has_one_slot_in_every_lane(found):
    topology, lost, each = found
    after = surviving(topology, *lost)
    groups = expert_groups.groups_of(after)
    idle = {*after.lost, *after.idle()}
    for stage in range(topology.pp):
        lanes = expert_groups.plan_expert_lanes(after, expert_families(topology.expert_slots, each), stage)
        found_units = [
            (name, unit) for lane in lanes for name, spans in lane.units for a, b in spans for unit in range(a, b)
        ]
        assert len(found_units) == len(set(found_units)) == topology.expert_slots * each
        for lane in lanes:
            assert idle.isdisjoint(lane.members)
            at = [expert_groups.in_group(topology, slot) for slot in lane.members]
            assert [place.replica for place in at] == list(groups.replicas)
            for place, (name, spans) in itertools.product(at, lane.units):
                family = next(one for one in expert_families(topology.expert_slots, each) if one.name == name)
                layout = lay_out(family, topology.expert_slots, groups.pattern(place.replica, stage))
                held = {unit for a, b in layout.holdings[place.tp] for unit in range(a, b)}
                assert {unit for a, b in spans for unit in range(a, b)} <= held


@given(jobs_with_experts())
def test_places_and_slots_belong_to_each_other(found):
    topology, *_ = found
    for replica, stage in itertools.product(range(topology.dp), range(topology.pp)):
        for slot in topology.group(replica, stage):
            assert expert_groups.in_job(topology, expert_groups.in_group(topology, slot)) == slot
            assert slot in expert_groups.alike_in_experts(topology, slot)


def test_replicas_of_a_group_compute_together():
    assert list(expert_groups.replicas_beside(job_with_experts(tp=2, dp=4, of_group=4), 3)) == [2, 3]
    assert list(expert_groups.replicas_beside(job_with_experts(tp=4, dp=2, of_group=2), 1)) == [1]


@pytest.mark.parametrize(
    ("topology", "what"),
    [
        (job_with_experts(tp=2, dp=3, of_group=3), "neither a part of a replica's 2 TP slots"),
        (job_with_experts(tp=1, dp=3, of_group=2), "the 3 ranks of a stage do not make expert groups of 2"),
        (
            dataclasses.replace(job_with_experts(tp=1, dp=6, of_group=2), cp=3),
            "expert groups of 2 replicas and context groups of 3 overlap in part",
        ),
    ],
)
def test_groups_that_do_not_fit_are_refused(topology, what):
    with pytest.raises(Refused, match=what):
        expert_groups.require_whole_groups(topology)
