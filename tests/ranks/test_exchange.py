"""Tensors of all sizes from rank to rank in one message, and which parts of a message are used in place."""

import itertools

import torch

from ntp_plugin.groups.exchange import Exchange, Parcel
from ntp_plugin.testing.ranks import Ranks

SHAPES = [(3,), (1, 5), (0, 4), (2, 3, 1), (7,)]
DTYPES = [torch.bfloat16, torch.float32, torch.uint8, torch.float64]
SIZE = 3


def sent(source, target):
    """In order; each tensor says whence it comes, and where it goes."""
    for number, (shape, dtype) in enumerate(itertools.product(SHAPES, DTYPES)):
        yield torch.full(shape, 100 * source + 10 * target + number % 10, dtype=dtype)


def play(rank):
    import torch.distributed as dist  # noqa: PLC0415  (a rank's own)

    dist.init_process_group("gloo", init_method=f"file://{rank.folder}/meet", rank=rank.slot, world_size=SIZE)
    others = [slot for slot in range(SIZE) if slot != rank.slot]
    leaving = [Parcel(peer=peer, tensor=one, arriving=False) for peer in others for one in sent(rank.slot, peer)]
    arriving = [
        Parcel(peer=peer, tensor=one.to("meta"), arriving=True) for peer in others for one in sent(peer, rank.slot)
    ]
    Exchange([*leaving, *arriving], lambda slot: slot, torch.device("cpu")).wait()
    wanted = [one for peer in others for one in sent(peer, rank.slot)]
    dist.destroy_process_group()
    return [torch.equal(parcel.tensor, one) for parcel, one in zip(arriving, wanted, strict=True) if one.numel()]


def test_each_rank_receives_the_tensors_sent_to_it():
    with Ranks(SIZE, play) as ranks:
        outcomes = ranks.wait()
    for right in outcomes.values():
        assert len(right) == (SIZE - 1) * (len(SHAPES) - 1) * len(DTYPES)
        assert all(right)
