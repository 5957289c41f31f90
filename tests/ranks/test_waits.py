"""A wait on any operation is interrupted, also if gloo has lost the operation; a finished operation keeps
nothing alive, and replaces no backend."""

import functools
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d

from ntp_plugin.errors import PeerLost
from ntp_plugin.groups import process_groups, waits
from ntp_plugin.groups.operations import POINT_TO_POINT
from ntp_plugin.groups.process_groups import ElasticGroups
from ntp_plugin.testing.ranks import Ranks
from tests.patience import PATIENCE_S

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


def wait_for_an_absent_rank(rank, name, spoilt=frozenset()):
    """Return whether the backend still has the operation after the interrupt; the connections stay open, as if gloo had
    lost the operation."""
    process_groups.WAIT_WHOLE -= spoilt
    groups, store = attached(rank), c10d._get_default_store()
    dist.barrier()
    if rank.slot:
        rank.reached("first", 1)
        store.wait(["left"], timedelta(seconds=PATIENCE_S))  # and never comes
        return None
    groups._connections.shut = lambda: 0

    def interrupt():
        time.sleep(0.3)
        groups.interrupt(1)
        rank.write([["interrupted"]])

    threading.Thread(target=interrupt).start()
    with pytest.raises(PeerLost):
        OPERATIONS[name]()
    store.set("left", b"")
    return name == "recv" or groups._groups[0].busy()


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_wait_is_interrupted_when_the_membership_changes(name):
    with Ranks(SIZE, functools.partial(wait_for_an_absent_rank, name=name)) as ranks:
        busy = ranks.wait()[0]
    assert busy, "the backend has it still, and is to be replaced"


def test_a_reduce_scatter_waited_for_in_slices_is_not_interrupted():
    """The earlier behaviour: its work has no time limit."""
    play = functools.partial(wait_for_an_absent_rank, name="reduce_scatter_tensor", spoilt={"reduce_scatter_single"})
    with pytest.raises(TimeoutError, match="slot 0 did not finish within 2"), Ranks(SIZE, play) as ranks:
        ranks.wait_for_rows(1, "interrupted")
        ranks.wait(2)


def wait_until_polled_often(rank, longest_s=None):
    """The time limit of each slice of the wait, in seconds: after each slice the wait checks for an interrupt."""
    if longest_s is not None:
        waits._LONGEST_S = longest_s
    groups, store = attached(rank), c10d._get_default_store()
    dist.barrier()
    slices, wait = [], groups._waits._original

    def recording_wait(work, *limit):
        slices.extend(each.total_seconds() for each in limit)
        if len(slices) == LOOKS:
            store.set("looked often", b"")
        return wait(work, *limit)

    groups._waits._original = recording_wait
    if rank.slot:
        store.wait(["looked often"])
    dist.all_reduce(torch.ones(4))
    return slices


@pytest.mark.parametrize(("longest_s", "seldom"), [(None, True), (0.02, False)])
def test_a_long_wait_polls_rarely(longest_s, seldom):
    """A slice that runs out costs time of a processor; the second row is as it was once."""
    play = functools.partial(wait_until_polled_often, longest_s=longest_s)
    with Ranks(SIZE, play) as ranks:
        slices = ranks.wait()[0]
    assert len(slices) >= LOOKS
    assert (min(slices) >= 0.1) == seldom


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
def test_a_finished_work_keeps_no_references(name):
    with Ranks(SIZE, functools.partial(do_it_often, name=name)) as ranks:
        for busy, kept in ranks.wait().values():
            assert (busy, kept) == (False, 0)


def start_and_never_wait(rank):
    groups = attached(rank)
    for _ in range(100):
        dist.all_reduce(torch.ones(4), async_op=True)
    kept = len(groups._waits._works)
    for _ in range(20):
        dist.barrier()
    return kept, len(groups._waits._works)


def test_an_unawaited_work_is_freed_when_it_is_done():
    with Ranks(SIZE, start_and_never_wait) as ranks:
        for before, after in ranks.wait().values():
            assert before > 0
            assert after == 0
