"""The digest: one number for all cuts of a tensor, and another one for every change of it."""

import gc
import hashlib
import os
import shutil
import subprocess
import sys
import weakref

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ntp_plugin.copies import digest as module
from ntp_plugin.copies import machine as machine_code
from ntp_plugin.copies.digest import Values, are_finite, digest, digests, digests_if_finite, digests_of
from ntp_plugin.copies.machine import NativeLibrary
from ntp_plugin.copies.runs import MODULUS, PAGE, Runs, runs_of
from ntp_plugin.copies.slices import TensorSlice, indices
from tests.unit.test_copies_slices import cuts, places_of, shapes

BY = {"machine": machine_code.machine, "numpy": lambda: None}


@pytest.fixture(params=BY, autouse=True, scope="module")
def by(request):
    """All of it holds of both ways to come to a sum."""
    if request.param == "machine" and machine_code.machine() is None:
        assert not shutil.which(os.environ.get("CC", "cc")), (
            f"there is a C compiler, and no {machine_code.LIBRARY} that is right: install again"
        )
        pytest.skip("there is no C compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "machine", BY[request.param])
        yield request.param


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64]
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 1 << 32)


def bits(shape, dtype, seed):
    """Every pattern of bits is a value: NaNs of all sorts, too."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def of_whole(values, salt="salt"):
    return digest(values, runs_of(values.shape, 0, ((0, values.shape[0]),)), salt=salt)


def digest_of(values, slices):
    flat = values.reshape(-1)
    return (
        sum(digest(flat[indices_of(tensor_slice)], tensor_slice.runs, salt="salt") for tensor_slice in slices) % MODULUS
    )


def indices_of(tensor_slice):
    return indices(tensor_slice.runs.starts, tensor_slice.runs.lengths)


def odd_number(number):
    number = number * 0x9E3779B97F4A7C15 % MODULUS
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % MODULUS
    number = (number ^ number >> 27) * 0x94D049BB133111EB % MODULUS
    return (number ^ number >> 31) | 1


def by_hand(values, places, row, salt="salt"):
    """Word by word, with Python's integers; `row` elements of the tensor belong together."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}[values.element_size()]
    each = max(1, values.element_size() // 4)
    page = each * max(1, PAGE // row) * row
    seed = int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest())
    words = values.reshape(-1).view(width).tolist()
    found = 0
    for index, word in enumerate(words):
        place = places[index // each] * each + index % each
        found += (word + seed) * odd_number(MODULUS - 1 - place % page) * odd_number(place // page)
    return found % MODULUS


@settings(max_examples=50)
@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), cuts(shape))), dtypes, seeds)
def test_the_sum_over_every_cut_is_one_number(case, dtype, seed):
    shape, slices = case
    values = bits(shape, dtype, seed)
    assert digest_of(values, slices) == of_whole(values)


@settings(max_examples=40)
@given(shapes.flatmap(cuts), dtypes, seeds, st.text(max_size=4))
def test_the_digest_equals_its_definition(slices, dtype, seed, salt):
    values = bits(slices[0].shape, dtype, seed).reshape(-1)
    for tensor_slice in slices:
        part = values[places_of(tensor_slice)]
        row = torch.Size(tensor_slice.shape[1:]).numel()
        assert digest(part, tensor_slice.runs, salt=salt) == by_hand(part, places_of(tensor_slice), row, salt)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(3 * PAGE,), (60, 700), (3, 3 * PAGE), (2, 9 * PAGE), (3, 20, 4000)], ids=str)
def test_the_digest_equals_its_definition_on_later_pages(dtype, shape):
    size, start = torch.Size(shape).numel(), PAGE - 700
    stop = min(size, start + 4 * PAGE)
    tensor_slice = TensorSlice(tensor="t", shape=shape, dim=0, ranges=((0, shape[0]),), start=start, stop=stop)
    row = {(60, 700): 700, (3, 3 * PAGE): 3 * PAGE, (3, 20, 4000): 4000}.get(shape, 1)
    values = bits((tensor_slice.size,), dtype, 3)
    assert digest(values, tensor_slice.runs, salt="salt") == by_hand(values, range(start, stop), row)


LARGE = (150, 600)
"""Some pages, and part of one."""


@settings(max_examples=8)
@given(cuts(LARGE), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), seeds)
def test_long_and_short_runs_across_pages_add_up_to_one_number(slices, dtype, seed):
    values = bits(LARGE, dtype, seed)
    assert values.numel() > 2 * PAGE
    assert digest_of(values, slices) == of_whole(values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [LARGE, (4 * PAGE,), (3, 50, 150), (2, 9 * PAGE)], ids=str)
