"""Exchanges tensors between ranks, as a plan says: all sends and receives of one move at once.

The transfers of a plan name slots and units. `resharding/reshard.py` turns them into tensors in the plan's order, so
that the k-th tensor from one slot to another is the same one on both sides: both count alone, and no description
travels. All tensors for one slot go as one message: each wait costs, not the bytes.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

_ALIGNED = 16
"""Bytes: each tensor of a message begins at a multiple of it, so that it can be used in place."""


@dataclasses.dataclass(kw_only=True, slots=True)
class Parcel:
    """A contiguous tensor for a slot, or with `arriving`, one from it: until it arrives it has only a shape and a dtype
    (on the meta device)."""

    peer: int
    tensor: torch.Tensor
    arriving: bool

    @property
    def room(self) -> int:
        """Bytes that it takes in a message."""
        return -(-self.tensor.nbytes // _ALIGNED) * _ALIGNED


class Exchange:
    """Parcels in flight, over the world group."""

    def __init__(self, parcels: Sequence[Parcel], rank_of: Callable[[int], int], device: torch.device) -> None:
        leaving, self._arriving = _by_peer(parcels, arriving=False), _by_peer(parcels, arriving=True)
        self._incoming = {
            peer: torch.empty(sum(parcel.room for parcel in theirs), dtype=torch.uint8, device=device)
            for peer, theirs in self._arriving.items()
        }
        self._works = [dist.irecv(buffer, rank_of(peer)) for peer, buffer in self._incoming.items()]
        self._works += [
            dist.isend(torch.cat(list(_message(theirs))), rank_of(peer)) for peer, theirs in leaving.items()
        ]

    def wait(self) -> None:
        """Wait until all parcels are through; arriving ones have their values then."""
        for work in self._works:
            assert work is not None, "every member is in the world group"
            work.wait()
        for peer, theirs in self._arriving.items():
            at = 0
            for parcel in theirs:
                like = parcel.tensor
                values = self._incoming[peer][at : at + like.nbytes].view(like.dtype)
                parcel.tensor, at = values.view(like.shape), at + parcel.room


def _message(parcels: Sequence[Parcel]) -> Iterator[torch.Tensor]:
    for parcel in parcels:
        values = parcel.tensor.view(-1).view(torch.uint8)
        yield values
        yield values.new_zeros(parcel.room - len(values))


def _by_peer(parcels: Sequence[Parcel], *, arriving: bool) -> dict[int, list[Parcel]]:
    """The non-empty parcels by peer, in order."""
    found: dict[int, list[Parcel]] = {}
    for parcel in parcels:
        if parcel.arriving == arriving and parcel.tensor.numel():
            found.setdefault(parcel.peer, []).append(parcel)
    return found
