"""Which data a process trains on, by what the files hold and not by where they lie.

Hosts may mount the same files under other folders, so folders are free to differ. A file of a corpus may have
terabytes: its size is compared, and blocks all over it.
"""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

_BLOCKS, _BLOCK = 16, 1 << 16
"""So many blocks of a file are read, of so many bytes each."""


def digest_of_file(path: Path) -> str:
    """The size of a file, and a digest of blocks that are spread evenly over it; of a small file all is read."""
    seen = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        for number in range(_BLOCKS):
            file.seek(number * max(size - _BLOCK, 0) // (_BLOCKS - 1) if size > _BLOCKS * _BLOCK else number * _BLOCK)
            seen.update(file.read(_BLOCK))
    return f"{size} bytes, {seen.hexdigest()}"


def identity_of_files(words: Iterable[str], *, endings: Iterable[str]) -> dict[str, str]:
    """What the files behind the words of a data argument hold.

    Args:
        words: paths, prefixes of paths, and numbers that weigh them, in the order of the argument.
        endings: what follows a prefix in the name of a file.

    Returns:
        For each word by its number: its last part, and the contents of the files that it names. Empty where no such
        file is on this host, which then reads none.
    """
    names, contents = {}, {}
    for number, word in enumerate(words, start=1):
        names[f"part {number}"] = Path(word).name
        for ending in ("", *endings):
            path = Path(word + ending)
            if path.is_file():
                contents[f"part {number}{ending}"] = digest_of_file(path)
    return names | contents if contents else {}
