"""Values of all members are combined on the way to all, in any order of arrival, with few reads."""

import itertools
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntp_plugin.membership.gathering import FAN, Gathering

SLOTS = st.sets(st.integers(0, 300), min_size=1, max_size=70).map(sorted)


class Reader:
    """A member's eyes: what it has read it does not read again."""

    def __init__(self, store):
        self.store, self.known, self.asked = store, {}, 0

    def __call__(self, key):
        if key not in self.known:
            self.asked += 1
            if key not in self.store:
                return None
            self.known[key] = self.store[key]
        return self.known[key]


def put(store, key, value):
    assert key not in store, f"{key} is written twice"
    store[key] = value


def gather(gathering, order):
    """All write their value, and poll in turn until each has all; returns the values that each knows, and their
    readers."""
    store, waiting = {}, list(order)
    readers = {slot: Reader(store) for slot in gathering.slots}
    for slot in waiting:
        put(store, gathering.own_key(slot), f'it is "{slot}"')
    while waiting:
        before = len(waiting), len(store)
        for slot in list(waiting):
            due = gathering.due(slot, readers[slot])
            if due is not None:
                put(store, due.key, due.value)
            elif gathering.complete(readers[slot]):
                waiting.remove(slot)
        assert before != (len(waiting), len(store)), "a member waits for ever"
    return {slot: gathering.values(reader) for slot, reader in readers.items()}, readers


@given(SLOTS, st.integers(2, 9), st.integers())
def test_each_member_gathers_the_values_of_all(slots, fan, seed):
    gathering = Gathering(kind="report", epoch=3, slots=tuple(slots), fan=fan)
    known, _ = gather(gathering, Random(seed).sample(slots, len(slots)))
    assert all(values == {slot: f'it is "{slot}"' for slot in slots} for values in known.values())
    assert all(list(values) == slots for values in known.values())


@given(SLOTS, st.integers(2, 9), st.data())
def test_gathering_waits_for_a_missing_member_and_names_it(slots, fan, data):
    gathering = Gathering(kind="report", epoch=3, slots=tuple(slots), fan=fan)
    late = data.draw(st.sets(st.sampled_from(slots), min_size=1))
    store = {gathering.own_key(slot): "here" for slot in slots if slot not in late}
    for slot in itertools.chain.from_iterable([slots] * 7):
        due = gathering.due(slot, store.get)
        if due is not None and slot not in late:
            put(store, due.key, due.value)
    assert not gathering.complete(store.get)
    assert late <= set(gathering.late(store.get))


def test_a_member_that_does_not_combine_its_share_is_named():
    gathering = Gathering(kind="report", epoch=3, slots=tuple(range(10, 19)), fan=3)
    store = {gathering.own_key(slot): "here" for slot in gathering.slots}
    assert gathering.late(store.get) == (10, 13, 16)
    store["report/3/1.1"] = gathering.due(13, store.get).value
    assert gathering.late(store.get) == (10, 16)


@pytest.mark.parametrize("members", [1, 2, FAN])
def test_few_members_read_the_values_of_each(members):
    gathering = Gathering(kind="report", epoch=3, slots=tuple(range(members)))
    store = {gathering.own_key(slot): "here" for slot in gathering.slots}
    assert gathering.complete(store.get)
    assert not any(gathering.gathers(slot) or gathering.due(slot, store.get) for slot in gathering.slots)


def test_reads_grow_linearly_with_the_members():
    def reads_of_a_member(members, fan):
        slots = tuple(range(members))
        _, readers = gather(Gathering(kind="report", epoch=1, slots=slots, fan=fan), slots)
        return sum(reader.asked for reader in readers.values()) / members

    assert reads_of_a_member(FAN, FAN) == FAN
    assert reads_of_a_member(FAN**3, FAN) < 2 * FAN
    assert reads_of_a_member(FAN**3, FAN**3) == FAN**3, "this counts"


def test_putting_together_must_leave_fewer():
    with pytest.raises(AssertionError):
        Gathering(kind="report", epoch=1, slots=(0, 1), fan=1)
