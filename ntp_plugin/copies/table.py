"""What machine code is told of many values at once, to come to their sums: made once for values that are laid out
alike, as those of one version are and those of the next.

A value's rectangles are rows: where its words are, and their keys. But for the addresses of the values all of that is
known before. So a version of hundreds of values takes a few calls of NumPy, and one of machine code. A rectangle of
more than `AT_ONCE` bytes is several rows, and the sums can be made some rows at a time.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ntp_plugin.copies.machine import NativeLibrary, Rows
from ntp_plugin.copies.runs import Rectangle, Runs

AT_ONCE = 1 << 21
"""Bytes that a processor's cache has yet when they are looked at the next time."""
_WORDS, _KEYS, _PAGES, _WIDTH, _VALUE, _TO = 0, 3, 4, 5, 6, 7
"""Columns of a row; of keys and pages how many."""
_INFINITE = {"torch.float32": 0x7F800000, "torch.bfloat16": 0x7F80, "torch.float16": 0x7C00}
"""The least bits of what is not finite, but for the sign; of more than one word nothing is told by the largest. By the
names of types, because in a rehearsal `torch.float32` is a double (`NTP_CPU=float64`)."""
_KEY = 8
"""Bytes."""

type Numbers = NDArray[np.uint64]


class Table:
    """Of values in memory, each with the places of its elements and their type."""

    def __init__(self, values: Sequence[tuple[Runs, torch.dtype]]) -> None:
        cuts = [runs.of_words(dtype.itemsize) for runs, dtype in values]
        # They have to live for as long as their addresses are used: another thread may be the last to remember its own.
        self._rectangles = [cut.rectangles for cut in cuts]
        widths = (min(dtype.itemsize, 4) for _, dtype in values)
        rows = [
            row
            for number, (width, those) in enumerate(zip(widths, self._rectangles, strict=True))
            for one in those
            for row in _rows(one, width, number)
        ]
        self._rows = np.array(rows, dtype=np.uint64).reshape(-1, 8)
        self.of_row = self._rows[:, _VALUE].astype(np.intp)
        """Which value each is of."""
        self.ends: Numbers = self._rows[:, _WORDS] + self._rows[:, [_KEYS, _PAGES, _WIDTH]].prod(
            axis=1, dtype=np.uint64
        )
        """Where the bytes of each row end in its value."""
        self.keys: Numbers = np.array([cut.of_keys for cut in cuts], dtype=np.uint64)
        """The sum of those of each value's places."""
        least = [_INFINITE.get(str(dtype)) for _, dtype in values]
        self._infinite: Numbers = np.array([1 << 63 if one is None else one for one in least], dtype=np.uint64)
        self.untold = [
            number for number, one in enumerate(values) if least[number] is None and one[1].is_floating_point
        ]
        """The values of which the largest word does not tell whether all is finite."""

    def sums(
        self, by: NativeLibrary, at: Numbers, found: Rows, *, rows: slice = slice(None), to: Numbers | None = None
    ) -> None:
        """Add these rows' sums of words times the keys of their places to what was `found`, value by value, and note
        there the largest words. Values are `at` these addresses, and are copied `to` others."""
        asked, of_row = self._rows[rows].copy(), self.of_row[rows]
        asked[:, _TO] = 0 if to is None else asked[:, _WORDS] + to[of_row]
        asked[:, _WORDS] += at[of_row]
        by.sums(asked, found)

    def nothing_found(self) -> Rows:
        """Before the first."""
        return np.zeros((len(self.keys), 2), dtype=np.uint64)

    def finite(self, found: Rows) -> NDArray[np.bool_]:
        """Whether each value is, where that is told."""
        told: NDArray[np.bool_] = found[:, 1] < self._infinite
        return told


def _rows(one: Rectangle, width: int, value: int) -> Iterator[tuple[int, ...]]:
    keys, pages, keys_count, pages_count = one.in_memory
    at_once = max(1, AT_ONCE // max(1, width * keys_count))
    for first in range(0, pages_count, at_once):
        begin = width * (one.offset + first * keys_count)
        yield begin, keys, pages + _KEY * first, keys_count, min(at_once, pages_count - first), width, value, 0
