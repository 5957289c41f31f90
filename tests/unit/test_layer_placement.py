"""Cuts of a model's layers over stages, and the segments that no replica cuts."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ntp_plugin.planning.layer_placement import LayerPlacement, cut_of

NOMINAL = cut_of((2, 2, 2, 2))


def test_segments_are_the_stages_where_no_layer_has_moved():
    placement = LayerPlacement(nominal=NOMINAL, moved={})
    assert placement.segments == ((0, 2), (2, 4), (4, 6), (6, 8))
    assert [placement.stage_of(5, segment) for segment in range(4)] == [0, 1, 2, 3]
    assert placement.stages(5) == (0, 1, 2, 3)


def test_a_replica_that_has_moved_layers_cuts_segments():
    placement = LayerPlacement(nominal=NOMINAL, moved={1: (0, 3, 3, 6, 8)})
    assert placement.stages(1) == (0, 2, 3)
    assert placement.segments == ((0, 2), (2, 3), (3, 4), (4, 6), (6, 8))
    assert [placement.stage_of(1, segment) for segment in range(5)] == [0, 0, 2, 2, 3]
    assert [placement.stage_of(0, segment) for segment in range(5)] == [0, 1, 1, 2, 3]
    assert placement.segments_of(1, 2) == (2, 3)
    assert placement.segments_of(1, 1) == ()


@st.composite
def cuts(draw, layers=9, stages=4):
    inner = sorted(draw(st.lists(st.integers(0, layers), min_size=stages - 1, max_size=stages - 1)))
    return (0, *inner, layers)


@given(nominal=cuts(), moved=st.dictionaries(st.integers(0, 3), cuts(), max_size=3))
def test_each_segment_is_on_one_stage_of_each_replica(nominal, moved):
    placement = LayerPlacement(nominal=nominal, moved=moved)
    for replica in range(4):
        cut = placement.cut(replica)
        held = [placement.segments_of(replica, stage) for stage in range(4)]
        assert list(itertools.chain(*held)) == list(range(len(placement.segments)))
        for stage, segments in enumerate(held):
            assert [placement.stage_of(replica, segment) for segment in segments] == [stage] * len(segments)
            layers = [layer for segment in segments for layer in range(*placement.segments[segment])]
            assert layers == list(range(cut[stage], cut[stage + 1]))
