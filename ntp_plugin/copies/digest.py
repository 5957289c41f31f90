"""A number for a tensor that does not depend on how the tensor is cut.

Each element is hashed together with its place in the whole tensor, and the hashes are added up modulo 2^64. So the sum
over any cut of the tensor is the same number, whoever holds which part, and a part that is flipped, swapped with
another, held twice or missing changes it. The salt tells tensors and their versions apart.
"""

import hashlib
from collections.abc import Sequence

import torch

MODULUS = 1 << 64
_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensor: torch.Tensor, *, salt: str, shape: Sequence[int], dim: int, index: torch.Tensor) -> int:
    """The sum for a part of a tensor of `shape`: all of it but along `dim`, where it holds the places in `index`."""
    if not tensor.numel():
        return 0
    bits = tensor.detach().contiguous().view(_WIDTHS[tensor.element_size()]).to(torch.int64)
    places = torch.zeros((), dtype=torch.int64)
    for axis, size in enumerate(shape):
        along = index if axis == dim else torch.arange(size)
        places = places.unsqueeze(-1) * size + along
    seed = int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest(), signed=True)
    hashed = _mix(bits.reshape(places.shape) ^ _mix(places ^ seed))
    return int(hashed.sum()) % MODULUS


def _mix(numbers: torch.Tensor) -> torch.Tensor:
    """The finalizer of splitmix64, on whole tensors: every bit depends on every bit."""
    numbers = (numbers ^ _shifted(numbers, 30)) * -0x40A7B892E31B1A47
    numbers = (numbers ^ _shifted(numbers, 27)) * -0x6B2FB644ECCEEE15
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: torch.Tensor, by: int) -> torch.Tensor:
    """To the right, filled with zeros: torch fills with the sign."""
    return (numbers >> by) & ((1 << (64 - by)) - 1)
