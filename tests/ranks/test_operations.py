"""The plugin sees every operation of torch.distributed, as torch's own hooks do, and nothing of groups that it does not
watch."""

import functools

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ntp_plugin.groups import operations
from ntp_plugin.groups.operations import POINT_TO_POINT, Operations, kind_of_device, methods
from ntp_plugin.testing.ranks import Ranks

HOOK = 0x7E58
SIZE = 2


def all_there_is():
    """Name -> a call of it, for a world of two."""
    rank, other = dist.get_rank(), 1 - dist.get_rank()

    def one():
        return torch.ones(2)

    def of_all():
        return [one() for _ in range(SIZE)]

    def only_first(value):
        return value if rank == 0 else None

    def coalesced():
        with dist._coalescing_manager(async_ops=True) as under_way:
            dist.all_reduce(one())
            dist.all_reduce(one())
        under_way.wait()

    def in_a_batch():
        sent, received = dist.P2POp(dist.isend, one(), other), dist.P2POp(dist.irecv, one(), other)
        for work in dist.batch_isend_irecv([sent, received]):
            work.wait()

    def from_anybody():
        if rank:
            dist.send(one(), 0)
        else:
            dist.recv(one())

    return {
        "all_reduce": lambda: dist.all_reduce(one()),
        "all_reduce async": lambda: dist.all_reduce(one(), async_op=True).wait(),
        "all_reduce_coalesced": lambda: dist.all_reduce_coalesced([one(), one()]),
        "coalescing manager": coalesced,
        "broadcast": lambda: dist.broadcast(one(), 0),
        "broadcast_object_list": lambda: dist.broadcast_object_list([rank], 0),
        "reduce": lambda: dist.reduce(one(), 0),
        "all_gather": lambda: dist.all_gather(of_all(), one()),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.ones(2 * SIZE), one()),
        "all_gather_object": lambda: dist.all_gather_object([None] * SIZE, rank),
        "gather": lambda: dist.gather(one(), only_first(of_all()), dst=0),
        "gather_object": lambda: dist.gather_object(rank, only_first([None] * SIZE), dst=0),
        "scatter": lambda: dist.scatter(one(), only_first(of_all()), src=0),
        "scatter_object_list": lambda: dist.scatter_object_list([None], only_first([1] * SIZE), src=0),
        "reduce_scatter": lambda: dist.reduce_scatter(one(), of_all()),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(one(), torch.ones(2 * SIZE)),
        "all_to_all_single": lambda: dist.all_to_all_single(one(), one()),
        "barrier": dist.barrier,
        "batch_isend_irecv": in_a_batch,
        "recv from anybody": from_anybody,
    }


def count_both_ways(rank, missed=""):
    """Call -> the operations that torch's hook reported, those that we saw, and how many works are the same."""
    seen, hooked = [], []
    operations.methods = lambda: [name for name in methods() if name != missed]
    watching = Operations()
    watching.attach()
    store = PrefixStore("world", TCPStore("127.0.0.1", rank.port, None, False))
    dist.init_process_group("gloo", store=store, rank=rank.slot, world_size=SIZE)
    beside = dist.new_group([0, 1])
    watching.observe(dist.group.WORLD, lambda name, work, given: seen.append((name, work, kind_of_device(given))))
    dist.group.WORLD.register_post_hook(HOOK, lambda operation: hooked.append(operation.work))
    found = {}
    for call, work in all_there_is().items():
        seen.clear(), hooked.clear()
        work()
        dist.all_reduce(torch.ones(1), group=beside)
        same = [mine is theirs for (_, mine, _), theirs in zip(seen, hooked, strict=False)]
        found[call] = len(hooked), len(seen), sum(same), sorted({(name, device) for name, _, device in seen})
    watching.detach()
    dist.all_reduce(torch.ones(1))
    found["after it"] = len(hooked) - found["recv from anybody"][0], len(seen) - found["recv from anybody"][1]
    dist.destroy_process_group()
    return found


def test_every_operation_of_torchs_hook_is_seen():
    by_name = set()
    with Ranks(SIZE, count_both_ways) as ranks:
        for found in ranks.wait().values():
            assert found.pop("after it") == (1, 0)
            for call, (hooked, seen, same, names) in found.items():
                assert hooked == seen == same > 0, call
                assert all(name in methods() for name, _ in names), call
                assert {device for _, device in names} == ({None} if call == "barrier" else {"cpu"}), call
                by_name.update(name for name, _ in names)
    assert by_name >= POINT_TO_POINT


def test_a_method_that_is_not_replaced_is_missed():
    """The comparison above can fail."""
    with Ranks(SIZE, functools.partial(count_both_ways, missed="broadcast")) as ranks:
        hooked, seen, _, _ = ranks.wait()[0]["broadcast"]
    assert (hooked, seen) == (1, 0)


def test_method_signatures_are_available():
    assert {"allreduce", "broadcast", "barrier", *POINT_TO_POINT} <= {*methods()}
    assert "reconfigure" not in methods()
