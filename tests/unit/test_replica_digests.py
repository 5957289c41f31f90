"""Which slots have other bits than the others."""

from hypothesis import given
from hypothesis import strategies as st

from ntp_plugin.copies.replica_digests import Odd, are_alike, odd_ones, sums_of
from ntp_plugin.copies.runs import MODULUS

RIGHT = {0: 10, 1: 20}


def replicas(count, tp=2):
    """Slot -> its digests of one tensor that is cut over its replica, and of one that each slot has."""
    return {
        replica * tp + slot: {
            "cut": ("", f"r{replica}", f"part {slot}", RIGHT[slot]),
            "each": ("each", f"{replica}.{slot}", "", 7),
        }
        for replica in range(count)
        for slot in range(tp)
    }


def changed(digests, slot, values, number):
    *where, _ = digests[slot][values]
    return digests | {slot: digests[slot] | {values: (*where, number)}}


def test_equal_replicas_have_no_odd_ones():
    assert not odd_ones(replicas(3))


def test_one_of_three_is_named_with_its_slot():
    (odd,) = odd_ones(changed(replicas(3), 3, "cut", 21))
    assert odd == Odd(values="cut", slots=(3,), certain=True, instances=3)


def test_two_differing_replicas_are_both_suspects():
    (odd,) = odd_ones(changed(replicas(2), 3, "cut", 21))
    assert odd == Odd(values="cut", slots=(0, 1, 2, 3), certain=False, instances=2)


def test_replicated_state_is_compared_among_all_slots():
    (odd,) = odd_ones(changed(replicas(2), 1, "each", 8))
    assert odd == Odd(values="each", slots=(1,), certain=True, instances=4)


def test_a_replica_with_another_cut_has_the_same_digest():
    digests = replicas(2) | {4: {"cut": ("", "r2", "both parts", 30)}}
    assert not odd_ones(digests)
    (odd,) = odd_ones(changed(digests, 4, "cut", 31))
    assert odd.slots == (4,)


def test_two_that_are_wrong_in_different_ways_are_both_named():
    (odd,) = odd_ones(changed(changed(replicas(5), 3, "cut", 21), 6, "cut", 11))
    assert odd.slots == (3, 6)


# ---------------------------------------------------------------- what is not finite


def test_the_replica_that_is_not_finite_is_wrong():
    (odd,) = odd_ones(changed(replicas(2), 3, "cut", 21), {3: ["cut"]})
    assert odd == Odd(values="cut", slots=(3,), certain=True, instances=2, finite=False)


def test_the_finite_replica_is_right_even_against_a_majority():
    digests = changed(changed(replicas(3), 3, "cut", 21), 5, "cut", 21)
    (odd,) = odd_ones(digests, {3: ["cut"], 5: ["cut"]})
    assert odd == Odd(values="cut", slots=(3, 5), certain=True, instances=3, finite=False)


def test_without_a_finite_replica_all_are_suspects():
    (odd,) = odd_ones(changed(replicas(2), 3, "cut", 21), {1: ["cut"], 3: ["cut"]})
    assert not odd.certain and odd.finite


def test_values_that_are_not_finite_are_reported_first():
    digests = changed(changed(replicas(2), 3, "cut", 21), 1, "each", 8)
    first, second = odd_ones(digests, {3: ["cut"]})
    assert not first.finite and (first.values, second.values) == ("cut", "each")


# ---------------------------------------------------------------- by sums alone

CUT, EACH = ["cut 0", "cut 1", "cut 2"], ["each 0", "each 1"]


@st.composite
def jobs(draw):
    """Replicas of any width: some tensors are cut over the slots of a replica, others are replicated."""
    numbers = st.integers(0, MODULUS - 1)
    right, digests = draw(st.fixed_dictionaries(dict.fromkeys(CUT + EACH, numbers))), {}
    for replica in range(draw(st.integers(1, 4))):
        width = draw(st.integers(1, 3))
        parts = {values: draw(st.lists(numbers, min_size=width - 1, max_size=width - 1)) for values in CUT}
        for slot in range(width):
            of_all = {values: [*own, (right[values] - sum(own)) % MODULUS] for values, own in parts.items()}
            cut = {values: ("", f"r{replica}", f"{slot} of {width}", own[slot]) for values, own in of_all.items()}
            own = {f"{values} of slot {slot}": (f"{slot}", f"r{replica}", "", right[values] + slot) for values in EACH}
            digests[len(digests)] = cut | own
    return digests


@given(jobs(), st.data())
def test_sums_detect_as_much_as_all_digests(digests, data):
    assert are_alike(map(sums_of, digests.values())) and not odd_ones(digests)
    slot = data.draw(st.sampled_from(sorted(digests)))
    values, other = data.draw(st.sampled_from(sorted(digests[slot]))), data.draw(st.integers(1, MODULUS - 1))
    digests = changed(digests, slot, values, (digests[slot][values][-1] + other) % MODULUS)
    assert are_alike(map(sums_of, digests.values())) == (not odd_ones(digests))


def test_a_slot_reports_as_many_sums_for_a_model_with_more_tensors():
    few, many = ({f"t{n}": ("", "r0", "", n) for n in range(count)} for count in (3, 300))
    assert len(sums_of(few)) == len(sums_of(many)) == 1


def test_replicas_that_lack_a_tensor_are_not_reported_equal():
    """Then all digests are reported, and only shared tensors are compared."""
    digests = replicas(2)
    digests[3] = {values: digest for values, digest in digests[3].items() if values != "each"}
    digests[3]["of its own"] = "each", "1.1", "", 9
    assert not are_alike(map(sums_of, digests.values())) and not odd_ones(digests)
