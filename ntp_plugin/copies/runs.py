"""Where the elements of a part lie in the full tensor, and the keys of these places.

Each place has a key, an odd number of 64 bits. It is the key of the place in its page, which is the same for all pages
and stays in a processor's cache, times the key of the page. A page is some rows of the tensor. So a part has the same
places in one page as in the next, whether it is cut by rows or by columns, and its pages are a matrix with one vector
of keys (`Rectangle`).
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

MODULUS = 1 << 64
PAGE = 1 << 13
"""Elements of a page: as many rows as fit, or one if it is longer."""
_LONGEST = 8 * PAGE
"""Elements of a row."""
_REMEMBERED = 256
"""Cuts kept in memory: the layers of a model are alike, and copied step after step. To work out the places of a small
part costs more than the product."""

type Words = NDArray[np.int64]
"""Words of 64 bits, or of fewer before they are converted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rectangle:
    """Pages in which a part has the same places."""

    offset: int
    """Where they begin in the part."""
    pages: Words
    """The keys of the pages."""
    keys: Words
    """The keys of the places in one page."""

    def of_keys(self) -> int:
        """The sum of the keys of all places."""
        return int(self.pages.sum()) * int(self.keys.sum())

    @functools.cached_property
    def in_memory(self) -> tuple[int, int, int, int]:
        """The addresses of the keys of the places and of the pages, and their numbers."""
        return self.keys.ctypes.data, self.pages.ctypes.data, len(self.keys), len(self.pages)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runs:
    """Places in the full tensor as runs of flat indices, in the order in which a part holds them."""

    starts: torch.Tensor
    lengths: torch.Tensor
    page: int = PAGE
    """Elements of the tensor's pages."""

    @functools.cached_property
    def size(self) -> int:
        return int(self.lengths.sum())

    @property
    def offsets(self) -> torch.Tensor:
        """Where each run begins in the part."""
        return self.lengths.cumsum(0) - self.lengths

    def of_words(self, size: int) -> "Runs":
        """The places of words, if an element has this many bytes."""
        return self if size < 8 else self._of_two_words

    @functools.cached_property
    def _of_two_words(self) -> "Runs":
        """The places of words, if each element is two of them."""
        return Runs(starts=self.starts * 2, lengths=self.lengths * 2, page=self.page * 2)

    @functools.cached_property
    def of_keys(self) -> int:
        """The sum of the keys of all places."""
        return sum(one.of_keys() for one in self.rectangles) % MODULUS

    @functools.cached_property
    def rectangles(self) -> tuple[Rectangle, ...]:
        """All of these places, in the order of the part."""
        return tuple(self._rectangles())

    def _rectangles(self) -> Iterator[Rectangle]:
        runs = self._cut_at_pages()
        page, at, offsets = runs.starts // self.page, runs.starts % self.page, runs.offsets
        of_page, counts = page.unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]
        first = counts.cumsum(0) - counts
        page_keys = odd_numbers(of_page)
        begins = _unlike_the_one_before(counts, torch.stack((at, runs.lengths)))
        for number, until in itertools.pairwise([*begins, len(counts)]):
            begin, end = int(first[number]), int(first[number] + counts[number])
            keys = _keys_at(at[begin:end], runs.lengths[begin:end]).numpy()
            yield Rectangle(offset=int(offsets[begin]), pages=page_keys[number:until].numpy(), keys=keys)

    def _cut_at_pages(self) -> "Runs":
        """Cut the runs, so that each is within one page."""
        first = self.starts // self.page
        counts = (self.starts + self.lengths - 1) // self.page - first + 1
        run = torch.repeat_interleave(torch.arange(len(counts)), counts)
        begins = (torch.arange(len(run)) - (counts.cumsum(0) - counts)[run] + first[run]) * self.page
        starts = torch.maximum(self.starts[run], begins)
        ends = torch.minimum((self.starts + self.lengths)[run], begins + self.page)
        return Runs(starts=starts, lengths=ends - starts, page=self.page)


def runs_of(
    shape: Sequence[int], dim: int, ranges: Sequence[tuple[int, int]], start: int = 0, stop: int | None = None
) -> Runs:
    """The runs of a tensor of this shape whose `dim` is cut to these ranges; of that, the elements `start` to
    `stop`."""
    return _runs_of(tuple(shape), dim, tuple(ranges), start, stop)


@functools.lru_cache(_REMEMBERED)
def _runs_of(
    shape: tuple[int, ...], dim: int, ranges: tuple[tuple[int, int], ...], start: int, stop: int | None
) -> Runs:
    runs = _all_runs_of(shape, dim, ranges)
    return runs if start == 0 and stop in (None, runs.size) else _clipped(runs, start, stop)


