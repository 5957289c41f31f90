"""Tensors from rank to rank, as a plan says: all sends and receives of one move at once.

The transfers of a plan name slots and units; whoever turns them into tensors (`training/relayout.py`) does so in the
plan's order, so that the k-th tensor from one slot to another is the same one on both sides. Sender and receiver count
alone, and no description travels. What goes to one slot goes as one message: what costs is each wait, not the bytes.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Parcel:
    """A contiguous tensor that goes to a slot or, with `arriving`, that is filled by what comes from it."""

    peer: int
    tensor: torch.Tensor
    arriving: bool

    @property
    def bytes(self) -> torch.Tensor:
        return self.tensor.view(-1).view(torch.uint8)


def exchange(parcels: Sequence[Parcel], rank_of: Callable[[int], int]) -> None:
    """Send and receive them all over the world group; returns when every one is through."""
    leaving, arriving = _by_peer(parcels, arriving=False), _by_peer(parcels, arriving=True)
    incoming = {
        peer: torch.cat([torch.empty_like(parcel.bytes) for parcel in theirs]) for peer, theirs in arriving.items()
    }
    works = [dist.irecv(buffer, rank_of(peer)) for peer, buffer in incoming.items()]
    works += [
        dist.isend(torch.cat([parcel.bytes for parcel in theirs]), rank_of(peer)) for peer, theirs in leaving.items()
    ]
    for work in works:
        assert work is not None, "every member is in the world group"
        work.wait()
    for peer, theirs in arriving.items():
        at = 0
        for parcel in theirs:
            until = at + parcel.bytes.numel()
            parcel.bytes.copy_(incoming[peer][at:until])
            at = until


def _by_peer(parcels: Sequence[Parcel], *, arriving: bool) -> dict[int, list[Parcel]]:
    """Those that are not empty, in their order."""
    found: dict[int, list[Parcel]] = {}
    for parcel in parcels:
        if parcel.arriving == arriving and parcel.tensor.numel():
            found.setdefault(parcel.peer, []).append(parcel)
    return found