def test_a_device_without_products_of_matrices_of_integers_comes_to_the_same_number(dtype, shape, monkeypatch):
    monkeypatch.setattr(module, "_TOGETHER", 5000)
    values, last = bits(shape, dtype, 1), len(shape) - 1
    for dim, ranges in ((0, ((0, shape[0]),)), (last, ((2, shape[-1]), (0, 2))), (last, ((1, 2), (5, 40)))):
        runs = runs_of(shape, dim, ranges)
        part = torch.cat([values.narrow(dim, start, stop - start) for start, stop in ranges], dim).reshape(-1)
        values_of = module._part(part, runs)
        found = module._sums_by_blocks([values_of.words], values_of.places)
        expected = module._sums_by_numpy([values_of.words], values_of.places)
        assert [one % MODULUS for one in found] == [one % MODULUS for one in expected]


in_pages = st.lists(st.sampled_from([(0, 10), (20, 10), (20, 9), (PAGE - 10, 10), (PAGE - 5, 10)]), unique=True)


@settings(max_examples=50)
@given(st.lists(in_pages, min_size=1, max_size=6), st.booleans(), seeds)
def test_almost_equal_pages_have_different_digests(pages, turned, seed):
    runs = [(number * PAGE + start, length) for number, those in enumerate(pages) for start, length in those]
    runs = runs[::-1] if turned else runs
    places = [place for start, length in runs for place in range(start, start + length)]
    values = bits((len(places),), torch.float32, seed)
    starts, lengths = torch.tensor(runs, dtype=torch.int64).view(-1, 2).T
    assert digest(values, Runs(starts=starts, lengths=lengths), salt="salt") == by_hand(values, places, 1)


@pytest.mark.parametrize("shape", [(64, 1000), (10, 64, 100)], ids=str)
def test_pages_in_which_a_part_has_the_same_places_are_one_rectangle(shape):
    """Be it cut by rows or by columns: what is done for each rectangle takes longer than the words of a small one."""
    rows, by_columns = runs_of(shape, 0, ((0, shape[0]),)), runs_of(shape, 1, ((10, 20), (40, 60)))
    assert rows.page % torch.Size(shape[1:]).numel() == 0
    for runs in (rows, by_columns):
        assert len(runs.rectangles) <= 2, "the last page may be partial"
        assert sum(len(one.pages) * len(one.keys) for one in runs.rectangles) == runs.size


@settings(max_examples=30)
@given(shapes, seeds)
def test_several_tensors_at_once_have_the_numbers_of_each(shape, seed):
    several = [bits(shape, dtype, seed) for dtype in DTYPES]
    runs = runs_of(shape, 0, ((0, shape[0]),))
    salts = [f"salt {number}" for number in range(len(several))]
    each = [digest(values, runs, salt=salt) for values, salt in zip(several, salts, strict=True)]
    assert digests(several, runs, salts=salts) == each


