"""A group with both backends, made and not yet connected: as far as NCCL works without a GPU."""

import functools
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from ntp_plugin.errors import Refused
from ntp_plugin.groups.process_groups import ElasticGroups
from ntp_plugin.testing.ranks import Ranks

pytestmark = pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch was built without NCCL")


def play(rank, environment):
    """The steps of a joining rank before it is regrouped: it makes its groups, and publishes its handles."""
    os.environ.update(environment)
    groups = ElasticGroups(0, joining=True)
    groups.attach()
    groups._device = torch.device("cuda", 3)  # as if it were the current one: without a GPU there is none
    dist.init_process_group("cpu:gloo,cuda:nccl", store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=9))
    world = dist.group.WORLD
    nccl = world._get_backend(torch.device("cuda"))
    (group,) = groups._groups
    found = {
        "class": type(nccl).__name__,
        "editable": nccl.options.enable_reconfigure,
        "device": str(nccl.bound_device_id),
        "device of the world": world.bound_device_id,
        "handling": os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"],
        "reach": {kind: backend.address() for kind, backend in group.backends().items()},
    }
    group.gloo.edit(1, [group.gloo.address()], 5.0)
    total = torch.ones(2)
    work = dist.all_reduce(total, async_op=True)
    seen = id(work) in groups._waits._works
    work.wait()
    return found | {"total": total.tolist(), "seen": seen}


def played(environment):
    with Ranks(1, functools.partial(play, environment=environment)) as ranks:
        return ranks.wait()[0]


def test_it_is_made_to_be_edited():
    found = played({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"})
    assert (found["class"], found["editable"], found["handling"]) == ("ProcessGroupNCCL2", True, "0")
    assert found["reach"]["nccl"].startswith("nccl2:0:-1:")


def test_its_device_is_bound_to_the_backend_but_not_to_the_world():
    """With a device of the world torch would split later groups off it, which takes ranks that may be lost."""
    found = played({})
    assert (found["device"], found["device of the world"]) == ("cuda:3", None)


def test_gloo_is_edited_beside_nccl_and_its_works_are_seen():
    found = played({})
    assert (found["total"], found["seen"]) == ([1.0, 1.0], True)


def test_the_older_class_is_refused():
    with pytest.raises(Refused, match="TORCH_DIST_USE_NCCL2=0"):
        played({"TORCH_DIST_USE_NCCL2": "0"})
