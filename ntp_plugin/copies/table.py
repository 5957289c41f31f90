"""The input of native code for many values at once, made once for values that have the same layout in each version.

A value's rectangles are rows: the addresses of its words and their keys. All of that but the addresses of the values is
known before. So a version of hundreds of values takes a few calls of NumPy, and one of native code. A rectangle of more
than `AT_ONCE` bytes is several rows, and the sums can be made some rows at a time.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ntp_plugin.copies.machine import NativeLibrary, Rows
from ntp_plugin.copies.runs import Rectangle, Runs

AT_ONCE = 1 << 21
"""Bytes that are still in a processor's cache when they are read the next time."""
_WORDS, _KEYS, _PAGES, _WIDTH, _VALUE, _TO = 0, 3, 4, 5, 6, 7
"""Columns of a row; `_KEYS` and `_PAGES` are counts."""
_INFINITE = {"torch.float32": 0x7F800000, "torch.bfloat16": 0x7F80, "torch.float16": 0x7C00}
"""The least bits of a value that is not finite, but for the sign. The largest word shows nothing for values of several
words. Types are given by name, because in the CPU emulation `torch.float32` is a double (`NTP_CPU=float64`)."""
_KEY = 8
"""Bytes of a key."""

type Numbers = NDArray[np.uint64]


class Table:
    """The rows of values in memory, given the places of their elements and their types."""

    def __init__(self, values: Sequence[tuple[Runs, torch.dtype]]) -> None:
        cuts = [runs.of_words(dtype.itemsize) for runs, dtype in values]
        # They must live as long as their addresses are used: another thread may drop its own from the cache.
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
        """The value that each row belongs to."""
        self.ends: Numbers = self._rows[:, _WORDS] + self._rows[:, [_KEYS, _PAGES, _WIDTH]].prod(
            axis=1, dtype=np.uint64
        )
        """Where the bytes of each row end in its value."""
        self.keys: Numbers = np.array([cut.of_keys for cut in cuts], dtype=np.uint64)
        """The sum of the keys of each value's places."""
        least = [_INFINITE.get(str(dtype)) for _, dtype in values]
        self._infinite: Numbers = np.array([1 << 63 if one is None else one for one in least], dtype=np.uint64)
        self.undecided = [
            number for number, one in enumerate(values) if least[number] is None and one[1].is_floating_point
        ]
        """The values whose largest word does not show whether all is finite."""

    def sums(
        self, native: NativeLibrary, at: Numbers, found: Rows, *, rows: slice = slice(None), to: Numbers | None = None
    ) -> None:
        """Add the sums of these rows to what was `found`, value by value, and note there the largest words.

        Each sum is of words times the keys of their places. Values are `at` these addresses, and are copied `to`
        others.
        """
        asked, of_row = self._rows[rows].copy(), self.of_row[rows]
        asked[:, _TO] = 0 if to is None else asked[:, _WORDS] + to[of_row]
        asked[:, _WORDS] += at[of_row]
        native.sums(asked, found)

    def nothing_found(self) -> Rows:
        """The sums before the first row."""
        return np.zeros((len(self.keys), 2), dtype=np.uint64)

    def finite(self, found: Rows) -> NDArray[np.bool_]:
        """Whether each value is finite, unless it is `undecided`."""
        finite: NDArray[np.bool_] = found[:, 1] < self._infinite
        return finite


def _rows(one: Rectangle, width: int, value: int) -> Iterator[tuple[int, ...]]:
    keys, pages, keys_count, pages_count = one.in_memory
    at_once = max(1, AT_ONCE // max(1, width * keys_count))
    for first in range(0, pages_count, at_once):
        begin = width * (one.offset + first * keys_count)
        yield begin, keys, pages + _KEY * first, keys_count, min(at_once, pages_count - first), width, value, 0
