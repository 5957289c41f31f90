"""A number for a tensor that does not depend on how the tensor is cut.

Each place of the full tensor has a key, an odd number of 64 bits. The digest is the sum over all elements of their
bits, plus a seed, times the key of their place, modulo 2^64. So the sum over any cut of the tensor is the same number,
however the parts are distributed. A part that is flipped, swapped with another, held twice or missing changes it. The
seed tells runs, tensors and their versions apart.

A single word that differs is always found, since a key is odd. Several words cancel each other with a chance of about
2^-32 for one digest: words have 32 bits at most, so a flip of the highest bits of two of them leaves 33 bits of the
difference of two keys to be zero. Therefore an element of eight bytes is two words, at two places.

Speed: pages that a part holds alike are a matrix with one vector of keys (`runs.py`), so the rest is a product. The sum
is linear, so the share of the seed is counted separately. All of a state is one call of native code (`table.py`,
`machine.py`), which also sees whether all values are finite; otherwise NumPy does it, slice by slice.
"""

import dataclasses
import hashlib
import itertools
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ntp_plugin.copies.machine import NativeLibrary, machine
from ntp_plugin.copies.runs import MODULUS, Rectangle, Runs, Words, blocks, keys_in_page, odd_numbers
from ntp_plugin.copies.table import Numbers, Table

_AT_ONCE = 1 << 19
"""The words that NumPy converts at a time, unless a page has more: they stay in a processor's cache."""
_TOGETHER = 1 << 22
"""The words at a time on another device."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_thread = threading.local()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Values:
    """The same part of several tensors; a salt tells each from others, and from itself at another time."""

    tensors: Sequence[torch.Tensor]
    runs: Runs
    salts: Sequence[str]


def digest(tensor: torch.Tensor, runs: Runs, *, salt: str) -> int:
    """The digest of a part whose elements lie at these places of the full tensor."""
    (total,) = digests([tensor], runs, salts=[salt])
    return total


def digests(tensors: Sequence[torch.Tensor], runs: Runs, *, salts: Sequence[str]) -> list[int]:
    """The digests of the same part of several tensors."""
    (found,) = digests_of([Values(tensors=tensors, runs=runs, salts=salts)])
    return found


def digests_of(several: Sequence[Values]) -> list[list[int]]:
    """The digests of many parts, faster than one after the other."""
    return _numbers(several, _sums(several))


def digests_if_finite(several: Sequence[Values]) -> list[list[int]] | None:
    """The same, or None if a value is not finite."""
    sums = _sums(several)
    each = (tensor for values in several for tensor in values.tensors)
    undecided = [tensor for tensor, found in zip(each, sums, strict=True) if found.finite is None]
    if any(found.finite is False for found in sums) or not are_finite(undecided):
        return None
    return _numbers(several, sums)


def salted(sums: Numbers, keys: Numbers, salts: Iterable[str]) -> Numbers:
    """Make digests from sums of words times keys (`Table.sums`), and from the sums of these keys."""
    return sums + np.array([_seed(salt) for salt in salts], dtype=np.uint64) * keys


def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all values are finite.

    A NaN is both the least and the largest value, and to find these takes a tenth of the time of a sum. There is one
    answer for all tensors of a kind, because the call waits for a GPU.
    """
    ends = defaultdict[tuple[torch.dtype, torch.device], list[torch.Tensor]](list)
    for values in tensors:
        if values.is_floating_point() and values.numel():
            ends[values.dtype, values.device] += torch.aminmax(values)
    return all(bool(torch.stack(found).isfinite().all()) for found in ends.values())


# ---------------------------------------------------------------- sums


class _Part(NamedTuple):
    """One tensor, and the places of its elements."""

    flat: torch.Tensor
    runs: Runs

    @property
    def width(self) -> int:
        """Bytes of a word."""
        return min(self.flat.element_size(), 4)

    @property
    def words(self) -> torch.Tensor:
        """The bits of the tensor, as words."""
        return self.flat.view(_WORDS[self.width])

    @property
    def places(self) -> Runs:
        """The places of its words."""
        return self.runs.of_words(self.flat.element_size())


class _Sum(NamedTuple):
    """The sum of a part's words times the keys of their places, and the sum of these keys."""

    words: int
    keys: int
    finite: bool | None = None
    """Whether all values are finite, if that was seen."""


def _numbers(several: Sequence[Values], sums: Sequence[_Sum]) -> list[list[int]]:
    found = iter(sums)
    return [
        [(one.words + _seed(salt) * one.keys) % MODULUS for salt, one in zip(values.salts, found, strict=False)]
        for values in several
    ]


