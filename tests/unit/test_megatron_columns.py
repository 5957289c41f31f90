"""Between which slots activations are sent, and which rows are in two stages."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ntp_plugin.config.sections import Parallel
from ntp_plugin.megatron.layout import Layout
from ntp_plugin.planning import spans as sp
from ntp_plugin.planning.lanes import plan_shared_lanes
from ntp_plugin.planning.shard_layout import lay_out
from ntp_plugin.planning.topology import Slot, Topology
from ntp_plugin.planning.units import Family, ModelUnits, StageUnits
from tests.unit.strategies import patterns

ROWS = Family(name="rows", units=24, contiguous=True)


@st.composite
def pipelines(draw):
    """Every rank's view of one replica or two, with slots lost in any stage."""
    tp, pp, dp = draw(st.integers(1, 6)), draw(st.integers(2, 4)), draw(st.integers(1, 2))
    topology = Topology.of(Parallel(tp=tp, pp=pp, dp=dp))
    lost = frozenset(
        Slot(replica=replica, stage=stage, tp=slot)
        for replica in range(dp)
        for stage in range(pp)
        for slot in draw(patterns(tp))
    )
    ranks = topology.size - len(lost)
    return [Layout(topology=topology, lost=lost, rank=rank) for rank in range(ranks)]


@given(pipelines())
def test_every_receiver_has_one_sender_in_its_own_replica_and_both_know(views):
    pp = views[0].topology.pp
    for step in (1, -1):
        pairs = [(view.slot, to) for view in views for to in view.receivers((view.slot.stage + step) % pp)]
        assert Counter(to for _, to in pairs) == Counter(view.slot for view in views)
        column = {view.slot: view.column(view.slot.replica, view.slot.tp) for view in views}
        assert all(column[to][sender.stage] == sender and sender.replica == to.replica for sender, to in pairs)
        assert all(sender.tp == to.tp for sender, to in pairs if Slot(**_where(to, sender.stage)) in column)


@given(pipelines())
def test_substitutes_take_turns(views):
    for view in views:
        most = -(-len(view.pattern) // view.width)
        columns = [view.column(view.slot.replica, tp)[view.slot.stage] for tp in range(view.topology.tp)]
        assert columns.count(view.slot) <= 1 + most


@given(pipelines())
def test_a_pipeline_group_has_one_rank_of_each_stage_and_everybody_has_one(views):
    topology = views[0].topology
    nominal = [
        [topology.rank_of(Slot(replica=replica, stage=stage, tp=tp)) for stage in range(topology.pp)]
        for replica in range(topology.dp)
        for tp in range(topology.tp)
    ]
    groups = views[0].columns(nominal)
    assert all([views[rank].slot.stage for rank in group] == list(range(topology.pp)) for group in groups)
    for view in views:
        assert [view.ranks[slot] for slot in view.column(view.slot.replica, view.slot.tp)] in groups


@given(pipelines())
def test_rows_of_two_stages_are_in_one_lane_each_with_their_owners(views):
    surviving, topology = views[0].surviving, views[0].topology
    with_rows, without = _stage(ROWS), _stage()
    stages = (with_rows, *[without] * (topology.pp - 2), with_rows)
    lanes = plan_shared_lanes(surviving, ModelUnits(stages=stages), ROWS.name)
    assert sp.union(*(units for _, units in lanes)) == ((0, ROWS.units),)
    assert sum(sp.size(units) for _, units in lanes) == ROWS.units
    groups = [(replica, stage) for stage in (0, topology.pp - 1) for replica in range(topology.dp)]
    for members, units in lanes:
        assert [(slot.replica, slot.stage) for slot in members] == groups
        for slot in members:
            held = lay_out(ROWS, topology.tp, surviving.pattern(slot.replica, slot.stage)).holdings[slot.tp]
            assert sp.intersection(units, held) == units
    assert plan_shared_lanes(surviving, ModelUnits(stages=(with_rows, without)), ROWS.name) == []


def _where(slot, stage):
    return {"replica": slot.replica, "stage": stage, "tp": slot.tp}


def _stage(*families):
    return StageUnits(families=families, tensors=(), flops=(0,) * len(families))
