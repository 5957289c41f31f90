"""The elements of a slice, and the overlap of two, against lists of all their places."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ntp_plugin.copies.runs import Runs
from ntp_plugin.copies.slices import TensorSlice, common, indices


@st.composite
def parts_of_a_range(draw, size):
    """A range cut anywhere and dealt to a few owners, each with its ranges in any order."""
    cuts = draw(st.sets(st.integers(1, size - 1))) if size > 1 else set()
    ranges = draw(st.permutations(list(itertools.pairwise([0, *sorted(cuts), size]))))
    owners = [draw(st.integers(0, 2)) for _ in ranges]
    parts = [tuple(one for one, of in zip(ranges, owners, strict=True) if of == owner) for owner in range(3)]
    return [part for part in parts if part]


@st.composite
def cuts(draw, shape):
    """All of a tensor of this shape as pieces: parts along a dim, each cut flat, anywhere."""
    dim = draw(st.integers(0, len(shape) - 1))
    slices = []
    for ranges in draw(parts_of_a_range(shape[dim])):
        rows = sum(stop - start for start, stop in ranges)
        size = rows * torch.Size(shape).numel() // shape[dim]
        bounds = sorted(draw(st.lists(st.integers(0, size), max_size=3)))
        slices += [
            TensorSlice(tensor="t", shape=shape, dim=dim, ranges=ranges, start=start, stop=stop)
            for start, stop in itertools.pairwise([0, *bounds, size])
        ]
    return slices


shapes = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)


def places_of(tensor_slice):
    """Straight from the definition: ranges along the dim, one after the other, flat, and of that some."""
    whole = torch.arange(torch.Size(tensor_slice.shape).numel()).view(tensor_slice.shape)
    part = torch.cat(
        [whole.narrow(tensor_slice.dim, start, stop - start) for start, stop in tensor_slice.ranges], tensor_slice.dim
    )
    return part.reshape(-1)[tensor_slice.start : tensor_slice.stop].tolist()


def listed(runs):
    return [
        place
        for start, length in zip(runs.starts.tolist(), runs.lengths.tolist(), strict=True)
        for place in range(start, start + length)
    ]


@given(shapes.flatmap(cuts))
def test_the_runs_of_a_slice_are_the_places_of_its_elements_in_order(slices):
    for tensor_slice in slices:
        assert listed(tensor_slice.runs) == places_of(tensor_slice)
        assert tensor_slice.runs.size == tensor_slice.size == len(places_of(tensor_slice))
        begins = itertools.accumulate(tensor_slice.runs.lengths.tolist(), initial=0)
        assert [*tensor_slice.runs.offsets.tolist(), tensor_slice.size] == list(begins)
    assert sorted(itertools.chain(*map(places_of, slices))) == list(range(torch.Size(slices[0].shape).numel()))


@settings(max_examples=40)
@given(shapes.flatmap(lambda shape: st.tuples(cuts(shape), cuts(shape))))
def test_the_overlap_of_two_slices_is_found_in_both(case):
    for mine, theirs in itertools.product(*case):
        found = common(mine.runs, theirs.runs)
        my_places, their_places = places_of(mine), places_of(theirs)
        my_indices, their_indices = indices(found.mine, found.lengths), indices(found.theirs, found.lengths)
        shared = [my_places[index] for index in my_indices.tolist()]
        assert shared == [their_places[index] for index in their_indices.tolist()]
        assert shared == sorted(set(my_places) & set(their_places))
        assert found.size == len(shared)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), max_size=6))
def test_indices_are_all_of_all_runs(runs):
    starts, lengths = torch.tensor(runs, dtype=torch.int64).view(-1, 2).T
    assert indices(starts, lengths).tolist() == listed(Runs(starts=starts, lengths=lengths))
