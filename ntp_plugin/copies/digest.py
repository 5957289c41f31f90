"""A number for a tensor that does not depend on how the tensor is cut.

Each place of the whole tensor has a key, an odd number of 64 bits, and the digest is the sum of the bits of all
elements, each with a seed added and multiplied by the key of its place, modulo 2^64. So the sum over any cut of the
tensor is the same number, whoever holds which part, and a part that is flipped, swapped with another, held twice or
missing changes it. The seed tells runs, tensors and their versions apart.

A single word that differs is always found, since a key is odd. Several cancel each other with a chance of about 2^-32
for one digest: words have 32 bits at most, so that a flip of the highest bits of two of them leaves 33 bits of the
difference of two keys to be zero. Elements of eight bytes are two words, of two places, for that reason.

Speed. The key of a place is that of its place in its page, which is the same for all pages and stays in a processor's
cache, times that of the page. So a long run costs a conversion and an inner product with the same keys for each page.
The sum is linear, so the part that the seed plays is counted by itself.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence

import torch

MODULUS = 1 << 64
_PAGE_BITS = 15
PAGE = 1 << _PAGE_BITS
"""Words."""
_LONG = PAGE // 32
"""Runs of so many words are taken one by one, shorter ones together."""
_TOGETHER = {"cpu": PAGE, "cuda": 1 << 22}
_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """Places in the whole tensor, told as runs of flat indices, in the order in which a part holds them."""

    starts: torch.Tensor
    lengths: torch.Tensor

    @property
    def size(self) -> int:
        return int(self.lengths.sum())

    @property
    def offsets(self) -> torch.Tensor:
        """Where in the part each run begins."""
        return self.lengths.cumsum(0) - self.lengths


def runs_of(shape: Sequence[int], dim: int, ranges: Sequence[tuple[int, int]]) -> Runs:
    """All of a tensor of this shape, but along `dim`, where it is these ranges."""
    inner, outer = _product(shape[dim + 1 :]), _product(shape[:dim])
    starts, lengths = (
        torch.tensor([(start, stop - start) for start, stop in ranges], dtype=torch.int64).view(-1, 2).T * inner
    )
    before = torch.arange(outer).unsqueeze(-1) * (shape[dim] * inner)
    return Runs(starts=(before + starts).reshape(-1), lengths=lengths.expand(outer, -1).reshape(-1))


def digest(tensor: torch.Tensor, runs: Runs, *, salt: str) -> int:
    """The sum for a part whose elements stand at these places of the whole tensor."""
    (total,) = digests([tensor], runs, salts=[salt])
    return total


def digests(tensors: Sequence[torch.Tensor], runs: Runs, *, salts: Sequence[str]) -> list[int]:
    """The sums for the same part of several tensors: the places are looked at once."""
    parts = [tensor.detach().reshape(-1) for tensor in tensors]
    found = [0] * len(parts)
    for words in {_words(part) for part in parts}:
        alike = [number for number, part in enumerate(parts) if _words(part) == words]
        bits = [parts[number].view(_WIDTHS[parts[number].element_size()]) for number in alike]
        keys, *sums = _sums(bits, Runs(starts=runs.starts * words, lengths=runs.lengths * words))
        for number, total in zip(alike, sums, strict=True):
            found[number] = (total + _seed(salts[number]) * keys) % MODULUS
    return found


def _words(part: torch.Tensor) -> int:
    """Of one element."""
    return max(1, part.element_size() // 4)


def _sums(parts: Sequence[torch.Tensor], runs: Runs) -> list[int]:
    """Of the keys of all places, and of each part's words times these."""
    if not parts[0].numel():
        return [0] * (1 + len(parts))
    on_cpu = parts[0].device.type == "cpu"
    if on_cpu and parts[0].numel() >= _LONG * len(runs.lengths):
        return _sums_of_long_runs(parts, runs)
    return _sums_of_short_runs(parts, runs)


def _sums_of_long_runs(parts: Sequence[torch.Tensor], runs: Runs) -> list[int]:
    in_page, ahead = _page_keys(torch.device("cpu"))
    totals, offset = [0] * (1 + len(parts)), 0
    for start, length in zip(runs.starts.tolist(), runs.lengths.tolist(), strict=True):
        place, end = start, start + length
        while place < end:
            page, at = place >> _PAGE_BITS, place & (PAGE - 1)
            stop = min(PAGE, at + end - place)
            key = _page_key(page)
            totals[0] += key * (ahead[stop] - ahead[at])
            for number, part in enumerate(parts, start=1):
                bits = part[offset : offset + stop - at].to(torch.int64)
                totals[number] += key * int(torch.dot(bits, in_page[at:stop]))
            place, offset = place + stop - at, offset + stop - at
    return totals


def _sums_of_short_runs(parts: Sequence[torch.Tensor], runs: Runs) -> list[int]:
    device = parts[0].device
    in_page, _ = _page_keys(device)
    totals = [0] * (1 + len(parts))
    for begin, places in blocks(runs, _TOGETHER[device.type], device):
        first, last = (int(end) >> _PAGE_BITS for end in places.aminmax())
        pages = odd_numbers(torch.arange(first, last + 1, device=device))
        keys = in_page.index_select(0, places & (PAGE - 1))
        keys.mul_(pages.index_select(0, (places >> _PAGE_BITS) - first) if last > first else pages)
        totals[0] += int(keys.sum())
        for number, part in enumerate(parts, start=1):
            bits = part[begin : begin + len(places)].to(torch.int64)
            totals[number] += int(torch.dot(bits, keys) if not keys.is_cuda else (bits * keys).sum())
    return totals


@functools.cache
def _page_keys(device: torch.device) -> tuple[torch.Tensor, list[int]]:
    """Of the places in a page, and the sums of those ahead of each."""
    keys = odd_numbers(torch.arange(-PAGE, 0, device=device))  # not those of any page
    return keys, [0, *keys.cumsum(0).tolist()]


@functools.lru_cache(maxsize=1 << 16)
def _page_key(page: int) -> int:
    """The same as `odd_numbers` of it: one by one that takes less time than torch takes to begin."""
    number = page * -0x61C8864680B583EB % MODULUS
    number = (number ^ number >> 30) * -0x40A7B892E31B1A47 % MODULUS
    number = (number ^ number >> 27) * -0x6B2FB644ECCEEE15 % MODULUS
    return (number ^ number >> 31) | 1


def odd_numbers(numbers: torch.Tensor) -> torch.Tensor:
    """Pseudo-random ones: the finalizer of splitmix64."""
    numbers = numbers * -0x61C8864680B583EB
    numbers = (numbers ^ _shifted(numbers, 30)) * -0x40A7B892E31B1A47
    numbers = (numbers ^ _shifted(numbers, 27)) * -0x6B2FB644ECCEEE15
    return (numbers ^ _shifted(numbers, 31)) | 1


def _shifted(numbers: torch.Tensor, by: int) -> torch.Tensor:
    """To the right, filled with zeros: torch fills with the sign."""
    return (numbers >> by) & ((1 << (64 - by)) - 1)


def blocks(runs: Runs, size: int, device: torch.device | None = None) -> Iterator[tuple[int, torch.Tensor]]:
    """So many elements of the part at a time: where the block begins, and the places of its elements."""
    ends, total = runs.lengths.cumsum(0), runs.size
    steps = torch.arange(min(size, total), device=device)
    ahead = runs.starts - (ends - runs.lengths)  # what is added to an index of the part, run by run
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


def _seed(salt: str) -> int:
    return int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest())


def _product(sizes: Sequence[int]) -> int:
    return int(torch.Size(sizes).numel())
