"""Which stage gets which layers once a stage is lost."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntp_plugin.config.sections import Model
from ntp_plugin.planning.layer_cuts import Layers, choose_cut, place_layers
from ntp_plugin.planning.layer_placement import cut_of
from ntp_plugin.planning.topology import SurvivingReplicas, Topology, parse_slots
from ntp_plugin.planning.units import StageUnits, transformer_units

MODEL = Model(layers=8, hidden=64, heads=8, ffn=256, vocab=1000, seq=64)


def topology(tp=1, pp=4, dp=2):
    return Topology(tp=tp, pp=pp, dp=dp, gpus_per_node=4, nodes_per_rack=4, racks_per_power_row=8)


def layers(model=MODEL, tp=1, depths=(2, 2, 2, 2)):
    return Layers(units=transformer_units(model, tp=tp, pp=model.layers), depths=depths)


def placed(*lost, width=1, tp=1, dp=2, model=MODEL):
    where = topology(tp=tp, dp=dp)
    return place_layers(where, parse_slots(lost, where), width, layers(model, tp))


def all_cuts(stages, count, number):
    """Every cut of so many layers over these of `number` stages; some may have none."""
    for inner in itertools.combinations_with_replacement(range(count + 1), len(stages) - 1):
        ends = (*inner, count)
        depths = [0] * number
        for stage, (start, stop) in zip(stages, itertools.pairwise((0, *ends)), strict=True):
            depths[stage] = stop - start
        yield cut_of(tuple(depths))


def slowest(cut, costs):
    return max(sum(costs[stage][cut[stage] : cut[stage + 1]]) for stage in costs)


def moved(cut, nominal, sizes):
    def stage_of(layer, where):
        return next(stage for stage, (start, stop) in enumerate(itertools.pairwise(where)) if start <= layer < stop)

    return sum(size for layer, size in enumerate(sizes) if stage_of(layer, cut) != stage_of(layer, nominal))


@given(data=st.data())
def test_no_cut_is_faster_and_none_as_fast_moves_less(data):
    number, count = data.draw(st.integers(2, 4)), data.draw(st.integers(4, 9))
    inner = sorted(data.draw(st.sets(st.integers(1, count - 1), min_size=number - 1, max_size=number - 1)))
    nominal = (0, *inner, count)
    stages = sorted(data.draw(st.sets(st.integers(0, number - 1), min_size=1)))
    numbers = st.lists(st.integers(0, 9), min_size=count, max_size=count)
    costs = {stage: data.draw(numbers) for stage in stages}
    sizes = data.draw(numbers)
    found = choose_cut(nominal, costs, sizes)
    assert {stage for stage, (start, stop) in enumerate(itertools.pairwise(found)) if start < stop} <= {*stages}
    each = list(all_cuts(stages, count, number))
    least = min(slowest(cut, costs) for cut in each)
    assert slowest(found, costs) == least
    assert moved(found, nominal, sizes) == min(moved(c, nominal, sizes) for c in each if slowest(c, costs) == least)


def test_a_stage_that_would_slow_the_others_down_gets_no_layer():
    assert choose_cut((0, 1, 2, 3), {0: [4, 4, 4], 1: [9, 9, 9], 2: [4, 4, 4]}, [1, 1, 1]) == (0, 2, 2, 3)


def test_more_stages_than_layers_leave_stages_out():
    assert choose_cut((0, 1, 2, 2, 2), {1: [1, 1], 2: [1, 1], 3: [1, 1]}, [1, 1]) == (0, 0, 1, 2, 2)


def test_the_layers_of_a_lost_stage_go_to_the_others():
    placement = placed("r1.s1")
    assert placement.moved == {1: (0, 3, 3, 6, 8)}
    assert placement.cut(0) == (0, 2, 4, 6, 8)


def test_the_output_layer_counts():
    """With a vocabulary as costly as four layers the last stage keeps one layer."""
    model = Model(layers=8, hidden=64, heads=8, ffn=256, vocab=4000, seq=64)
    assert placed("r1.s1", model=model).moved == {1: (0, 4, 4, 7, 8)}


def test_a_narrow_stage_gets_fewer_layers():
    assert placed("r1.s1", tp=4).moved == {1: (0, 3, 3, 6, 8)}
    assert placed("r1.s1,r1.s0.t0,r1.s0.t1", tp=4).moved == {1: (0, 2, 2, 6, 8)}


def test_a_stage_that_is_narrower_than_the_minimum_is_out():
    where, lost = topology(tp=4), parse_slots(["r1.s1.t0", "r1.s1.t1"], topology(tp=4))
    assert place_layers(where, lost, 2, layers(tp=4)).moved == {}
    placement = place_layers(where, lost, 3, layers(tp=4))
    assert placement.stages(1) == (0, 2, 3)
    surviving = SurvivingReplicas(topology=where, lost=lost, min_tp_width=3, placement=placement)
    assert surviving.replicas == (0, 1)
    assert not surviving.dropped
    assert [str(slot) for slot in surviving.idle()] == ["r1.s1.t2", "r1.s1.t3"]
    assert surviving.degraded == {}
    assert surviving.degraded_replicas == {1}


def test_a_replica_without_a_stage_is_dropped():
    placement = placed("r1")
    assert placement.moved == {}
    surviving = SurvivingReplicas(
        topology=topology(), lost=parse_slots(["r1"], topology()), min_tp_width=1, placement=placement
    )
    assert surviving.dropped == {1}


def test_replicas_that_have_lost_the_same_are_cut_alike():
    placement = placed("r0.s2", "r2.s2", "r3.s0", dp=4)
    assert placement.moved[0] == placement.moved[2] != placement.moved[3]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp", [1, 4])
def test_layers_joined_are_the_stages(tp, tied):
    model = Model(layers=8, hidden=64, heads=8, ffn=256, vocab=1000, tied=tied, bias=True)
    nominal = transformer_units(model, tp=tp, pp=4)
    joined = transformer_units(model, tp=tp, pp=8).cut(itertools.pairwise(cut_of((2, 2, 2, 2))))
    for stage, other in zip(nominal.stages, joined.stages, strict=True):
        assert dict(stage.tensors) == dict(other.tensors)
        assert dict(zip(stage.families, stage.flops, strict=True)) == dict(
            zip(other.families, other.flops, strict=True)
        )


def test_the_units_of_a_family_are_the_same_in_all_layers():
    one, other = (
        transformer_units(Model(layers=1, hidden=64, heads=8, ffn=ffn, vocab=9), tp=1, pp=1) for ffn in (8, 16)
    )
    with pytest.raises(AssertionError, match="same units everywhere"):
        StageUnits.joined([one.stages[0], other.stages[0]])
