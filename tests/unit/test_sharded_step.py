"""A step of an optimizer on shards of lanes with a single member; tests/deepspeed has those with several."""

import torch

from ntp_plugin.copies.slices import TensorSlice
from ntp_plugin.reduction.gradient_lanes import GradientLane, Slice
from ntp_plugin.reduction.sharded_step import ShardedStep
from ntp_plugin.reduction.stepped import shards_of_lanes


def made():
    """Two groups of parameters in half precision; this member has the last two columns of one."""
    a, b = (torch.nn.Parameter(torch.ones(shape).bfloat16()) for shape in ((3, 4), (5,)))
    lane = GradientLane(
        group=None,
        slices=(
            Slice(name="a", dim=1, ranges=((2, 4),), places=((6, 8),)),
            Slice(name="b", dim=0, ranges=((0, 5),), places=((0, 5),)),
        ),
    )
    return a, b, ShardedStep([lane], [{"a": a}, {"b": b}], replicas=4, dtype=torch.float32)


def test_the_gradient_is_the_mean_over_the_present_replicas():
    """The mean has more digits than the parameters, and a member without a gradient adds nothing."""
    a, b, step = made()
    a.grad = torch.full_like(a, 2.0)
    step.sum()
    assert a.grad is None and b.grad is None
    of_a, of_b = step.gradients
    assert of_a.dtype == torch.float32
    assert (of_a.tolist(), of_b.tolist()) == ([0.5] * 6, [0.0] * 5)


def test_stepped_shards_are_gathered_into_the_parameters():
    a, b, step = made()
    a.grad, b.grad = torch.full_like(a, 4.0), torch.full_like(b, 8.0)
    step.sum()
    optimizer = torch.optim.SGD([{"params": step.groups[0], "lr": 1.0}, {"params": step.groups[1], "lr": 0.5}])
    step.step(optimizer.step)
    assert b.tolist() == [1.0] * 5, "until all have it"
    step.spread()
    assert a.tolist() == [[1, 1, 0, 0]] * 3
    assert b.tolist() == [0.0] * 5
    assert all(shard.parameter.grad is None for shard in step)


def test_shards_are_described_by_their_places_in_the_tensor():
    *_, step = made()

    def slice_of(name, places, start, stop):
        return TensorSlice(tensor=name, shape=(3, 8), dim=1, ranges=places, start=start, stop=stop)

    first = shards_of_lanes(step, slice_of)[0]
    ((tensor_slice, at),) = first.tensor_slices
    assert (tensor_slice.tensor, tensor_slice.ranges, tensor_slice.size, at) == ("a", ((6, 8),), 6, 0)
    assert tensor_slice.runs.starts.tolist() == [6, 14, 22]
