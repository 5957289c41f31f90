"""The manifest describes a copy: whose state it is, of which step, in which layout, and the digests of all of it.

A copy is bytes and a manifest. A reader of both knows what they are, where each element lies in its tensor, and whether
they are what was written. So a manifest is written last, when the bytes are complete; bytes without one are nothing.

It is a line of JSON for what is the same from version to version (`layout.py`), a line for the rest, and a checksum of
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
"""The values of a slice, entry by entry."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """A state of the job: the steps that are in it, and the epoch since which it has its layout."""

    step: int
    epoch: int

    def __str__(self) -> str:
        return f"step {self.step} as laid out in epoch {self.epoch}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One kind of values for all elements of a slice: its main weights, or a moment of Adam's."""

    name: str
    dtype: str
    offset: int
    """The first byte."""
    digest: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopiedSlice:
    """A slice of a tensor, its values, and the numbers that its optimizer keeps for it."""

    tensor_slice: TensorSlice
    entries: tuple[Entry, ...]
    numbers: Mapping[str, Any]

    def bytes_of(self, entry: Entry) -> int:
        return self.tensor_slice.size * DTYPES[entry.dtype].itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """Describes the copy of one slot's state in one version.

    `holders` are all slots that have a part of that version, and `extras` is what the adapter has noted besides
    tensors.
    """

    run: str
    version: Version
    slot: int
    holders: tuple[int, ...]
    size: int
    layout: CopyLayout
    digests: tuple[int, ...]
    """The digests of all values, in their order."""
    numbers: tuple[Mapping[str, Any], ...]
    """The numbers that go with each slice."""
    extras: Mapping[str, Any]

    @functools.cached_property
    def held(self) -> tuple[CopiedSlice, ...]:
        """The copy slice by slice, for a reader of some of it; most versions are never read so."""
        digests = iter(self.digests)
        return tuple(
            CopiedSlice(
                tensor_slice=tensor_slice,
                entries=tuple(
                    Entry(name=name, dtype=dtype, offset=offset, digest=next(digests)) for name, dtype, offset in kinds
                ),
                numbers=numbers,
            )
            for (tensor_slice, kinds), numbers in zip(self.layout.tensor_slices, self.numbers, strict=True)
        )

    def encode(self) -> bytes:
        """The manifest as text; bytes among the extras become hexadecimal digits."""
        return self._encoded

    @functools.cached_property
    def _encoded(self) -> bytes:
        version = self.version.step, self.version.epoch
        facts = self.run, version, self.slot, self.holders, self.size, self.digests, self.numbers, self.extras
        body = self.layout.text + b"\n" + json.dumps(facts, default=bytes.hex).encode()
        return body + b"\n" + _checksum(body)

    @classmethod
    def decode(cls, text: bytes) -> "Manifest | None":
        """Read a manifest; None if it is not what was written, or an earlier version of the plugin wrote it.

        Raises if what was written is no manifest.
        """
        body, _, checksum = text.rpartition(b"\n")
        if checksum != _checksum(body):
            return None
        layout_text, ends, facts = body.partition(b"\n")
        if not ends:
            return None
        run, (step, epoch), slot, holders, size, digests, numbers, extras = json.loads(facts)
        layout = read_layout(layout_text)
        if (len(digests), len(numbers)) != (len(layout.values), len(layout.tensor_slices)):
            raise ValueError(f"{len(digests)} digests and numbers of {len(numbers)} slices are not those of {layout}")
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
        vars(found)["_encoded"] = text  # a process that passes it on, or stores it, need not encode it again
        return found

    def salt(self, held: CopiedSlice, entry: Entry) -> str:
        return salt(self.run, self.version.step, held.tensor_slice.tensor, entry.name)


def salt(run: str, step: int, tensor: str, entry: str) -> str:
    """The salt of a value's digest. The layout is not part of it: the values are the same in every layout."""
    return f"{run} {step} {tensor} {entry}"


def views(memory: torch.Tensor, held: CopiedSlice, since: int = 0) -> dict[str, torch.Tensor]:
    """The values of a slice in a copy's bytes `since` this one, entry by entry."""
    return {entry.name: view(memory, held, entry, since) for entry in held.entries}


def view(memory: torch.Tensor, held: CopiedSlice, entry: Entry, since: int = 0) -> torch.Tensor:
    """One entry of a slice.

    There are hundreds, and each call of torch takes as long as to read some thousand values.
    """
    dtype, start = DTYPES[entry.dtype], entry.offset - since
    if start % dtype.itemsize or memory.numel() % dtype.itemsize:  # some bytes of a copy, or the layout of a stranger
        return memory[start : start + held.bytes_of(entry)].view(dtype)
    return memory.view(dtype).narrow(0, start // dtype.itemsize, held.tensor_slice.size)


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).hexdigest().encode()
