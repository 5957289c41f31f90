"""Checks whether the values of a copy are what was written, by the digests in its manifest."""

from collections.abc import Sequence

import numpy as np
import torch

from ntp_plugin.copies import digest
from ntp_plugin.copies.layout import DTYPES
from ntp_plugin.copies.machine import NativeLibrary, machine
from ntp_plugin.copies.manifest import CopiedSlice, Manifest, Values, salt, views
from ntp_plugin.copies.runs import MODULUS

_WIDEST = max(dtype.itemsize for dtype in DTYPES.values())


def wrong(manifest: Manifest, held: CopiedSlice, values: Values) -> list[str]:
    """The values of a slice that are not what was written."""
    return wrong_of(manifest, [(held, values)])


def wrong_in(
    memory: torch.Tensor, manifest: Manifest, *, first: int = 0, until: int | None = None, since: int = 0
) -> list[str]:
    """The wrong values of a copy, or of some slices of it, in its bytes `since` this one."""
    tensor_slices = slice(first, until)
    checked = Checked.begun(memory, manifest, tensor_slices=tensor_slices, since=since)
    if checked is None:
        return wrong_of(manifest, [(held, views(memory, held, since)) for held in manifest.held[tensor_slices]])
    return checked.wrong()


class Checked:
    """Verifies the values of a copy as they arrive, in native code, while they are in a processor's cache."""

    def __init__(
        self,
        native: NativeLibrary,
        memory: torch.Tensor,
        manifest: Manifest,
        *,
        tensor_slices: slice = slice(None),
        since: int = 0,
    ) -> None:
        """`memory` is the copy's bytes `since` this one."""
        layout, table = manifest.layout, manifest.layout.table
        first, until, _ = tensor_slices.indices(len(layout.tensor_slices))
        self._values = slice(layout.begins[first], layout.begins[until])
        begins, sizes = layout.offsets[self._values], layout.sizes[self._values]
        if (begins < since).any() or (begins + sizes > since + len(memory)).any():
            raise ValueError(f"{manifest.version} of slot {manifest.slot} has values beyond its bytes")
        rows = np.searchsorted(table.of_row, [self._values.start, self._values.stop])
        self._done, self._end = map(int, rows)
        self._native, self._manifest, self._found = native, manifest, table.nothing_found()
        self._at = layout.offsets + np.uint64((memory.data_ptr() - since) % MODULUS)
        self._memory = memory  # its address is used

    @classmethod
    def begun(
        cls, memory: torch.Tensor, manifest: Manifest, *, tensor_slices: slice = slice(None), since: int = 0
    ) -> "Checked | None":
        """Begin to verify; None if native code cannot do it."""
        native = machine()
        if native is None or not manifest.layout.is_aligned or (memory.data_ptr() - since) % _WIDEST:
            return None
        return cls(native, memory, manifest, tensor_slices=tensor_slices, since=since)

    def come(self, there: int) -> None:
        """Verify what is complete, given how many bytes of the copy have arrived."""
        layout = self._manifest.layout
        end = min(self._end, int(np.searchsorted(layout.there, there, side="right")))
        if end > self._done:
            layout.table.sums(self._native, self._at, self._found, rows=slice(self._done, end))
            self._done = end

    def wrong(self) -> list[str]:
        """The values that are not what was written, when all bytes have arrived."""
        layout, manifest, values = self._manifest.layout, self._manifest, self._values
        layout.table.sums(self._native, self._at, self._found, rows=slice(self._done, self._end))
        self._done = self._end
        named = layout.named[values]
        salts = (salt(manifest.run, manifest.version.step, tensor, name) for tensor, name in named)
        numbers = digest.salted(self._found[values, 0], layout.table.keys[values], salts)
        differing = np.flatnonzero(numbers != np.array(manifest.digests[values], dtype=np.uint64))
        return [f"{tensor} ({name})" for tensor, name in (named[number] for number in differing)]


def wrong_of(manifest: Manifest, tensor_slices: Sequence[tuple[CopiedSlice, Values]]) -> list[str]:
    """The wrong values of several slices."""
    several = [
        digest.Values(
            tensors=[values[entry.name] for entry in held.entries],
            runs=held.tensor_slice.runs,
            salts=[manifest.salt(held, entry) for entry in held.entries],
        )
        for held, values in tensor_slices
    ]
    return [
        f"{held.tensor_slice.tensor} ({entry.name})"
        for (held, _), numbers in zip(tensor_slices, digest.digests_of(several), strict=True)
        for entry, number in zip(held.entries, numbers, strict=True)
        if number != entry.digest
    ]
