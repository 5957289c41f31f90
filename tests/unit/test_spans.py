import itertools

from hypothesis import given
from hypothesis import strategies as st

from ntp_plugin.planning import spans as sp
from tests.unit.properties import each

numbers = st.sets(st.integers(0, 60))


def runs_of(some):
    return sp.union(*(((number, number + 1),) for number in some))


@given(numbers, numbers)
def test_set_operations_are_those_of_sets(left, right):
    assert set(each(sp.intersection(runs_of(left), runs_of(right)))) == left & right
    assert set(each(sp.difference(runs_of(left), runs_of(right)))) == left - right
    assert sp.size(runs_of(left)) == len(left)


@given(numbers)
def test_runs_ascend_and_do_not_touch(some):
    runs = runs_of(some)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(runs))


@given(numbers, st.integers(0, 70))
def test_a_split_keeps_order_and_loses_nothing(some, count):
    head, rest = sp.split_at(runs_of(some), count)
    assert each(head) + each(rest) == sorted(some)
    assert len(each(head)) == min(count, len(some))


@given(numbers, st.integers(1, 12))
def test_an_even_cut_is_even_with_the_larger_parts_first(some, parts):
    parts_found = sp.even_cut(runs_of(some), parts)
    sizes = [sp.size(part) for part in parts_found]
    assert [number for part in parts_found for number in each(part)] == sorted(some)
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
