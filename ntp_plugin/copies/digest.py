"""A number for a tensor that does not depend on how the tensor is cut.

Each element is hashed together with its place in the whole tensor, and the hashes are added up modulo 2^64. So the sum
over any cut of the tensor is the same number, whoever holds which part, and a part that is flipped, swapped with
another, held twice or missing changes it. The salt tells tensors and their versions apart.
"""

import hashlib
from collections.abc import Iterator, Sequence

import torch

MODULUS = 1 << 64
BLOCK = 1 << 18
"""Elements, of eight bytes each: with what a hash makes of them they stay in a processor's cache."""
_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensor: torch.Tensor, *, salt: str, shape: Sequence[int], dim: int, index: torch.Tensor) -> int:
    """The sum for a part of a tensor of `shape`: all of it but along `dim`, where it holds the places in `index`."""
    (total,) = digests([tensor], salts=[salt], shape=shape, dim=dim, index=index)
    return total


def digests(
    tensors: Sequence[torch.Tensor], *, salts: Sequence[str], shape: Sequence[int], dim: int, index: torch.Tensor
) -> list[int]:
    """The sums for the same part of several tensors of one shape: each place is hashed once."""
    if not tensors or not tensors[0].numel():
        return [0] * len(tensors)
    device = tensors[0].device
    axes = [index.to(device) if axis == dim else torch.arange(size, device=device) for axis, size in enumerate(shape)]
    parts = [tensor.detach().reshape([len(axis) for axis in axes]) for tensor in tensors]
    seeds = [int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest(), signed=True) for salt in salts]
    totals = [0] * len(tensors)
    for rows in _blocks(parts[0]):
        places = torch.zeros((), dtype=torch.int64, device=device)
        for size, along in zip(shape, [axes[0][rows], *axes[1:]], strict=True):
            places = places.unsqueeze(-1) * size + along
        places = _mix(places)
        for number, (part, seed) in enumerate(zip(parts, seeds, strict=True)):
            bits = part[rows].contiguous().view(_WIDTHS[part.element_size()]).to(torch.int64)
            totals[number] += int(_mix(bits ^ places ^ seed).sum())
    return [total % MODULUS for total in totals]


def _blocks(part: torch.Tensor) -> Iterator[slice]:
    """Rows for so many elements at a time: a hash takes several times the memory of what is hashed."""
    rows = max(1, BLOCK * len(part) // part.numel())
    return (slice(start, start + rows) for start in range(0, len(part), rows))


def _mix(numbers: torch.Tensor) -> torch.Tensor:
    """The finalizer of splitmix64, on whole tensors: every bit depends on every bit."""
    numbers = (numbers ^ _shifted(numbers, 30)) * -0x40A7B892E31B1A47
    numbers = (numbers ^ _shifted(numbers, 27)) * -0x6B2FB644ECCEEE15
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: torch.Tensor, by: int) -> torch.Tensor:
    """To the right, filled with zeros: torch fills with the sign."""
    return (numbers >> by) & ((1 << (64 - by)) - 1)
