"""Native code for the work on every byte of a state, if the package was built with a C compiler.

It makes the sums of `digest.py` in a fifth of the time that NumPy takes, copies a state in the same pass, and folds
bytes in memory into a parity in another call (`machine.c`). Nothing depends on it: if it is missing, or does not come
to the same sums, as when it was built from another source, NumPy and torch do the same.
"""

import ctypes
import functools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ntp_plugin.copies.runs import MODULUS, odd_numbers

LIBRARY = Path(__file__).with_name("_machine.so")
_LOG = logging.getLogger(__name__)

type Rows = NDArray[np.uint64]
"""Rows of numbers and addresses, as the structures of the source have them."""


class NativeLibrary:
    """The calls of the library; Python's lock is released in them."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._sums, self._fold = library.ntp_sum_and_copy, library.ntp_fold
        self._sums.restype = self._fold.restype = None
        self._sums.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p]
        self._fold.argtypes = [ctypes.c_void_p, ctypes.c_uint64]

    def sums(self, rows: Rows, found: Rows) -> None:
        """Add to what was `found` of each value: the sum, modulo 2^64, and the largest word but for its sign.

        Rows are the addresses of words, keys and pages, the numbers of keys and pages, the bytes of a word, the number
        of the value, and the address to copy the words to, or zero.
        """
        self._sums(rows.ctypes.data, len(rows), found.ctypes.data)

    def fold(self, rows: Rows) -> None:
        """XOR bytes in place; rows are the target address, the source address, and the number of bytes."""
        self._fold(rows.ctypes.data, len(rows))


@functools.cache
def machine() -> NativeLibrary | None:
    """The library; None if it is missing or gives wrong results."""
    if not LIBRARY.exists():
        return None
    try:
        found = NativeLibrary(LIBRARY)
    except (OSError, AttributeError) as error:
        _LOG.warning(
            "NumPy makes the digests, which takes longer: %s cannot be used (%s); install again", LIBRARY, error
        )
        return None
    if not all(_is_right(found, word) for word in (np.uint8, np.int16, np.int32)):
        _LOG.warning("NumPy makes the digests, which takes longer: %s is of another source; install again", LIBRARY)
        return None
    return found


def _is_right(found: NativeLibrary, word: type[np.integer[Any]]) -> bool:
    """Whether it is right for two values in pages whose words and keys have all bits set somewhere; the second is
    copied."""
    keys, pages, bits = (odd_numbers(torch.arange(size)).numpy() for size in (37, 3, 2 * 3 * 37))
    words = bits.astype(word)
    wanted = ((words.astype(np.int64).reshape(2, 3, 37) * keys).sum(-1) * pages).sum(-1)
    largest = (words.reshape(2, -1) & np.iinfo(f"i{words.itemsize}").max).max(-1)
    copied, half, sums = np.zeros_like(words), words.nbytes // 2, np.zeros((2, 2), dtype=np.uint64)
    at = keys.ctypes.data, pages.ctypes.data, len(keys), len(pages), words.itemsize
    rows = [
        (words.ctypes.data + value * half, *at, value, value * (copied.ctypes.data + value * half)) for value in (0, 1)
    ]
    found.sums(np.array(rows, dtype=np.uint64), sums)
    found.fold(np.array([(copied.ctypes.data, words.ctypes.data, words.nbytes)], dtype=np.uint64))
    expected = [[int(total) % MODULUS, int(most)] for total, most in zip(wanted, largest, strict=True)]
    first, second = copied.reshape(2, -1)
    return sums.tolist() == expected and np.array_equal(first, words[: len(first)]) and not second.any()
