"""Which slots hold other bits than the others."""

from ntp_plugin.copies.watch import Odd, odd_ones

RIGHT = {0: 10, 1: 20}


def replicas(count, tp=2):
    """Slot -> what it tells of one tensor that is cut over its replica, and of one that each slot has."""
    return {
        replica * tp + slot: {"cut": (f"r{replica}", f"part {slot}", RIGHT[slot]), "each": (f"{replica}.{slot}", "", 7)}
        for replica in range(count)
        for slot in range(tp)
    }


def changed(told, slot, values, number):
    whole, part, _ = told[slot][values]
    return told | {slot: told[slot] | {values: (whole, part, number)}}


def test_all_alike():
    assert not odd_ones(replicas(3))


def test_one_of_three_is_named_with_its_slot():
    (odd,) = odd_ones(changed(replicas(3), 3, "cut", 21))
    assert odd == Odd(values="cut", slots=(3,), certain=True, wholes=3)


def test_of_two_nobody_can_say():
    (odd,) = odd_ones(changed(replicas(2), 3, "cut", 21))
    assert odd == Odd(values="cut", slots=(0, 1, 2, 3), certain=False, wholes=2)


def test_what_each_slot_has_is_compared_among_all_slots():
    (odd,) = odd_ones(changed(replicas(2), 1, "each", 8))
    assert odd == Odd(values="each", slots=(1,), certain=True, wholes=4)


def test_a_replica_that_is_cut_otherwise_is_a_whole_as_well():
    told = replicas(2) | {4: {"cut": ("r2", "both parts", 30)}}
    assert not odd_ones(told)
    (odd,) = odd_ones(changed(told, 4, "cut", 31))
    assert odd.slots == (4,)


def test_two_that_are_wrong_in_different_ways_are_both_named():
    (odd,) = odd_ones(changed(changed(replicas(5), 3, "cut", 21), 6, "cut", 11))
    assert odd.slots == (3, 6)
