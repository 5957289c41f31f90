"""Shards of lanes with a single member; tests/megatron/test_parity.py has those with several."""

import torch

from ntp_plugin.reduction.gradient_lanes import GradientLane, Slice
from ntp_plugin.reduction.sharded_optimizer import LaneShards


def test_a_shard_is_stepped_in_its_own_precision_and_spread_back():
    weights = {"a": torch.arange(12.0).view(3, 4).bfloat16(), "b": torch.ones(5).bfloat16()}
    lane = GradientLane(
        group=None,
        slices=(Slice(name="a", dim=1, ranges=((1, 3),)), Slice(name="b", dim=0, ranges=((0, 5),))),
    )
    lanes = LaneShards([lane])
    (only_a,) = lanes.shard({"a"}, weights, dtype=torch.float32)
    (only_b,) = lanes.shard({"b"}, weights, dtype=torch.float32)
    assert only_a.parameter.dtype == torch.float32
    assert only_a.parameter.tolist() == [1, 2, 5, 6, 9, 10]
    lanes.begin({name: torch.full_like(weight, 2.0).float() for name, weight in weights.items()}).finish()
    lanes.scale_gradients(0.5)
    with torch.no_grad():
        only_a.parameter -= only_a.gradient
        only_b.parameter += 3 * only_b.gradient
    lanes.begin_spread()
    with torch.no_grad():
        only_a.parameter += 100  # the next step may begin before the parameters of this one are read
    assert weights["a"].tolist() == torch.arange(12.0).view(3, 4).tolist(), "until then they stay as they were"
    lanes.finish_spread()
    assert weights["a"][:, 1:3].tolist() == [[0, 1], [4, 5], [8, 9]]
    assert weights["a"][:, 0].tolist() == [0, 4, 8], "what is in other lanes stays"
    assert weights["b"].tolist() == [4.0] * 5
    lanes.finish_spread()
    assert weights["b"].tolist() == [4.0] * 5, "nothing is on its way any more"
