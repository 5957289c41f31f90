"""What the collectives of a joining rank return before it is admitted."""

import torch
import torch.distributed as dist

from ntp_plugin.recovery.joining import Alone


def alone(name):
    (replacement,) = (one for one in Alone().table() if one.target == f"torch.distributed:{name}")
    return replacement.make(getattr(dist, name))


def test_a_caller_that_waits_gets_a_handle():
    """As `deepspeed.zero.GatheredParameters(modifier_rank=0)` does, with which transformers loads a model."""
    tensor = torch.ones(2)
    for handle in (
        alone("broadcast")(tensor, 0, async_op=True),
        alone("all_reduce")(tensor, async_op=True),
        alone("barrier")(async_op=True),
        alone("broadcast")(tensor, 0, None, True),
    ):
        assert handle.wait()
        assert handle.is_completed()
    assert tensor.tolist() == [1, 1]


def test_other_callers_get_nothing():
    assert alone("all_reduce")(torch.ones(2)) is None
    assert alone("broadcast")(torch.ones(2), 0) is None
    assert alone("broadcast_object_list")([1], src=0) is None