@settings(max_examples=50)
@given(shapes, dtypes, seeds, st.data())
def test_every_flip_of_one_bit_is_found(shape, dtype, seed, data):
    values = bits(shape, dtype, seed)
    flipped = values.clone()
    memory = flipped.view(-1).view(torch.uint8)
    bit = data.draw(st.integers(0, 8 * len(memory) - 1))
    memory[bit // 8] ^= 1 << bit % 8
    assert of_whole(flipped) != of_whole(values)


@settings(max_examples=50)
@given(dtypes, seeds, st.data())
def test_a_swap_of_two_elements_or_rows_is_found(dtype, seed, data):
    values = bits((5, 4), dtype, seed)
    dim = data.draw(st.integers(0, 1))
    one, other = data.draw(st.lists(st.integers(0, 3), min_size=2, max_size=2, unique=True))
    order = torch.arange(values.shape[dim])
    order[[one, other]] = order[[other, one]]
    at, beside = data.draw(st.lists(st.integers(0, 19), min_size=2, max_size=2, unique=True))
    elements = values.clone().view(-1)
    elements[[at, beside]] = elements[[beside, at]]
    raw = values.view(torch.uint8)
    for swapped in (values.index_select(dim, order), elements.view(5, 4)):
        assume(not torch.equal(swapped.view(torch.uint8), raw))
        assert of_whole(swapped) != of_whole(values)


@given(seeds, st.lists(st.integers(0, 4999), min_size=2, max_size=2, unique=True))
def test_two_signs_that_flip_are_found(seed, at):
    values = torch.randn(5000, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    flipped = values.clone()
    flipped[at] *= -1
    assert of_whole(flipped) != of_whole(values)


@given(shapes, dtypes, seeds)
def test_another_salt_is_another_number(shape, dtype, seed):
    values = bits(shape, dtype, seed)
    assert of_whole(values, "run 3 t weight") != of_whole(values, "run 4 t weight")


def test_an_element_that_is_missing_or_held_twice_is_found():
    values = torch.zeros(100)
    half = {"tensor": "t", "shape": (100,), "dim": 0, "ranges": ((0, 100),)}
    cut = [(0, 50), (50, 100)], [(0, 50), (51, 100)], [(0, 51), (50, 100)]
    whole, missing, twice = (
        digest_of(values, [TensorSlice(**half, start=start, stop=stop) for start, stop in each]) for each in cut
    )
    assert whole == of_whole(values)
    assert len({whole, missing, twice}) == 3


def test_the_bits_of_nans_and_zeros_count():
    nans = [torch.tensor([0x7FC00000 | payload, 0], dtype=torch.int32).view(torch.float32) for payload in (0, 1, 341)]
    assert all(values[0].isnan() for values in nans)
    zeros = [torch.tensor([zero, 1.0]) for zero in (0.0, -0.0)]
    assert len({of_whole(values) for values in nans + zeros}) == 5


def test_the_places_of_a_cut_are_looked_at_once():
    cut = [6, 4], 0, ((0, 2), (3, 5))
    assert runs_of(*cut).rectangles is runs_of(torch.Size((6, 4)), 0, [(0, 2), (3, 5)]).rectangles
    assert runs_of(*cut, 1).rectangles is not runs_of(*cut).rectangles


def test_nothing_has_the_digest_zero():
    nothing = TensorSlice(tensor="t", shape=(4, 3), dim=1, ranges=((0, 2),), start=5, stop=5)
    assert digest(torch.empty(0), nothing.runs, salt="salt") == 0
    assert digest(torch.empty(4, 0), runs_of((4, 3), 1, ()), salt="salt") == 0


NUMBERS = st.floats(width=16) | st.sampled_from([float("nan"), float("inf"), -float("inf"), 6e4])


@settings(max_examples=50)
@given(st.lists(st.lists(NUMBERS, max_size=9), max_size=4), st.sampled_from(DTYPES))
def test_there_are_numbers_where_all_values_are_finite_and_none_elsewhere(several, dtype):
    tensors = [torch.tensor(numbers, dtype=torch.float64) for numbers in several]
    tensors = [one.to(dtype) if dtype.is_floating_point else one.nan_to_num(0, 0, 0).to(dtype) for one in tensors]
    asked = [
        Values(tensors=[one, one], runs=runs_of((len(one),), 0, ((0, len(one)),)), salts=["a", "b"]) for one in tensors
    ]
    found = digests_if_finite(asked)
    finite = all(bool(one.isfinite().all()) for one in tensors)
    assert found == (digests_of(asked) if finite else None)
    assert are_finite(tensors) == finite


@settings(max_examples=30)
@given(shapes, seeds)
def test_many_parts_at_once_have_the_numbers_of_each(shape, seed):
    parts = [bits(shape, dtype, seed) for dtype in DTYPES]
    runs = runs_of(shape, 0, ((0, shape[0]),))
    asked = [Values(tensors=parts[:number], runs=runs, salts=["a"] * number) for number in range(len(parts) + 1)]
    assert digests_of(asked) == [[digest(part, runs, salt="a") for part in parts[:number]] for number in range(7)]


def test_keys_stay_while_they_are_read(monkeypatch, by):
    """Two threads may come to the same places at once, and only what one of them came to is remembered."""
    if by == "numpy":
        pytest.skip("it has the keys themselves, and not where they are")
    values, runs, call = (
        torch.randn(3000),
        Runs(starts=torch.tensor([5]), lengths=torch.tensor([3000])),
        NativeLibrary.sums,
    )
    alive = []

    def sums(found_by, *asked, **more):
        alive.extend(map(weakref.ref, runs.__dict__.pop("rectangles")))
        gc.collect()
        assert alive
        assert all(one() is not None for one in alive)
        return call(found_by, *asked, **more)

    monkeypatch.setattr(NativeLibrary, "sums", sums)
    digest(values, runs, salt="s")
    assert alive


@pytest.mark.parametrize("size", [0, 9, 11])
def test_a_part_that_has_not_as_many_elements_as_places_is_refused(size):
    """Bytes behind the buffer may not be read, and elements without a place would be in no digest."""
    with pytest.raises(ValueError, match=f"a part of {size} elements has places for 10"):
        digest(torch.zeros(size), runs_of((10,), 0, ((0, 10),)), salt="s")


def test_a_part_with_gaps_in_memory_is_read_without_them():
    whole = torch.arange(40, dtype=torch.float32).view(10, 4)
    runs = runs_of((10, 4), 1, ((0, 2),))
    assert digest(whole[:, :2], runs, salt="s") == digest(whole[:, :2].clone(), runs, salt="s")
    assert digest(whole.view(-1)[::2], runs, salt="s") == digest(whole.view(-1)[::2].clone(), runs, salt="s")


WHERE_FLOAT32_IS_A_DOUBLE = """
import torch
torch.float32 = torch.float64
from ntp_plugin.copies.digest import Values, digests_if_finite
from ntp_plugin.copies.runs import runs_of

def look(values):
    whole = runs_of((len(values),), 0, ((0, len(values)),))
    return digests_if_finite([Values(tensors=[values], runs=whole, salts=["t"])])

values = torch.linspace(-3.0, 3.0, 1000, dtype=torch.float64)
print(look(values) is not None, look(values / 0.0) is None)
"""


def test_finite_values_are_copied_although_float32_is_a_double():
    """As in CPU emulation (`NTP_CPU=float64`), where that is so before any of this is imported."""
    done = subprocess.run([sys.executable, "-c", WHERE_FLOAT32_IS_A_DOUBLE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]
