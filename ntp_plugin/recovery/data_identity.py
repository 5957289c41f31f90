"""Identifies the data that a process trains on by the contents of its files instead of their paths.

Hosts may mount the same files under other folders, so paths are free to differ. A corpus file may have terabytes: its
size is compared, and blocks all over it.
"""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

_BLOCKS, _BLOCK = 16, 1 << 16
"""The number of blocks of a file that are read, and the bytes of each."""


def digest_of_file(path: Path) -> str:
    """Return a file's size and a digest of blocks spread evenly over it; a small file is read in full."""
    seen = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        for number in range(_BLOCKS):
            file.seek(number * max(size - _BLOCK, 0) // (_BLOCKS - 1) if size > _BLOCKS * _BLOCK else number * _BLOCK)
            seen.update(file.read(_BLOCK))
    return f"{size} bytes, {seen.hexdigest()}"


def identity_of_files(words: Iterable[str], *, endings: Iterable[str]) -> dict[str, str]:
    """Describe the contents of the files that a data argument names.

    Args:
        words: Paths, path prefixes, and numbers that weigh them, in the order of the argument.
        endings: What follows a prefix in the name of a file.

    Returns:
        For each word by its number: its last part, and the contents of the files that it names. Empty if this host has
        none of the files, because it then reads none.
    """
    names, contents = {}, {}
    for number, word in enumerate(words, start=1):
        names[f"part {number}"] = Path(word).name
        for ending in ("", *endings):
            path = Path(word + ending)
            if path.is_file():
                contents[f"part {number}{ending}"] = digest_of_file(path)
    return names | contents if contents else {}
