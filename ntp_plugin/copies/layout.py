"""Which slices a copy has, what is kept of each, and where in its bytes: the same from version to version.

So it is worked out once. The inputs for the digests (`table.py`), the text for a manifest, and the batches in which a
copy is received stay in memory with it, and each version finds them there.
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

from ntp_plugin.copies.slices import TensorSlice, read_slice
from ntp_plugin.copies.table import AT_ONCE, Numbers, Table

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
}
_ALIGNED = 64
_REMEMBERED = 32
"""Layouts kept in memory: of this rank's state, and of what others send."""

type Kind = tuple[str, str, int]
"""One kind of a slice's values: the name, the type, and where in the copy's bytes they begin."""
type SlicesAndKinds = tuple[tuple[TensorSlice, tuple[Kind, ...]], ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CopyBatch:
    """Consecutive slices, from the `first` on, and the range of bytes that holds theirs."""

    first: int
    until: int
    begin: int
    end: int


class CopyLayout:
    """The layout of a copy."""

    def __init__(self, tensor_slices: SlicesAndKinds) -> None:
        self.tensor_slices = tensor_slices
        self.values = [
            (tensor_slice, name, dtype, offset)
            for tensor_slice, kinds in tensor_slices
            for name, dtype, offset in kinds
        ]
        self.named = [(tensor_slice.tensor, name) for tensor_slice, name, _, _ in self.values]
        """Tensor and name of each value, slice by slice."""
        self.begins = [0, *np.cumsum([len(kinds) for _, kinds in tensor_slices], dtype=np.intp).tolist()]
        """The number of each slice's first value."""
        self._sizes = [tensor_slice.size * DTYPES[dtype].itemsize for tensor_slice, _, dtype, _ in self.values]
        self.is_sound = all(size >= 0 <= offset for (*_, offset), size in zip(self.values, self._sizes, strict=True))
        """Whether such a copy can exist: memory is taken for as many elements as a stranger says."""
        self.end: int = max(
            (offset + size for (*_, offset), size in zip(self.values, self._sizes, strict=True)), default=0
        )
        """The bytes that a copy must have."""

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, CopyLayout) and self.tensor_slices == other.tensor_slices)

    def __hash__(self) -> int:
        return hash(self.tensor_slices)

    def __str__(self) -> str:
        return f"{len(self.values)} values of {len(self.tensor_slices)} slices"

    @functools.cached_property
    def text(self) -> bytes:
        """The layout as manifests have it."""
        return json.dumps([[_fields(tensor_slice), kinds] for tensor_slice, kinds in self.tensor_slices]).encode()

    # ------------------------------------------------ for native code

    @functools.cached_property
    def table(self) -> Table:
        """The native code's table of all values."""
        for tensor_slice, *_ in self.values:
            if tensor_slice.runs.size != tensor_slice.size:  # native code would read past its end
                raise ValueError(
                    f"{tensor_slice.tensor} of {tensor_slice.size} elements has places for {tensor_slice.runs.size}"
                )
        return Table([(tensor_slice.runs, DTYPES[dtype]) for tensor_slice, _, dtype, _ in self.values])

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
        """Whether each value begins at a multiple of its type's size."""
        return all(offset % DTYPES[dtype].itemsize == 0 for *_, dtype, offset in self.values)

    @functools.cached_property
    def there(self) -> Numbers:
        """For each row of the table: the bytes of a copy that must have arrived for it and all rows before it."""
        ends: Numbers = np.maximum.accumulate(self.offsets[self.table.of_row] + self.table.ends)
        return ends

    # ------------------------------------------------ for the receiver

    @functools.cached_property
    def batches(self) -> tuple[CopyBatch, ...]:
        """Batches to receive: one slice at a time, or some small ones."""
        return tuple(self._batches())

    def _batches(self) -> Iterator[CopyBatch]:
        at = 0
        for first, until in itertools.pairwise([0, *self._ends_of_batches()]):
            numbers = range(self.begins[first], self.begins[until])
            begin = min((self.values[number][-1] for number in numbers), default=at)
            at = max((self.values[number][-1] + self._sizes[number] for number in numbers), default=at)
            yield CopyBatch(first=first, until=until, begin=begin, end=at)

    def _ends_of_batches(self) -> Iterator[int]:
        size = 0
        for number in range(len(self.tensor_slices)):
            more = sum(self._sizes[self.begins[number] : self.begins[number + 1]])
            if size and size + more > AT_ONCE:
                yield number
                size = 0
            size += more
        if self.tensor_slices:
            yield len(self.tensor_slices)


@functools.lru_cache(_REMEMBERED)
def laid_out(tensor_slices: SlicesAndKinds) -> CopyLayout:
    """The layout of these slices."""
    return CopyLayout(tensor_slices)


@functools.lru_cache(_REMEMBERED)
def in_a_row(kinds: tuple[tuple[TensorSlice, tuple[tuple[str, torch.dtype], ...]], ...]) -> CopyLayout:
    """The layout of these slices one after the other, each with the names and types of what is kept of it."""
    sizes = [tensor_slice.size * dtype.itemsize for tensor_slice, of_slice in kinds for _, dtype in of_slice]
    offsets = iter(places(sizes)[0])
    return laid_out(
        tuple(
            (tensor_slice, tuple((name, dtype_name(dtype), next(offsets)) for name, dtype in of_slice))
            for tensor_slice, of_slice in kinds
        )
    )


@functools.lru_cache(_REMEMBERED)
def read_layout(text: bytes) -> CopyLayout:
    """The layout that a manifest describes."""
    return laid_out(
        tuple(
            (read_slice(tensor_slice), tuple((str(name), str(dtype), int(offset)) for name, dtype, offset in kinds))
            for tensor_slice, kinds in json.loads(text)
        )
    )


def places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where values of these sizes in bytes begin, and the size of all of them."""
    offsets, at = [], 0
    for size in sizes:
        offsets.append(at)
        at += -(-size // _ALIGNED) * _ALIGNED
    return offsets, at


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, as manifests write it."""
    return str(dtype).removeprefix("torch.")


_fields_of = operator.attrgetter(*(field.name for field in dataclasses.fields(TensorSlice)))


def _fields(tensor_slice: TensorSlice) -> tuple[Any, ...]:
    values: tuple[Any, ...] = _fields_of(tensor_slice)
    return values
