"""Which samples a replica computes: all of each batch, nothing twice; a nominal replica computes its usual ones."""

import functools
import itertools

from hypothesis import given
from hypothesis import strategies as st

from ntp_plugin.config.sections import BatchPolicy
from ntp_plugin.planning.batch_split import NominalBatch, ReplicaPace, split_batch
from ntp_plugin.training.samples import ReplicaSamples


def samples(paces, nominal, *, consumed=0, steps=2, splits=1):
    split = split_batch({r: ReplicaPace(ns=ns, splits=splits) for r, ns in enumerate(paces)}, nominal, BatchPolicy())
    available = consumed + steps * nominal.total * nominal.micro_batch + 1
    return [
        ReplicaSamples(batch_at=functools.partial(the_same, nominal, share), consumed=consumed, available=available)
        for share in split.shares
    ]


def the_same(nominal, share, _consumed):
    return nominal, share


@given(st.lists(st.integers(10, 40), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 99))
def test_every_step_consumes_the_next_global_batch(paces, per_replica, micro_batch, consumed):
    nominal = NominalBatch(
        replicas=len(paces), per_replica=per_replica, micro_batch=micro_batch, stages=1, healthy_ns=10
    )
    found = [list(replica) for replica in samples(paces, nominal, consumed=consumed)]
    size = nominal.total * micro_batch
    for step in range(2):
        used = []
        for replica in found:
            count = len(replica) // 2
            used += [index for batch in replica[step * count : (step + 1) * count] for index in batch]
        assert sorted(used) == list(range(consumed + step * size, consumed + (step + 1) * size))


def test_a_nominal_replica_gets_megatrons_samples():
    """One micro-batch to each replica in turn."""
    nominal = NominalBatch(replicas=2, per_replica=2, micro_batch=2, stages=1, healthy_ns=10)
    first, second = samples([10, 10], nominal, steps=1)
    assert list(first) == [[0, 1], [4, 5]]
    assert list(second) == [[2, 3], [6, 7]]


def test_a_split_nominal_micro_batch_has_the_same_samples():
    nominal = NominalBatch(replicas=2, per_replica=2, micro_batch=4, stages=1, healthy_ns=10)
    first, second = samples([10, 10], nominal, steps=1, splits=2)
    assert list(first) == [[0, 1], [2, 3], [8, 9], [10, 11]]
    assert list(second) == [[4, 5], [6, 7], [12, 13], [14, 15]]


@given(st.lists(st.integers(10, 40), min_size=1, max_size=4), st.lists(st.integers(1, 4), min_size=2, max_size=5))
def test_each_step_consumes_its_own_batch_if_batches_change(paces, sizes):
    """A loader reads ahead, so the sampler asks for the batch of each step by the samples before it."""
    steps, end = {}, 3
    for per_replica in sizes:
        nominal = NominalBatch(replicas=len(paces), per_replica=per_replica, micro_batch=2, stages=1, healthy_ns=10)
        split = split_batch({r: ReplicaPace(ns=ns) for r, ns in enumerate(paces)}, nominal, BatchPolicy())
        steps[end] = nominal, split.shares
        end += nominal.total * nominal.micro_batch
    used = {start: [] for start in steps}
    for replica in range(len(paces)):
        shares = {start: (nominal, shares[replica]) for start, (nominal, shares) in steps.items()}
        shares[end] = shares[3]  # the data set has ended, whatever comes next
        batches = iter(ReplicaSamples(batch_at=shares.__getitem__, consumed=3, available=end))
        for start in steps:
            used[start] += [index for batch in itertools.islice(batches, shares[start][1].count) for index in batch]
        assert not list(batches)
    for start, stop in itertools.pairwise((*steps, end)):
        assert sorted(used[start]) == list(range(start, stop))
