"""Tensors from rank to rank, as a plan says: all sends and receives of one move at once.

The transfers of a plan name slots and units; whoever turns them into tensors (`training/relayout.py`) does so in the
plan's order, so that the k-th tensor from one slot to another is the same one on both sides. Sender and receiver count
alone, and no description travels.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Parcel:
    """A contiguous tensor that goes to a slot or, with `arriving`, that is filled by what comes from it."""

    peer: int
    tensor: torch.Tensor
    arriving: bool


def exchange(parcels: Sequence[Parcel], rank_of: Callable[[int], int]) -> None:
    """Send and receive them all over the world group; returns when every one is through."""
    counted: Counter[tuple[int, bool]] = Counter()
    works = []
    for parcel in parcels:
        rank, tag = rank_of(parcel.peer), counted[parcel.peer, parcel.arriving]
        counted[parcel.peer, parcel.arriving] += 1
        move = dist.irecv if parcel.arriving else dist.isend
        works.append(move(parcel.tensor, rank, tag=tag))
    for work in works:
        assert work is not None, "every member is in the world group"
        work.wait()
