"""Tensors from rank to rank, as a plan says: all sends and receives of one move at once.

The transfers of a plan name slots and units; whoever turns them into tensors (`resharding/reshard.py`) does so in the
plan's order, so that the k-th tensor from one slot to another is the same one on both sides. Sender and receiver count
alone, and no description travels. What goes to one slot goes as one message: what costs is each wait, not the bytes.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

_ALIGNED = 16
"""Bytes: each tensor of a message begins at a multiple, so that it can be used where it lies."""


@dataclasses.dataclass(kw_only=True, slots=True)
class Parcel:
    """A contiguous tensor that goes to a slot; or, with `arriving`, one that comes from it: that is a shape and a dtype
    (on the meta device) until it is there."""

    peer: int
    tensor: torch.Tensor
    arriving: bool

    @property
    def room(self) -> int:
        """Bytes of a message that it takes."""
        return -(-self.tensor.nbytes // _ALIGNED) * _ALIGNED


class Exchange:
    """Parcels on their way, over the world group."""

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
        """Until every one is through; what arrives has its values then."""
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
    """Those that are not empty, in their order."""
    found: dict[int, list[Parcel]] = {}
    for parcel in parcels:
        if parcel.arriving == arriving and parcel.tensor.numel():
            found.setdefault(parcel.peer, []).append(parcel)
    return found
