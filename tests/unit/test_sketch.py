"""The sketch: the same numbers for all cuts of a tensor, and as far from another run's as its values are."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ntp_plugin.copies.sketch import sketch
from ntp_plugin.copies.slices import TensorSlice
from tests.unit.test_copies_slices import cuts, places_of, shapes
from tests.unit.test_digest import seeds


def values_of(shape, seed, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def whole(values, name="t"):
    shape = tuple(values.shape)
    tensor_slice = TensorSlice(tensor=name, shape=shape, dim=0, ranges=((0, shape[0]),), start=0, stop=values.numel())
    return sketch([(tensor_slice, values)])


@settings(max_examples=100)
@given(shapes, seeds, st.data())
def test_a_sketch_is_the_same_for_all_cuts(shape, seed, data):
    values = values_of(shape, seed)
    parts = [(tensor_slice, values.reshape(-1)[places_of(tensor_slice)]) for tensor_slice in data.draw(cuts(shape))]
    each = [sketch([part]) for part in parts]
    added = [math.fsum(sums) for sums in zip(*each, strict=True)]
    assert added == pytest.approx(whole(values), rel=1e-13, abs=1e-13 * values.numel())
    assert sketch(parts) == pytest.approx(whole(values), rel=1e-13, abs=1e-13 * values.numel())


@settings(max_examples=100)
@given(st.integers(0, 99_999), st.floats(1e-6, 1e6), seeds)
def test_one_differing_value_is_reported_exactly(place, by, seed):
    values = values_of((100, 1000), seed)
    other = values.clone()
    other.view(-1)[place] += by
    exact = float(other.view(-1)[place] - values.view(-1)[place])
    assert math.dist(whole(values), whole(other)) == pytest.approx(exact, rel=1e-6, abs=1e-10)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("size", [1e-12, 1e-3])
def test_many_differing_values_are_reported_within_a_few_parts_in_ten(seed, size):
    """Four deviations of what the module says: 4 * sqrt(2 / 256) of the square, and so 0.35 / 2 of the distance."""
    values, change = values_of((200, 500), seed), size * values_of((200, 500), seed + 100)
    exact = float((values + change - values).norm())
    assert math.dist(whole(values), whole(values + change)) == pytest.approx(exact, rel=0.2)


def test_moved_values_have_another_sketch():
    values = values_of((64, 64), 1)
    apart = [
        math.dist(whole(values), whole(other)) / math.hypot(*whole(values)) for other in (values.T, values.flip(0))
    ]
    assert min(apart) > 1
    assert math.dist(whole(values), whole(values, "another tensor")) > math.hypot(*whole(values))


def test_lower_precision_is_reported_in_its_own_values():
    values = values_of((32, 32), 3, torch.bfloat16)
    assert whole(values) == whole(values.double())