def _all_runs_of(shape: tuple[int, ...], dim: int, ranges: tuple[tuple[int, int], ...]) -> Runs:
    inner, outer = _product(shape[dim + 1 :]), _product(shape[:dim])
    starts, lengths = (
        torch.tensor([(start, stop - start) for start, stop in ranges], dtype=torch.int64).view(-1, 2).T * inner
    )
    before = torch.arange(outer).unsqueeze(-1) * (shape[dim] * inner)
    filled = lengths > 0
    return Runs(
        starts=(before + starts[filled]).reshape(-1),
        lengths=lengths[filled].expand(outer, -1).reshape(-1),
        page=_page(shape),
    )


def _clipped(runs: Runs, start: int, stop: int | None) -> Runs:
    """The elements of a part from `start` to `stop`."""
    begins, ends = runs.offsets, runs.offsets + runs.lengths
    first, last = begins.clamp(min=start), ends.clamp(max=stop if stop is not None else runs.size)
    left = last > first
    return dataclasses.replace(runs, starts=(runs.starts + first - begins)[left], lengths=(last - first)[left])


def _page(shape: Sequence[int]) -> int:
    """The elements of a page. A row is all dims after the first; if that is too long, after the second, and so on."""
    rows = (_product(shape[dim:]) for dim in range(1, len(shape) + 1))
    row = next((row for row in rows if row <= _LONGEST), 1)
    return max(1, PAGE // row) * row if row else PAGE


def _unlike_the_one_before(counts: torch.Tensor, runs: torch.Tensor) -> list[int]:
    """The pages that have other runs than the page before them, given the number of runs in each."""
    before = torch.arange(runs.shape[1]) - torch.repeat_interleave(counts, counts)
    differing = (runs != runs[:, before.clamp(min=0)]).any(0).cumsum(0)[counts.cumsum(0) - 1]
    unlike = torch.ones(len(counts), dtype=torch.bool)
    unlike[1:] = (differing[1:] != differing[:-1]) | (counts[1:] != counts[:-1])
    found: list[int] = unlike.nonzero().view(-1).tolist()
    return found


def _keys_at(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The keys of places in a page."""
    keys = keys_in_page(torch.device("cpu"))
    if len(starts) == 1:
        return keys.narrow(0, int(starts), int(lengths))
    offsets = lengths.cumsum(0) - lengths
    ahead = torch.repeat_interleave(starts - offsets, lengths)
    return keys.index_select(0, torch.arange(len(ahead)) + ahead)


@functools.cache
def keys_in_page(device: torch.device) -> torch.Tensor:
    """The keys of the places in a page, which are the keys of no page."""
    return odd_numbers(-1 - torch.arange(2 * _LONGEST, device=device))


def odd_numbers(numbers: torch.Tensor) -> torch.Tensor:
    """Pseudo-random odd numbers: the finalizer of splitmix64."""
    numbers = numbers * -0x61C8864680B583EB
    numbers = (numbers ^ _shifted(numbers, 30)) * -0x40A7B892E31B1A47
    numbers = (numbers ^ _shifted(numbers, 27)) * -0x6B2FB644ECCEEE15
    return (numbers ^ _shifted(numbers, 31)) | 1


def _shifted(numbers: torch.Tensor, by: int) -> torch.Tensor:
    """Shift to the right, filled with zeros: torch fills with the sign."""
    return (numbers >> by) & ((1 << (64 - by)) - 1)


def blocks(runs: Runs, size: int, device: torch.device | None = None) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield blocks of `size` elements of the part: where each begins, and the places of its elements."""
    ends, total = runs.lengths.cumsum(0), runs.size
    steps = torch.arange(min(size, total), device=device)
    ahead = runs.starts - (ends - runs.lengths)  # added to an index of the part, run by run
    for begin in range(0, total, size):
        end = min(begin + size, total)
        first, last = torch.searchsorted(ends, torch.tensor([begin, end - 1]), right=True).tolist()
        inside = steps[: end - begin] + begin
        if first == last:
            yield begin, inside + int(ahead[first])
            continue
        lengths = runs.lengths[first : last + 1].clone()
        lengths[0] = ends[first] - begin
        lengths[-1] = end - (ends[last] - runs.lengths[last])
        yield begin, inside + torch.repeat_interleave(ahead[first : last + 1], lengths).to(inside.device)


def _product(sizes: Sequence[int]) -> int:
    return int(torch.Size(sizes).numel())
