"""Whether the values of a copy are what was written, by the digests in its manifest."""

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
    """Which of these values of a piece are not what was written."""
    return wrong_of(manifest, [(held, values)])


def wrong_in(
    memory: torch.Tensor, manifest: Manifest, *, first: int = 0, until: int | None = None, since: int = 0
) -> list[str]:
    """The same of all the values of a copy, or of some pieces of it, in its bytes `since` this one."""
    pieces = slice(first, until)
    checked = Checked.begun(memory, manifest, pieces=pieces, since=since)
    if checked is None:
        return wrong_of(manifest, [(held, views(memory, held, since)) for held in manifest.held[pieces]])
    return checked.wrong()


class Checked:
    """Values of a copy that are verified as they come, by machine code, as long as a processor's cache has them."""

    def __init__(
        self,
        by: NativeLibrary,
        memory: torch.Tensor,
        manifest: Manifest,
        *,
        pieces: slice = slice(None),
        since: int = 0,
    ) -> None:
        """`memory` is the copy's bytes `since` this one."""
        layout, table = manifest.layout, manifest.layout.table
        first, until, _ = pieces.indices(len(layout.pieces))
        self._values = slice(layout.begins[first], layout.begins[until])
        begins, sizes = layout.offsets[self._values], layout.sizes[self._values]
        if (begins < since).any() or (begins + sizes > since + len(memory)).any():
            raise ValueError(f"{manifest.version} of slot {manifest.slot} has values beyond its bytes")
        rows = np.searchsorted(table.of_row, [self._values.start, self._values.stop])
        self._done, self._end = map(int, rows)
        self._by, self._manifest, self._found = by, manifest, table.nothing_found()
        self._at = layout.offsets + np.uint64((memory.data_ptr() - since) % MODULUS)
        self._memory = memory  # whose address is used

    @classmethod
    def begun(
        cls, memory: torch.Tensor, manifest: Manifest, *, pieces: slice = slice(None), since: int = 0
    ) -> "Checked | None":
        """None where there is no machine code for it."""
        by = machine()
        if by is None or not manifest.layout.is_aligned or (memory.data_ptr() - since) % _WIDEST:
            return None
        return cls(by, memory, manifest, pieces=pieces, since=since)

    def come(self, there: int) -> None:
        """So many bytes of the copy are there by now."""
        layout = self._manifest.layout
        end = min(self._end, int(np.searchsorted(layout.there, there, side="right")))
        if end > self._done:
            layout.table.sums(self._by, self._at, self._found, rows=slice(self._done, end))
            self._done = end

    def wrong(self) -> list[str]:
        """Which of them are not what was written; all are there."""
        layout, manifest, values = self._manifest.layout, self._manifest, self._values
        layout.table.sums(self._by, self._at, self._found, rows=slice(self._done, self._end))
        self._done = self._end
        named = layout.named[values]
        salts = (salt(manifest.run, manifest.version.step, tensor, name) for tensor, name in named)
        numbers = digest.salted(self._found[values, 0], layout.table.keys[values], salts)
        differing = np.flatnonzero(numbers != np.array(manifest.digests[values], dtype=np.uint64))
        return [f"{tensor} ({name})" for tensor, name in (named[number] for number in differing)]


def wrong_of(manifest: Manifest, pieces: Sequence[tuple[CopiedSlice, Values]]) -> list[str]:
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
