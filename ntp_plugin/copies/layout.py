"""Which pieces a copy has, what is kept of each, and where in its bytes: the same from version to version.

So it is looked at once. What there is to know for the digests of all of it (`table.py`), how it is written in a
manifest, and what of it is taken in at a time stays in memory with it, and each version finds it there.
"""

import dataclasses
import functools
import itertools
import json
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ntp_plugin.copies.slices import TensorSlice, read_piece
from ntp_plugin.copies.table import AT_ONCE, Numbers, Table

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
}
_ALIGNED = 64
_REMEMBERED = 32
"""Of one's own state, and of what others send."""

type Kind = tuple[str, str, int]
"""Of a piece's values: the name, the type, and where in the copy's bytes they begin."""
type Pieces = tuple[tuple[TensorSlice, tuple[Kind, ...]], ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CopyBatch:
    """Pieces that follow one another, from the `first` on, and the bytes among which theirs are."""

    first: int
    until: int
    begin: int
    end: int


class CopyLayout:
    """Of a copy."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = pieces
        self.values = [(piece, name, dtype, offset) for piece, kinds in pieces for name, dtype, offset in kinds]
        self.named = [(piece.tensor, name) for piece, name, _, _ in self.values]
        """Tensor and name of each value, piece by piece."""
        self.begins = [0, *np.cumsum([len(kinds) for _, kinds in pieces], dtype=np.intp).tolist()]
        """Which value is each piece's first."""
        self._sizes = [piece.size * DTYPES[dtype].itemsize for piece, _, dtype, _ in self.values]
        self.is_sound = all(size >= 0 <= offset for (*_, offset), size in zip(self.values, self._sizes, strict=True))
        """Whether there is such a copy: memory is taken for as many elements as a stranger says."""
        self.end: int = max(
            (offset + size for (*_, offset), size in zip(self.values, self._sizes, strict=True)), default=0
        )
        """So many bytes it has to have."""

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, CopyLayout) and self.pieces == other.pieces)

    def __hash__(self) -> int:
        return hash(self.pieces)

    def __str__(self) -> str:
        return f"{len(self.values)} values of {len(self.pieces)} pieces"

    @functools.cached_property
    def text(self) -> bytes:
        """As manifests have it."""
        return json.dumps([[_fields(piece), kinds] for piece, kinds in self.pieces]).encode()

    # ------------------------------------------------ for machine code

    @functools.cached_property
    def table(self) -> Table:
        """Of all values."""
        for piece, *_ in self.values:
            if piece.runs.size != piece.size:  # machine code would read what is behind it
                raise ValueError(f"{piece.tensor} of {piece.size} elements has places for {piece.runs.size}")
        return Table([(piece.runs, DTYPES[dtype]) for piece, _, dtype, _ in self.values])

    @functools.cached_property
    def offsets(self) -> Numbers:
        """Where each value begins."""
        return np.array([offset for *_, offset in self.values], dtype=np.uint64)

    @functools.cached_property
    def sizes(self) -> Numbers:
        """Bytes of each value."""
        return np.array(self._sizes, dtype=np.uint64)

    @functools.cached_property
    def is_aligned(self) -> bool:
        """Whether each value begins where one of its type may."""
        return all(offset % DTYPES[dtype].itemsize == 0 for *_, dtype, offset in self.values)

    @functools.cached_property
    def there(self) -> Numbers:
        """For each row of the table: how many bytes of a copy have to be there for it and all before it."""
        ends: Numbers = np.maximum.accumulate(self.offsets[self.table.of_row] + self.table.ends)
        return ends

    # ------------------------------------------------ for who takes it in

    @functools.cached_property
    def batches(self) -> tuple[CopyBatch, ...]:
        """One piece at a time, or some small ones."""
        return tuple(self._batches())

    def _batches(self) -> Iterator[CopyBatch]:
        at = 0
        for first, until in itertools.pairwise([0, *self._ends_of_batches()]):
            of_it = range(self.begins[first], self.begins[until])
            begin = min((self.values[number][-1] for number in of_it), default=at)
            at = max((self.values[number][-1] + self._sizes[number] for number in of_it), default=at)
            yield CopyBatch(first=first, until=until, begin=begin, end=at)

    def _ends_of_batches(self) -> Iterator[int]:
        size = 0
        for number in range(len(self.pieces)):
            more = sum(self._sizes[self.begins[number] : self.begins[number + 1]])
            if size and size + more > AT_ONCE:
                yield number
                size = 0
            size += more
        if self.pieces:
            yield len(self.pieces)


@functools.lru_cache(_REMEMBERED)
def laid_out(pieces: Pieces) -> CopyLayout:
    """The one that has these."""
    return CopyLayout(pieces)


@functools.lru_cache(_REMEMBERED)
def in_a_row(kinds: tuple[tuple[TensorSlice, tuple[tuple[str, torch.dtype], ...]], ...]) -> CopyLayout:
    """The layout of these pieces, with the names and types of what is kept of each, one after the other."""
    sizes = [piece.size * dtype.itemsize for piece, of_piece in kinds for _, dtype in of_piece]
    offsets = iter(places(sizes)[0])
    return laid_out(
        tuple(
            (piece, tuple((name, dtype_name(dtype), next(offsets)) for name, dtype in of_piece))
            for piece, of_piece in kinds
        )
    )


@functools.lru_cache(_REMEMBERED)
def read_layout(text: bytes) -> CopyLayout:
    """The one that a manifest tells of."""
    return laid_out(
        tuple(
            (read_piece(piece), tuple((str(name), str(dtype), int(offset)) for name, dtype, offset in kinds))
            for piece, kinds in json.loads(text)
        )
    )


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


_ALL_OF = operator.attrgetter(*(field.name for field in dataclasses.fields(TensorSlice)))


def _fields(piece: TensorSlice) -> tuple[Any, ...]:
    values: tuple[Any, ...] = _ALL_OF(piece)
    return values
