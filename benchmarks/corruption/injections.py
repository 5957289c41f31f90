"""Change copies in shared memory, and record what is wrong in them."""

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from benchmarks.corruption.state import (
    HOSTS,
    OLDER,
    Copy,
    Job,
    copies_of,
    elements,
)
from ntp_plugin.copies.manifest import CopiedSlice, Entry, view


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One injection; `seen` says what was seen where that is not what should be."""

    found: bool
    right_source: bool
    refused: bool = False
    """Found by the final comparison of the replica digests."""
    seen: str = ""
    tensor: str = ""
    """Copies that a member would have read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hit:
    """The place of an injection: the part of a tensor in a copy that it makes wrong."""

    job: Job
    copy: Copy
    tensor: str
    chance: random.Random

    def edited(self, change: Callable[[torch.Tensor, random.Random], None]) -> dict[Copy, bytes]:
        """The bytes with the values of one entry changed."""
        content, held = self.content(), self.held()
        change(self.values(content, held, self.chance.choice(held.entries)), self.chance)
        return {self.copy: bytes(content)}

    def content(self) -> bytearray:
        return bytearray(self.job.path(self.copy).read_bytes())

    def held(self) -> CopiedSlice:
        (held,) = (held for held in self.job.manifest(self.copy).held if held.tensor_slice.tensor == self.tensor)
        return held

    def values(self, content: bytearray, held: CopiedSlice, entry: Entry) -> torch.Tensor:
        """Which show those bytes."""
        return view(torch.frombuffer(content, dtype=torch.uint8), held, entry)


def flip(hit: Hit) -> dict[Copy, bytes]:
    """One bit."""

    def change(values: torch.Tensor, chance: random.Random) -> None:
        values.view(torch.uint8)[chance.randrange(values.nbytes)] ^= 1 << chance.randrange(8)

    return hit.edited(change)


def swap(hit: Hit) -> dict[Copy, bytes]:
    """All of it with another slot's copy of that size, or two entries of a tensor."""
    content, (one, two) = hit.content(), hit.held().entries
    if one.dtype == two.dtype and hit.chance.random() < 0.5:
        first, second = (hit.values(content, hit.held(), entry) for entry in (one, two))
        mine = first.clone()
        first.copy_(second)
        second.copy_(mine)
        return {hit.copy: bytes(content)}
    place = hit.copy.place
    slot = hit.chance.choice([slot for slot in range(len(HOSTS)) if slot != place.slot])
    (other,) = (copy for copy in copies_of(slot, place.number + 1) if copy.place.kind == place.kind)
    theirs = hit.job.path(other).read_bytes()
    assert len(theirs) == len(content), "slots have equally much"
    return {hit.copy: theirs, other: bytes(content)}


def stale(hit: Hit) -> dict[Copy, bytes]:
    """The version before."""
    before = dataclasses.replace(hit.copy, place=dataclasses.replace(hit.copy.place, number=OLDER - 1))
    return {hit.copy: hit.job.path(before).read_bytes()}


def shift(hit: Hit) -> dict[Copy, bytes]:
    """Shift by one element, to either side."""

    def change(values: torch.Tensor, chance: random.Random) -> None:
        values.copy_(values.roll(chance.choice((-1, 1))))

    return hit.edited(change)


def exchange_pages(hit: Hit) -> dict[Copy, bytes]:
    """Exchange the same places of two pages of the digest: only the keys of the pages distinguish them."""
    tensor_slice = hit.held().tensor_slice
    places, page = elements(tensor_slice), tensor_slice.runs.page
    pages, at = places // page, places % page

    def change(values: torch.Tensor, chance: random.Random) -> None:
        first, second = ((pages == one).nonzero().view(-1) for one in _two_alike(pages, at, chance))
        first, second = first[torch.isin(at[first], at[second])], second[torch.isin(at[second], at[first])]
        first, second = first[at[first].argsort()], second[at[second].argsort()]
        values[first], values[second] = values[second], values[first]

    return hit.edited(change)


def _two_alike(pages: torch.Tensor, at: torch.Tensor, chance: random.Random) -> tuple[int, int]:
    """Pages whose parts share a place."""
    pairs = list(itertools.combinations(sorted(set(pages.tolist())), 2))
    return chance.choice([(one, two) for one, two in pairs if torch.isin(at[pages == one], at[pages == two]).any()])


def truncate(hit: Hit) -> dict[Copy, bytes]:
    """To any smaller size, nothing at all included."""
    content = hit.content()
    return {hit.copy: bytes(content[: hit.chance.randrange(len(content))])}


def burst(hit: Hit) -> dict[Copy, bytes]:
    """NaN for a run of values."""

    def change(values: torch.Tensor, chance: random.Random) -> None:
        start = chance.randrange(len(values))
        values[start : chance.randint(start + 1, len(values))] = torch.nan

    return hit.edited(change)


SWAPPED, DONOR, PAGES = "swapped shards", "donor corrupt after digest", "exchanged pages"
KINDS: Mapping[str, Callable[[Hit], dict[Copy, bytes]]] = {
    "bit flip": flip,
    SWAPPED: swap,
    "stale version": stale,
    "wrong place": shift,
    PAGES: exchange_pages,
    "truncated file": truncate,
    "NaN burst": burst,
    DONOR: flip,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Damage:
    """Changed bytes: which tensors of which copies are damaged, and which copies are truncated."""

    damaged: frozenset[tuple[Copy, str]]
    lost: frozenset[Copy]


@contextlib.contextmanager
def injected(job: Job, contents: Mapping[Copy, bytes]) -> Iterator[Damage]:
    """These bytes are in the files, which stay the same ones; in the end they are as they were."""
    before = {copy: job.path(copy).read_bytes() for copy in contents}
    damage = _damage(job, before, contents)
    for copy, content in contents.items():
        _write(job.path(copy), content)
    try:
        yield damage
    finally:
        for copy, content in before.items():
            _write(job.path(copy), content)


def _damage(job: Job, before: Mapping[Copy, bytes], after: Mapping[Copy, bytes]) -> Damage:
    damaged, lost = set[tuple[Copy, str]](), set[Copy]()
    for copy, content in after.items():
        if len(content) < len(before[copy]):
            lost.add(copy)
            continue
        for held in job.manifest(copy).held:
            spans = [slice(entry.offset, entry.offset + held.bytes_of(entry)) for entry in held.entries]
            if any(content[span] != before[copy][span] for span in spans):
                damaged.add((copy, held.tensor_slice.tensor))
    return Damage(damaged=frozenset(damaged), lost=frozenset(lost))


def _write(path: Path, content: bytes) -> None:
    """Write in place: processes that have mapped the file see the change."""
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()
