"""The bytes of a copy in shared memory, for tests that read all of them, or change some."""

import numpy as np
import torch


def bytes_of(store, place):
    return torch.frombuffer(bytearray((store.folder / str(place)).read_bytes()), dtype=torch.uint8)


def mapped(store, place):
    """Changes of this mapping change the copy."""
    return torch.from_numpy(np.memmap(store.folder / str(place), dtype=np.uint8, mode="r+"))


def wrong_in(store, place):
    from ntp_plugin.copies.verify import wrong  # noqa: PLC0415

    manifest = store.manifest(place)
    return [what for held in manifest.held for what in wrong(manifest, held, store.read(place, held))]
