"""NCCL groups survive a loss and a return, on real GPUs."""

import pytest
import torch
import torch.distributed as dist

from ntp_plugin.recovery.elastic_rank import ElasticRank
from ntp_plugin.testing.ranks import Ranks
from ntp_plugin.testing.stateless import Stateless

SIZE = min(4, torch.cuda.device_count())

pytestmark = pytest.mark.skipif(SIZE < 2, reason=f"needs two GPUs, and there are {SIZE}")


def play(rank):
    """All-reduce on the device and on the host while the world is complete, smaller, and complete again."""
    torch.cuda.set_device(rank.slot)
    elastic = ElasticRank(rank.place, backend="cpu:gloo,cuda:nccl")
    groups = elastic.groups
    all_but_first = dist.new_group(list(range(1, SIZE)))
    driver = elastic.drive(Stateless())
    elastic.start()

    def reduce_everywhere():
        sums = []
        for device, group in (("cuda", None), ("cuda", all_but_first), ("cpu", None)):
            if isinstance(group, dist.ProcessGroup) or group is None:
                total = torch.full((1 << 20,), float(rank.slot), device=device)
                dist.all_reduce(total, group=group)
                sums.append(float(total[-1]))
        groups.confirm()
        return len(groups.members), sums

    seen = {}

    def reduce_until(size):
        while True:
            members, sums = driver.run_with_recovery(reduce_everywhere)
            seen.setdefault(members, sums)
            assert seen[members] == sums
            if members == size:
                return

    if not rank.joining:
        reduce_until(SIZE)
        rank.write([["ready", rank.slot]])
        reduce_until(SIZE - 1)
        rank.write([["fewer", rank.slot]])
    reduce_until(SIZE)
    elastic.leave()
    return seen


def test_a_killed_rank_rejoins():
    victim = SIZE - 1
    with Ranks(SIZE, play) as ranks:
        ranks.wait_for_rows(SIZE, "ready")
        ranks.kill(victim)
        ranks.wait_for_rows(SIZE - 1, "fewer")
        ranks.start_again(victim)
        outcomes = ranks.wait()
    assert len(outcomes) == SIZE
    for slot, seen in outcomes.items():
        groups = 2 if slot == 0 else 3
        assert seen[SIZE] == [sum(range(SIZE))] * groups
        assert slot == victim or seen[SIZE - 1] == [sum(range(victim))] * groups
