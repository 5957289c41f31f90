"""A wait on any operation is left when a break-out comes, also where gloo has lost the operation; and an operation that
was waited for keeps nothing alive, and has no backend replaced."""

import functools
import itertools
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d

from ntp_plugin.comm import process_groups, waits
from ntp_plugin.comm.operations import POINT_TO_POINT
from ntp_plugin.comm.process_groups import ElasticGroups
from ntp_plugin.errors import PeerLost
from ntp_plugin.testing.ranks import Ranks

SIZE = 2
LOOKS = 10
OPERATIONS = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(4)),
    "reduce_scatter": lambda: dist.reduce_scatter(torch.ones(2), [torch.ones(2), torch.ones(2)]),
    "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(4)),
    "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.ones(8), torch.ones(4)),
    "recv": lambda: dist.recv(torch.ones(4), 1 - dist.get_rank()),
}


def attached(rank):
    groups = ElasticGroups(rank.slot)
    groups.attach()
    store = PrefixStore("world", TCPStore("127.0.0.1", rank.port, None, False))
    dist.init_process_group("gloo", store=store, rank=rank.slot, world_size=SIZE)
    return groups


def wait_for_who_never_comes(rank, name, spoilt=frozenset()):
    """The seconds from the break-out to its end; the connections stay whole, as if gloo had lost the operation."""
    process_groups.WAIT_WHOLE -= spoilt
    groups = attached(rank)
    dist.barrier()
    if rank.slot:
        rank.reached("first", 1)
        time.sleep(3.0)
        return None
    groups._connections.shut = lambda: 0
    at = []

    def break_out():
        time.sleep(0.3)
        at.append(time.monotonic())
        groups.break_out(1)

    threading.Thread(target=break_out).start()
    with pytest.raises(PeerLost):
        OPERATIONS[name]()
    took = time.monotonic() - at[0]
    return took, name == "recv" or groups._groups[0].busy()


@pytest.mark.parametrize("name", OPERATIONS)
def test_it_is_left_when_the_membership_changes(name):
    with Ranks(SIZE, functools.partial(wait_for_who_never_comes, name=name)) as ranks:
        took, busy = ranks.wait(30)[0]
    assert took < 1.0
    assert busy, "the backend has it still, and is to be replaced"


def test_a_reduce_scatter_that_was_waited_for_in_slices_would_not_be():
    """As it was once: its work knows no time limit."""
    play = functools.partial(wait_for_who_never_comes, name="reduce_scatter_tensor", spoilt={"reduce_scatter_single"})
    with pytest.raises(TimeoutError, match="slot 0 did not finish within 2"), Ranks(SIZE, play) as ranks:
        ranks.wait(2)


def wait_for_who_comes_when_it_was_looked_often(rank, longest_s=None):
    """The seconds between one look, whether a break-out is under way, and the next."""
    if longest_s is not None:
        waits._LONGEST_S = longest_s
    groups, store = attached(rank), c10d._get_default_store()
    dist.barrier()
    looked, look = [], groups._waits._leave_if_lost

    def look_and_tell():
        looked.append(time.monotonic())
        if len(looked) == LOOKS:
            store.set("looked often", b"")
        look()

    groups._waits._leave_if_lost = look_and_tell
    if rank.slot:
        store.wait(["looked often"])
    dist.all_reduce(torch.ones(4))
    return [after - before for before, after in itertools.pairwise(looked)]


@pytest.mark.parametrize(("longest_s", "seldom"), [(None, True), (0.02, False)])
def test_a_long_wait_looks_seldom(longest_s, seldom):
    """A slice that runs out costs time of a processor; the second row is as it was once."""
    play = functools.partial(wait_for_who_comes_when_it_was_looked_often, longest_s=longest_s)
    with Ranks(SIZE, play) as ranks:
        between = ranks.wait(30)[0]
    assert len(between) >= LOOKS - 1
    assert (min(between) >= 0.09) == seldom


def do_it_often(rank, name):
    groups = attached(rank)
    for _ in range(50):
        OPERATIONS[name]()
    dist.barrier()
    (group,) = groups._groups
    found = group.busy(), len(groups._waits._works)
    groups.detach()
    return found


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in POINT_TO_POINT])
def test_one_that_was_waited_for_keeps_nothing(name):
    with Ranks(SIZE, functools.partial(do_it_often, name=name)) as ranks:
        for busy, kept in ranks.wait(30).values():
            assert (busy, kept) == (False, 0)


def start_and_never_wait(rank):
    groups = attached(rank)
    for _ in range(100):
        dist.all_reduce(torch.ones(4), async_op=True)
    kept = len(groups._waits._works)
    for _ in range(20):
        dist.barrier()
    return kept, len(groups._waits._works)


def test_one_that_nobody_waits_for_is_let_go_when_it_is_over():
    with Ranks(SIZE, start_and_never_wait) as ranks:
        for before, after in ranks.wait(30).values():
            assert before > 0
            assert after == 0