def _sums(several: Sequence[Values]) -> list[_Sum]:
    parts = [_part(tensor, values.runs) for values in several for tensor in values.tensors]
    found: list[_Sum] = []
    for on_cpu, those in itertools.groupby(parts, key=lambda part: part.flat.is_cpu):
        native = machine() if on_cpu else None
        if native is not None:
            found += _sums_by_native_code(native, list(those))
            continue
        for _, alike in itertools.groupby(those, key=lambda part: (id(part.runs), part.flat.element_size())):
            found += _sums_by_torch(list(alike))
    return found


def _part(tensor: torch.Tensor, runs: Runs) -> _Part:
    # Native code would read past the end of a tensor, and an element without a place would be in no digest.
    if tensor.numel() != runs.size:
        raise ValueError(f"a part of {tensor.numel()} elements has places for {runs.size}")
    whole = tensor.dim() == 1 and tensor.is_contiguous()  # usually so; the conversion takes long when done often
    return _Part(flat=tensor if whole else tensor.detach().reshape(-1).contiguous(), runs=runs)


def _sums_by_native_code(native: NativeLibrary, parts: Sequence[_Part]) -> list[_Sum]:
    table = Table([(part.runs, part.flat.dtype) for part in parts])
    found = table.nothing_found()
    table.sums(native, np.array([part.flat.data_ptr() for part in parts], dtype=np.uint64), found)
    finite: list[bool | None] = [*table.finite(found).tolist()]
    for number in table.undecided:
        finite[number] = None
    return [_Sum(*one) for one in zip(found[:, 0].tolist(), table.keys.tolist(), finite, strict=True)]


def _sums_by_torch(parts: Sequence[_Part]) -> list[_Sum]:
    """The sums of parts with the same places."""
    words, runs = [part.words for part in parts], parts[0].places
    keys, *sums = (_sums_by_numpy if words[0].is_cpu else _sums_by_blocks)(words, runs)
    return [_Sum(words=total, keys=keys) for total in sums]


def _sums_by_numpy(parts: Sequence[torch.Tensor], runs: Runs) -> list[int]:
    """The sum of the keys of all places, and the sums of each part's words times these."""
    found, words = [0] * len(parts), [part.numpy() for part in parts]
    for one in runs.rectangles:
        found = [total + more for total, more in zip(found, _sums_of_rectangle(one, words), strict=True)]
    return [runs.of_keys, *found]


def _sums_of_rectangle(one: Rectangle, parts: Sequence[Words]) -> list[int]:
    pages, at_once = len(one.pages), max(1, _AT_ONCE // (len(one.keys) * len(parts)))
    totals = _sums_of_pages(one, parts, 0, min(at_once, pages))
    for first in range(at_once, pages, at_once):
        totals += _sums_of_pages(one, parts, first, min(at_once, pages - first))
    found: list[int] = totals.tolist()
    return found


def _sums_of_pages(one: Rectangle, parts: Sequence[Words], first: int, pages: int) -> Words:
    """The sums of this number of pages from one on.

    For small parts the calls take longer than their work, so there are few, and they are NumPy's, which are faster than
    torch's.
    """
    size = len(one.keys)
    begin, words = one.offset + first * size, pages * size
    converted = _buffer(len(parts) * words).reshape(len(parts), words)
    for part, place in zip(parts, converted, strict=True):
        np.copyto(place, part[begin : begin + words])
    by_page = np.einsum("pi,i->p", converted.reshape(-1, size), one.keys).reshape(-1, pages)
    totals: Words = np.einsum("np,p->n", by_page, one.pages[first : first + pages])
    return totals


def _sums_by_blocks(parts: Sequence[torch.Tensor], runs: Runs) -> list[int]:
    """The same element by element, for devices where memory is fast and a matrix of integers is not multiplied."""
    device = parts[0].device
    in_page, found = keys_in_page(device), [0] * (1 + len(parts))
    for begin, places in blocks(runs, _TOGETHER, device):
        pages = places // runs.page
        keys = in_page.index_select(0, places - pages * runs.page) * odd_numbers(pages)
        found[0] += int(keys.sum())
        for number, part in enumerate(parts, start=1):
            found[number] += int((part[begin : begin + len(places)].to(torch.int64) * keys).sum())
    return found


def _buffer(size: int) -> Words:
    """Memory of this thread: to take it from the system each time would cost more than the work in it."""
    if getattr(_thread, "size", 0) < size:
        _thread.size, _thread.words = size, np.empty(size, dtype=np.int64)
    words: Words = _thread.words[:size]
    return words


def _seed(salt: str) -> int:
    return int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest())
