"""Each row of a sequence is in one slot, at any length and width."""

from hypothesis import example, given
from hypothesis import strategies as st

from ntp_plugin.planning.sequence_rows import SequenceRows
from tests.unit import properties

cuts = st.builds(SequenceRows, length=st.integers(1, 200), width=st.integers(1, 40), granule=st.integers(1, 16))


@given(cuts)
@example(SequenceRows(length=3, width=40))
def test_every_row_is_held_once_in_order_and_pads_come_last(rows):
    properties.rows_are_held_once_in_order(rows)


@given(cuts)
def test_an_even_cut_has_no_pads(rows):
    assert (rows.pads == 0) == (rows.length % (rows.width * rows.granule) == 0)
    assert rows.stored % rows.granule == 0


def test_sixteen_rows_over_three_slots():
    rows = SequenceRows(length=16, width=3)
    assert (rows.stored, rows.padded, rows.pads) == (6, 18, 2)
    assert [rows.held(place) for place in range(3)] == [(0, 6), (6, 12), (12, 16)]


def test_a_short_sequence_leaves_slots_with_nothing_but_pads():
    rows = SequenceRows(length=4, width=7)
    assert [stop - start for start, stop in map(rows.held, range(7))] == [1, 1, 1, 1, 0, 0, 0]


def test_slots_store_whole_granules():
    rows = SequenceRows(length=32, width=3, granule=16)
    assert (rows.stored, rows.pads) == (16, 16)
    assert [rows.held(place) for place in range(3)] == [(0, 16), (16, 32), (32, 32)]
