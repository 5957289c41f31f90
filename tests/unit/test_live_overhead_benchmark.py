"""What `make show-live-overhead` makes of the times of steps."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import live_overhead
from benchmarks.live_overhead import WARM_UP, apart_from_computing, is_first, pairs_of

PAIRS = 8
STEPS = WARM_UP + 2 * PAIRS
LEFT, ADDED = 0.1, 0.01
"""Of a step without computing; what the plugin adds."""


def test_a_pair_is_two_steps_in_a_row_and_either_begins():
    with_plugin, without = pairs_of(range(STEPS))
    assert all(abs(mine - other) == 1 for mine, other in zip(with_plugin, without, strict=True))
    first = [mine < other for mine, other in zip(with_plugin, without, strict=True)]
    assert first == [not before for before in [not first[0], *first[:-1]]]


@given(st.lists(st.floats(0.5, 2.0), min_size=STEPS, max_size=STEPS))
def test_what_the_machine_does_to_the_computing_is_not_in_what_is_told_apart(computing):
    steps = [own + LEFT + ADDED * is_first(number) for number, own in enumerate(computing)]
    whole = statistics.median(pairs_of(steps)[1])
    assert apart_from_computing(steps, computing) == pytest.approx([1 + ADDED / whole] * PAIRS)


def test_what_is_added_to_the_computing_is_seen_of_whole_steps_alone():
    computing = [1.0 + ADDED * is_first(number) for number in range(STEPS)]
    steps = [own + LEFT for own in computing]
    assert apart_from_computing(steps, computing) == pytest.approx([1.0] * PAIRS)
    assert all(mine > other for mine, other in zip(*pairs_of(steps), strict=True))


def test_every_framework_has_both_kinds_of_controls():
    for framework in live_overhead.FRAMEWORKS:
        cases = [case for case in live_overhead.CASES if case.framework == framework]
        assert any(not case.live for case in cases)
        assert any(case.planted for case in cases)
