"""The packed buffer of a lane is the same on all its members, however each holds it."""

import torch

from ntp_plugin.reduction.gradient_lanes import Slice, pack, unpack

WHOLE = torch.arange(24.0).view(4, 6)


def test_members_with_a_slice_in_different_ranges_pack_the_same_buffer():
    """One has columns 1 to 4 side by side; the other 1 and 2 behind 3 and 4, with others between."""
    together = {"weight": WHOLE[:, 1:5].clone()}
    apart = {"weight": torch.cat([WHOLE[:, 3:5], WHOLE[:, :1], WHOLE[:, 1:3]], 1)}
    one = Slice(name="weight", dim=1, ranges=((0, 4),))
    other = Slice(name="weight", dim=1, ranges=((3, 5), (0, 2)))
    packed = pack([one], together)
    assert torch.equal(packed, pack([other], apart))
    unpack([other], apart, packed + 100)
    assert torch.equal(apart["weight"][:, 3:], WHOLE[:, 1:3] + 100)
    assert torch.equal(apart["weight"][:, :2], WHOLE[:, 3:5] + 100)
    assert torch.equal(apart["weight"][:, 2], WHOLE[:, 0])


def test_unpacking_inverts_packing():
    gradients = {"a": WHOLE.clone(), "b": torch.arange(5.0)}
    slices = [Slice(name="a", dim=0, ranges=((2, 4),)), Slice(name="b", dim=0, ranges=((0, 2), (4, 5)))]
    packed = pack(slices, gradients)
    assert packed.tolist() == [*range(12, 24), 0, 1, 4]
    empty = {"a": torch.zeros(4, 6), "b": torch.zeros(5)}
    unpack(slices, empty, packed)
    assert empty["a"][2:].equal(WHOLE[2:])
    assert empty["b"].tolist() == [0, 1, 0, 0, 4]
