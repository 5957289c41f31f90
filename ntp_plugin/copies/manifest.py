"""What a copy says of itself: whose state it is, of which step, in which layout, and the digests of all of it.

A copy is bytes and a manifest. Whoever finds both can tell without anybody's help what they are, where each element
stands in its tensor, and whether they are what was written. So a manifest is made last, when the bytes are there; bytes
without one are nothing. It ends with a checksum of itself.
"""

import dataclasses
import functools
import hashlib
import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ntp_plugin.copies import digest
from ntp_plugin.copies.pieces import Piece, read_piece

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
}
_ALIGNED = 64

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
class Held:
    """A piece of a tensor, its values, and the numbers that its optimizer keeps besides."""

    piece: Piece
    entries: tuple[Entry, ...]
    numbers: Mapping[str, Any]

    def bytes_of(self, entry: Entry) -> int:
        return self.piece.size * DTYPES[entry.dtype].itemsize

    def ends(self) -> list[int]:
        """Where its bytes do, entry by entry."""
        return [entry.offset + self.bytes_of(entry) for entry in self.entries]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """Of one slot's state in one version. `holders` are all slots that have a part of that version, and `extras` what
    the adapter had noted besides tensors."""

    run: str
    version: Version
    slot: int
    holders: tuple[int, ...]
    size: int
    held: tuple[Held, ...]
    extras: Mapping[str, Any]

    def encode(self) -> bytes:
        """Bytes among the extras are told as hexadecimal digits."""
        return self._encoded

    @functools.cached_property
    def _encoded(self) -> bytes:
        body = json.dumps(
            [
                self.run,
                [self.version.step, self.version.epoch],
                self.slot,
                self.holders,
                self.size,
                [[_values(held.piece), [_values(entry) for entry in held.entries], held.numbers] for held in self.held],
                self.extras,
            ],
            default=bytes.hex,
        ).encode()
        return body + b"\n" + _checksum(body)

    @classmethod
    def decode(cls, text: bytes) -> "Manifest | None":
        """None where it is not what was written."""
        body, _, checksum = text.rpartition(b"\n")
        if checksum != _checksum(body):
            return None
        run, (step, epoch), slot, holders, size, held, extras = json.loads(body)
        found = cls(
            run=run,
            version=Version(step=step, epoch=epoch),
            slot=slot,
            holders=tuple(holders),
            size=size,
            held=tuple(
                Held(
                    piece=read_piece(piece),
                    entries=tuple(
                        Entry(name=name, dtype=dtype, offset=offset, digest=found)
                        for name, dtype, offset, found in entries
                    ),
                    numbers=numbers,
                )
                for piece, entries, numbers in held
            ),
            extras=extras,
        )
        vars(found)["_encoded"] = text  # who hands it on, or keeps it, need not write it anew
        return found

    def salt(self, held: Held, entry: Entry) -> str:
        return salt(self.run, self.version.step, held.piece.tensor, entry.name)


def salt(run: str, step: int, tensor: str, entry: str) -> str:
    """Of the digest of some values. The layout is no part of it: they are the same values in every layout."""
    return f"{run} {step} {tensor} {entry}"


def wrong(manifest: Manifest, held: Held, values: Values) -> list[str]:
    """Which of these values of a piece are not what was written."""
    return wrong_of(manifest, [(held, values)])


def wrong_in(memory: torch.Tensor, manifest: Manifest) -> list[str]:
    """The same of all the values of a copy, in its bytes."""
    return wrong_of(manifest, [(held, views(memory, held)) for held in manifest.held])


def wrong_of(manifest: Manifest, pieces: Sequence[tuple[Held, Values]]) -> list[str]:
    """The same of several pieces."""
    several = [
        digest.Values(
            tensors=[values[entry.name] for entry in held.entries],
            runs=held.piece.runs,
            salts=[manifest.salt(held, entry) for entry in held.entries],
        )
        for held, values in pieces
    ]
    return [
        f"{held.piece.tensor} ({entry.name})"
        for (held, _), numbers in zip(pieces, digest.digests_of(several), strict=True)
        for entry, number in zip(held.entries, numbers, strict=True)
        if number != entry.digest
    ]


def views(memory: torch.Tensor, held: Held, since: int = 0) -> dict[str, torch.Tensor]:
    """The values of a piece where they lie in a copy's bytes `since` this one, entry by entry."""
    return {entry.name: view(memory, held, entry, since) for entry in held.entries}


def view(memory: torch.Tensor, held: Held, entry: Entry, since: int = 0) -> torch.Tensor:
    """One kind of them. There are hundreds, and each call of torch takes as long as to read some thousand of them."""
    dtype, start = DTYPES[entry.dtype], entry.offset - since
    if start % dtype.itemsize or memory.numel() % dtype.itemsize:  # some bytes of a copy, or what a stranger laid out
        return memory[start : start + held.bytes_of(entry)].view(dtype)
    return memory.view(dtype).narrow(0, start // dtype.itemsize, held.piece.size)


def places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where values of so many bytes begin, and how much all of them take."""
    offsets, at = [], 0
    for size in sizes:
        offsets.append(at)
        at += -(-size // _ALIGNED) * _ALIGNED
    return offsets, at


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """As manifests write it."""
    return str(dtype).removeprefix("torch.")


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).hexdigest().encode()


def _values(one: Any) -> tuple[Any, ...]:
    values: tuple[Any, ...] = _ALL_OF[type(one)](one)
    return values


_ALL_OF = {kind: operator.attrgetter(*(field.name for field in dataclasses.fields(kind))) for kind in (Piece, Entry)}
