"""A number for a tensor that does not depend on how the tensor is cut.

Each place of the whole tensor has a key, an odd number of 64 bits, and the digest is the sum of the bits of all
elements, each with a seed added and multiplied by the key of its place, modulo 2^64. So the sum over any cut of the
tensor is the same number, whoever holds which part, and a part that is flipped, swapped with another, held twice or
missing changes it. The seed tells runs, tensors and their versions apart.

A single word that differs is always found, since a key is odd. Several cancel each other with a chance of about 2^-32
for one digest: words have 32 bits at most, so that a flip of the highest bits of two of them leaves 33 bits of the
difference of two keys to be zero. Elements of eight bytes are two words, of two places, for that reason.

Speed. Pages that a part holds alike are a matrix with one vector of keys (`runs.py`): what is left to do is a product.
The sum is linear, so the part that the seed plays is counted by itself. All of a state is one call of machine code
(`table.py`, `machine.py`), which sees on its way whether all is finite; or it is made by NumPy, piece by piece.
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
"""Words that NumPy converts, unless a page has more: they stay in a processor's cache."""
_TOGETHER = 1 << 22
"""Words, where the device is another one."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_thread = threading.local()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Values:
    """The same part of several tensors; a salt tells each from others, and from itself at another time."""

    tensors: Sequence[torch.Tensor]
    runs: Runs
    salts: Sequence[str]


def digest(tensor: torch.Tensor, runs: Runs, *, salt: str) -> int:
    """The sum for a part whose elements stand at these places of the whole tensor."""
    (total,) = digests([tensor], runs, salts=[salt])
    return total


def digests(tensors: Sequence[torch.Tensor], runs: Runs, *, salts: Sequence[str]) -> list[int]:
    """The sums for the same part of several tensors."""
    (found,) = digests_of([Values(tensors=tensors, runs=runs, salts=salts)])
    return found


def digests_of(several: Sequence[Values]) -> list[list[int]]:
    """The sums for many parts: it takes less than one after the other."""
    return _numbers(several, _sums(several))


def digests_if_finite(several: Sequence[Values]) -> list[list[int]] | None:
    """The same, or none of them where a value is not finite."""
    sums = _sums(several)
    each = (tensor for values in several for tensor in values.tensors)
    untold = [tensor for tensor, found in zip(each, sums, strict=True) if found.finite is None]
    if any(found.finite is False for found in sums) or not are_finite(untold):
        return None
    return _numbers(several, sums)


def salted(sums: Numbers, keys: Numbers, salts: Iterable[str]) -> Numbers:
    """The numbers that come of sums of words times keys (`Table.sums`), and of the sums of these keys."""
    return sums + np.array([_seed(salt) for salt in salts], dtype=np.uint64) * keys


def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """A NaN is both the least and the largest, and to look for these takes a tenth of the time that a sum takes. There
    is one answer for all of a kind, because a GPU is waited for."""
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
        """Its bits."""
        return self.flat.view(_WORDS[self.width])

    @property
    def places(self) -> Runs:
        """Of its words."""
        return self.runs.of_words(self.flat.element_size())


class _Sum(NamedTuple):
    """Of a part's words times the keys of their places, and of these keys."""

    words: int
    keys: int
    finite: bool | None = None
    """Whether all values are, where that was seen."""


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
        by_machine = machine() if on_cpu else None
        if by_machine is not None:
            found += _sums_by_machine(by_machine, list(those))
            continue
        for _, alike in itertools.groupby(those, key=lambda part: (id(part.runs), part.flat.element_size())):
            found += _sums_by_torch(list(alike))
    return found


def _part(tensor: torch.Tensor, runs: Runs) -> _Part:
    if tensor.numel() != runs.size:  # machine code would read what is behind it, and what has no place is in no digest
        raise ValueError(f"a part of {tensor.numel()} elements has places for {runs.size}")
    whole = tensor.dim() == 1 and tensor.is_contiguous()  # as a rule, and what is many times done takes long
    return _Part(flat=tensor if whole else tensor.detach().reshape(-1).contiguous(), runs=runs)


def _sums_by_machine(by: NativeLibrary, parts: Sequence[_Part]) -> list[_Sum]:
    table = Table([(part.runs, part.flat.dtype) for part in parts])
    found = table.nothing_found()
    table.sums(by, np.array([part.flat.data_ptr() for part in parts], dtype=np.uint64), found)
    finite: list[bool | None] = [*table.finite(found).tolist()]
    for number in table.untold:
        finite[number] = None
    return [_Sum(*one) for one in zip(found[:, 0].tolist(), table.keys.tolist(), finite, strict=True)]


def _sums_by_torch(parts: Sequence[_Part]) -> list[_Sum]:
    """Of the same places."""
    words, runs = [part.words for part in parts], parts[0].places
    keys, *sums = (_sums_by_numpy if words[0].is_cpu else _sums_by_blocks)(words, runs)
    return [_Sum(words=total, keys=keys) for total in sums]


def _sums_by_numpy(parts: Sequence[torch.Tensor], runs: Runs) -> list[int]:
    """Of the keys of all places, and of each part's words times these."""
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
    """So many from one on. For small parts the calls take longer than what they do: there are few, and they are
    NumPy's, which take less than torch's."""
    size = len(one.keys)
    begin, words = one.offset + first * size, pages * size
    converted = _buffer(len(parts) * words).reshape(len(parts), words)
    for part, place in zip(parts, converted, strict=True):
        np.copyto(place, part[begin : begin + words])
    by_page = np.einsum("pi,i->p", converted.reshape(-1, size), one.keys).reshape(-1, pages)
    totals: Words = np.einsum("np,p->n", by_page, one.pages[first : first + pages])
    return totals


def _sums_by_blocks(parts: Sequence[torch.Tensor], runs: Runs) -> list[int]:
    """The same element by element, where memory is fast and a matrix of integers is not multiplied."""
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
    """Memory of this thread's own: to take it from the system each time would cost more than what is done in it."""
    if getattr(_thread, "size", 0) < size:
        _thread.size, _thread.words = size, np.empty(size, dtype=np.int64)
    words: Words = _thread.words[:size]
    return words


def _seed(salt: str) -> int:
    return int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest())
