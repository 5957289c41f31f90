"""Numbers for a model's values that show whether two runs agree but for rounding, without the other run's values.

Each place of a full tensor has one of `SIZE` sums, and a sign, drawn from the place and the tensor's name. Its value is
added to that sum with that sign. So the sums over all parts of a model are the same however it is cut, but for
rounding. The distance between the sums of two runs estimates that between all their values. It is exact if one value
differs. For many values it is right in the mean of its square, whose deviation is sqrt(2 / SIZE) of it, so the distance
is right within one part in ten or so. (A count sketch: Charikar, Chen and Farach-Colton, 2002.)

A digest (`digest.py`) finds any bit that differs. This says how much a difference matters, between runs that are to
differ by rounding.
"""

import hashlib
from collections.abc import Iterable

import torch

from ntp_plugin.copies.runs import blocks, odd_numbers
from ntp_plugin.copies.slices import TensorSlice

SIZE = 256
_BITS = 8
_TOGETHER = 1 << 22


@torch.no_grad()
def sketch(parts: Iterable[tuple[TensorSlice, torch.Tensor]]) -> list[float]:
    """The sums for these parts of tensors."""
    sums = torch.zeros(SIZE, dtype=torch.float64)
    for tensor_slice, values in parts:
        flat, seed = values.detach().reshape(-1), _seed(tensor_slice.tensor)
        for begin, places in blocks(tensor_slice.runs, _TOGETHER, flat.device):
            drawn = odd_numbers(places.to(flat.device) + seed)
            which = (drawn >> 64 - _BITS) & (SIZE - 1)
            signs = 1 - ((drawn >> 31) & 2)
            signed = flat[begin : begin + len(places)].double() * signs
            sums += torch.bincount(which, weights=signed, minlength=SIZE).cpu()
    found: list[float] = sums.tolist()
    return found


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), signed=True)
