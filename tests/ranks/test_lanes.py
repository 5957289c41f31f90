"""Groups that live for one epoch: they connect, sum, and leave nothing behind."""

import time

import torch
import torch.distributed as dist

from ntp_plugin.recovery.elastic_rank import ElasticRank
from ntp_plugin.testing.leaks import held
from ntp_plugin.testing.ranks import Ranks

CYCLES, WARM_UP = 20, 3
LANES = [(0, 1, 2), (2, 1), (0,), (1, 2), (0, 2)]


def make_and_drop(rank):
    """Make lanes again and again; returns the sums over the last ones, and what the process held after each cycle."""
    elastic = ElasticRank(rank.place)
    groups, seen = elastic.groups, []
    for _ in range(CYCLES):
        handles = groups.make_lanes(LANES, timeout_s=5.0)
        sums = []
        for handle in handles:
            value = torch.tensor([10.0**rank.slot])
            if handle is not None:
                dist.all_reduce(value, group=handle)
            sums.append(value.item() if handle is not None else None)
        ranks = [dist.get_process_group_ranks(handle) if handle is not None else None for handle in handles]
        del handle, handles
        groups.addresses()  # what a recovery begins with
        seen.append(held(groups)[:2])
    dist.barrier()
    groups.detach()
    return sums, ranks, seen


def test_lanes_reduce_among_their_slots_and_leave_nothing_behind():
    with Ranks(3, make_and_drop) as running:
        outcomes = running.wait()
    expected = [111.0, 110.0, None, 110.0, 101.0]
    for slot, (sums, ranks, seen) in outcomes.items():
        members = [slot in slots and len(slots) > 1 for slots in LANES]
        assert sums == [value if here else None for value, here in zip(expected, members, strict=True)]
        assert ranks == [list(slots) if here else None for slots, here in zip(LANES, members, strict=True)]
        assert len(set(seen[WARM_UP:])) == 1, f"threads and descriptors of slot {slot} changed: {seen}"


CONNECT_S = 0.5


def receive_late(rank):
    """Return what this rank received in a lane, later than the lane's members had time to connect."""
    elastic = ElasticRank(rank.place)
    (lane,) = elastic.groups.make_lanes([(1, 0)], timeout_s=CONNECT_S)  # no group of the world
    value, peer = torch.full((4,), float(rank.slot)), 1 - rank.slot
    if rank.slot:
        time.sleep(3 * CONNECT_S)  # a stage that computes
        dist.send(value, peer, group=lane)
        dist.recv(value, peer, group=lane)
    else:
        dist.recv(value, peer, group=lane)
        dist.send(value, peer, group=lane)
    elastic.groups.detach()
    return value.tolist()


def test_a_receive_may_wait_longer_than_the_members_of_a_group_had_to_connect():
    """Gloo gives the connections of an edited group the time limit of the edit."""
    with Ranks(2, receive_late) as running:
        assert running.wait() == {0: [1.0] * 4, 1: [1.0] * 4}
