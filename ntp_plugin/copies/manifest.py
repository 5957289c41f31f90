"""What a copy says of itself: whose state it is, of which step, in which layout, and the digests of all of it.

A copy is bytes and a manifest. Whoever finds both can tell without anybody's help what they are, where each element
stands in its tensor, and whether they are what was written. So a manifest is made last, when the bytes are there; bytes
without one are nothing.

It is a line of JSON for what is the same from version to version (`layout.py`), one for what is not, and a checksum of
both.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from ntp_plugin.copies.layout import DTYPES, CopyLayout, read_layout
from ntp_plugin.copies.slices import TensorSlice

type Values = Mapping[str, torch.Tensor]
"""Of a piece, entry by entry."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """A state of the job: the steps that are in it, and the epoch from which on its layout is."""

    step: int
    epoch: int

    def __str__(self) -> str:
        return f"step {self.step} as laid out in epoch {self.epoch}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One kind of values for all elements of a piece: its main weights, a moment of Adam's."""

    name: str
    dtype: str
    offset: int
    """In bytes."""
    digest: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopiedSlice:
    """A piece of a tensor, its values, and the numbers that its optimizer keeps besides."""

    piece: TensorSlice
    entries: tuple[Entry, ...]
    numbers: Mapping[str, Any]

    def bytes_of(self, entry: Entry) -> int:
        return self.piece.size * DTYPES[entry.dtype].itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """Of one slot's state in one version. `holders` are all slots that have a part of that version, and `extras` what
    the adapter had noted besides tensors."""

    run: str
    version: Version
    slot: int
    holders: tuple[int, ...]
    size: int
    layout: CopyLayout
    digests: tuple[int, ...]
    """Of all values, in its order."""
    numbers: tuple[Mapping[str, Any], ...]
    """That go with each of its pieces."""
    extras: Mapping[str, Any]

    @functools.cached_property
    def held(self) -> tuple[CopiedSlice, ...]:
        """Piece by piece: for who looks at some of it, which nobody does with each version."""
        digests = iter(self.digests)
        return tuple(
            CopiedSlice(
                piece=piece,
                entries=tuple(
                    Entry(name=name, dtype=dtype, offset=offset, digest=next(digests)) for name, dtype, offset in kinds
                ),
                numbers=numbers,
            )
            for (piece, kinds), numbers in zip(self.layout.pieces, self.numbers, strict=True)
        )

    def encode(self) -> bytes:
        """Bytes among the extras are told as hexadecimal digits."""
        return self._encoded

    @functools.cached_property
    def _encoded(self) -> bytes:
        version = self.version.step, self.version.epoch
        told = self.run, version, self.slot, self.holders, self.size, self.digests, self.numbers, self.extras
        body = self.layout.text + b"\n" + json.dumps(told, default=bytes.hex).encode()
        return body + b"\n" + _checksum(body)

    @classmethod
    def decode(cls, text: bytes) -> "Manifest | None":
        """None where it is not what was written, or an earlier version of the plugin wrote it; raises where what was
        written is no manifest."""
        body, _, checksum = text.rpartition(b"\n")
        if checksum != _checksum(body):
            return None
        of_layout, ends, told = body.partition(b"\n")
        if not ends:
            return None
        run, (step, epoch), slot, holders, size, digests, numbers, extras = json.loads(told)
        layout = read_layout(of_layout)
        if (len(digests), len(numbers)) != (len(layout.values), len(layout.pieces)):
            raise ValueError(f"{len(digests)} digests and numbers of {len(numbers)} pieces are not those of {layout}")
        found = cls(
            run=run,
            version=Version(step=step, epoch=epoch),
            slot=slot,
            holders=tuple(holders),
            size=size,
            layout=layout,
            digests=tuple(digests),
            numbers=tuple(numbers),
            extras=extras,
        )
        vars(found)["_encoded"] = text  # who hands it on, or keeps it, need not write it anew
        return found

    def salt(self, held: CopiedSlice, entry: Entry) -> str:
        return salt(self.run, self.version.step, held.piece.tensor, entry.name)


def salt(run: str, step: int, tensor: str, entry: str) -> str:
    """Of the digest of some values. The layout is no part of it: they are the same values in every layout."""
    return f"{run} {step} {tensor} {entry}"


def views(memory: torch.Tensor, held: CopiedSlice, since: int = 0) -> dict[str, torch.Tensor]:
    """The values of a piece where they lie in a copy's bytes `since` this one, entry by entry."""
    return {entry.name: view(memory, held, entry, since) for entry in held.entries}


def view(memory: torch.Tensor, held: CopiedSlice, entry: Entry, since: int = 0) -> torch.Tensor:
    """One kind of them. There are hundreds, and each call of torch takes as long as to read some thousand of them."""
    dtype, start = DTYPES[entry.dtype], entry.offset - since
    if start % dtype.itemsize or memory.numel() % dtype.itemsize:  # some bytes of a copy, or what a stranger laid out
        return memory[start : start + held.bytes_of(entry)].view(dtype)
    return memory.view(dtype).narrow(0, start // dtype.itemsize, held.piece.size)


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).hexdigest().encode()
