from hypothesis import given
from hypothesis import strategies as st

from ntp_plugin.planning import spans as sp
from ntp_plugin.planning.dealing import deal
from tests.unit.properties import each


@st.composite
def tables(draw):
    """(held, room, extra): holders with runs of numbers, some lost, the others with any room."""
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    held = [sp.joined([(start, start + size)]) for start, size in zip(starts, sizes, strict=True)]
    survivors = draw(st.sets(st.integers(0, len(sizes) - 1)))
    room = {holder: draw(st.integers(0, 14)) for holder in sorted(survivors)}
    return held, room, draw(st.integers(0, len(room)))


@given(tables())
def test_each_micro_batch_is_kept_dealt_or_left_exactly_once(table):
    held, room, extra = table
    result = deal(held, room=room, extra=extra)
    everything = [*result.kept.values(), *result.dealt.values(), result.left]
    assert sorted(number for spans in everything for number in each(spans)) == [
        n for spans in held for n in each(spans)
    ]


@given(tables())
def test_survivors_keep_a_prefix_as_long_as_their_room_goes(table):
    held, room, extra = table
    result = deal(held, room=room, extra=extra)
    assert result.kept.keys() == room.keys()
    for holder, kept in result.kept.items():
        assert each(kept) == each(held[holder])[: len(each(kept))]
        assert len(each(kept)) >= min(room[holder], sp.size(held[holder]))


@given(tables())
def test_no_slot_exceeds_its_room_except_by_the_extras(table):
    held, room, extra = table
    result = deal(held, room=room, extra=extra)
    over = [sp.size(result.kept[h]) + sp.size(result.dealt[h]) - room[h] for h in room]
    assert all(surplus <= 1 for surplus in over)
    assert sum(surplus == 1 for surplus in over) <= extra


@given(tables())
def test_something_is_left_only_when_all_room_is_taken(table):
    held, room, extra = table
    result = deal(held, room=room, extra=extra)
    taken = sum(sp.size(spans) for part in (result.kept, result.dealt) for spans in part.values())
    assert not result.left or taken == sum(room.values()) + extra


def test_a_single_loss_spreads_in_long_runs_from_the_next_place_on():
    held = [((0, 6),), ((6, 12),), ((12, 18),), ((18, 24),)]
    result = deal(held, room={0: 8, 2: 8, 3: 8})
    assert result.dealt == {2: ((6, 8),), 3: ((8, 10),), 0: ((10, 12),)}
