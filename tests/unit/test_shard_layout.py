import itertools

import pytest
from hypothesis import given

from ntp_plugin.planning.shard_layout import lay_out, overlay
from ntp_plugin.planning.units import Family
from tests.unit import properties
from tests.unit.properties import each
from tests.unit.strategies import families_with_patterns


@given(families_with_patterns())
def test_every_unit_is_owned_exactly_once(case):
    properties.layout_owns_every_unit_once(*case)


@given(families_with_patterns())
def test_balance_is_the_best_possible(case):
    properties.layout_is_as_even_as_can_be(*case)


@given(families_with_patterns())
def test_kept_units_stay_a_prefix(case):
    properties.survivors_keep_a_prefix(*case)


@given(families_with_patterns(), families_with_patterns())
def test_an_overlay_names_the_holder_of_every_unit_in_each_layout(one, other):
    (family, tp, pattern), (_, _, second) = one, other
    second = tuple(slot for slot in second if slot < tp - 1)
    layouts = [lay_out(family, tp, pattern), lay_out(family, tp, second)]
    seen = []
    for span, owners in overlay(layouts):
        for unit in each((span,)):
            seen.append(unit)
            for layout, owner in zip(layouts, owners, strict=True):
                assert unit in each(layout.holdings[owner])
    assert seen == list(range(family.units))


@pytest.mark.parametrize(("tp", "above_least"), [(4, 0), (8, 0), (32, 2)])
def test_a_second_loss_moves_little_more_than_the_state_of_its_slot(tp, above_least):
    family = Family(name="mlp", units=56 * tp)
    above = second_loss_moves_above_least(tp, lambda lost: [set(each(h)) for h in lay_out(family, tp, lost).holdings])
    assert min(above) == 0
    assert max(above) == above_least


@pytest.mark.parametrize(("tp", "above_least"), [(4, 19), (8, 42), (32, 55)])
def test_dealing_to_the_lightest_slot_first_would_move_far_more(tp, above_least):
    """The reason for the ring: the obvious rule, as even and as history-free, reshuffles the first deal."""

    def lightest_first(lost):
        held = [set() if slot in lost else set(range(56 * slot, 56 * (slot + 1))) for slot in range(tp)]
        survivors = [slot for slot in range(tp) if slot not in lost]
        for slot in lost:
            for unit in range(56 * slot, 56 * (slot + 1)):
                held[min(survivors, key=lambda taker: len(held[taker]))].add(unit)
        return held

    assert max(second_loss_moves_above_least(tp, lightest_first)) == above_least


def second_loss_moves_above_least(tp, holdings):
    """For every pair of losses, one after the other: units that move beyond those that the second slot held."""
    above = []
    for first, second in itertools.permutations(range(tp), 2):
        once, twice = holdings((first,)), holdings(tuple(sorted((first, second))))
        moved = sum(len(after - before) for before, after in zip(once, twice, strict=True))
        above.append(moved - len(once[second]))
    return above


def test_a_gap_in_the_middle_is_dealt_to_all_and_vocabulary_is_cut_again():
    mlp = lay_out(Family(name="mlp", units=12), 4, (1,))
    assert mlp.holdings == (((0, 3), (5, 6)), (), ((6, 9), (3, 4)), ((9, 12), (4, 5)))
    vocabulary = lay_out(Family(name="vocabulary", units=12, contiguous=True), 4, (1,))
    assert vocabulary.holdings == (((0, 4),), (), ((4, 8),), ((8, 12),))
