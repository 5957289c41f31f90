import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ntp_plugin.config.sections import BatchPolicy
from ntp_plugin.errors import Refused
from ntp_plugin.planning import spans as sp
from ntp_plugin.planning.batch_split import NominalBatch, ReplicaPace, one_for_each, split_batch
from tests.unit import properties
from tests.unit.properties import each

HEALTHY = 1000


@st.composite
def batches(draw, max_replicas=4, max_each=4):
    """(paces of the surviving replicas, the nominal batch): few enough for brute force."""
    replicas = draw(st.integers(1, max_replicas))
    nominal = NominalBatch(
        replicas=replicas,
        per_replica=draw(st.integers(1, max_each)),
        micro_batch=4,
        stages=draw(st.integers(1, 4)),
        healthy_ns=HEALTHY,
    )
    going_on = draw(st.sets(st.integers(0, replicas - 1), min_size=1))
    pace = st.builds(ReplicaPace, ns=st.integers(500, 3000), splits=st.sampled_from([1, 1, 2, 4]))
    return {replica: draw(pace) for replica in sorted(going_on)}, nominal


def computed_micro_batches(split):
    return sum(sp.size(share.kept) + sp.size(share.dealt) for share in split.shares)


@given(batches())
def test_strict_is_exact_disjoint_complete_and_never_worse_than_any_integer_split(batch):
    properties.strict_split_is_exact_and_the_shortest(*batch)


@given(batches(8, 40), st.floats(0, 0.5))
def test_trim_drops_at_most_epsilon_and_is_never_slower_than_strict(batch, epsilon):
    paces, nominal = batch
    strict = split_batch(paces, nominal, BatchPolicy())
    trimmed = split_batch(paces, nominal, BatchPolicy(mode="trim", epsilon=epsilon))
    assert sp.size(trimmed.left_out) <= epsilon * nominal.total
    assert trimmed.step_ns <= strict.step_ns
    assert not trimmed.left_out or trimmed.step_ns < strict.step_ns, "nothing is left out for nothing"
    held = each(trimmed.left_out) + [n for share in trimmed.shares for n in each(share.kept) + each(share.dealt)]
    assert sorted(held) == list(range(nominal.total))


@given(batches(8, 40), st.floats(0, 0.5), st.integers(1, 30))
def test_carry_repays_everything_and_never_owes_more_than_epsilon(batch, epsilon, steps):
    paces, nominal = batch
    policy, owed, left, repaid = BatchPolicy(mode="carry", epsilon=epsilon), 0, 0, 0
    for _ in range(steps):
        split = split_batch(paces, nominal, policy, owed=owed)
        assert computed_micro_batches(split) == split.computed
        left, repaid = left + sp.size(split.left_out), repaid + split.repaid
        owed = split.owed
        assert owed == left - repaid
        assert 0 <= owed <= epsilon * nominal.total
    whole = {replica: ReplicaPace(ns=HEALTHY) for replica in range(nominal.replicas)}
    settled = split_batch(whole, nominal, policy, owed=owed)
    assert settled.repaid == owed
    assert settled.owed == 0
    assert {n for share in settled.shares for n in each(share.dealt)} >= set(range(nominal.total, nominal.total + owed))


@given(batches(8, 40))
def test_shrink_never_exceeds_the_nominal_step_nor_a_replicas_nominal_share(batch):
    paces, nominal = batch
    try:
        split = split_batch(paces, nominal, BatchPolicy(mode="shrink"))
    except Refused:
        assert all(pace.most_within(split_nominal(nominal), nominal.stages) == 0 for pace in paces.values())
        return
    assert split.step_ns <= split.nominal_ns
    assert all(sp.size(share.kept) <= nominal.per_replica for share in split.shares)
    assert all(sp.size(share.kept) + sp.size(share.dealt) <= nominal.per_replica for share in split.shares)


def split_nominal(nominal):
    return ReplicaPace(ns=nominal.healthy_ns).step_ns(nominal.per_replica, nominal.stages)


@pytest.mark.parametrize(
    ("per_replica", "mode", "steps", "left_out"),
    [(16, "strict", 17, 0), (64, "strict", 65, 0), (16, "trim", 16, 2), (16, "shrink", 16, 2)],
)
def test_tp8_to_7_in_one_of_64_replicas_costs_the_computed_share(per_replica, mode, steps, left_out):
    """Strict loses 1/17 = 5.9 % at 16 micro-batches and 1/65 = 1.5 % at 64; leaving 2 of 1,024 out loses no time."""
    paces = dict.fromkeys(range(64), ReplicaPace(ns=7000)) | {5: ReplicaPace(ns=8000)}
    nominal = NominalBatch(replicas=64, per_replica=per_replica, micro_batch=1, stages=1, healthy_ns=7000)
    split = split_batch(paces, nominal, BatchPolicy(mode=mode, epsilon=0.01))
    assert split.step_ns == steps * 7000
    assert sp.size(split.left_out) == left_out


def test_a_replica_may_be_so_slow_that_it_gets_nothing():
    paces = {0: ReplicaPace(ns=1000), 1: ReplicaPace(ns=1_000_000)}
    nominal = NominalBatch(replicas=2, per_replica=2, micro_batch=1, stages=1, healthy_ns=1000)
    assert [share.count for share in split_batch(paces, nominal, BatchPolicy()).shares] == [4, 0]


def test_splits_that_do_not_divide_a_micro_batch_are_refused():
    nominal = NominalBatch(replicas=1, per_replica=2, micro_batch=4, stages=1, healthy_ns=1000)
    with pytest.raises(Refused, match="replica 0 cannot run a micro-batch of 4 samples in 3 equal splits"):
        split_batch({0: ReplicaPace(ns=1, splits=3)}, nominal, BatchPolicy())


@given(st.dictionaries(st.integers(0, 9), st.integers(0, 6), min_size=1))
def test_one_micro_batch_for_each_replica_deals_no_more_than_needed(counts):
    """Every micro-batch once, no replica without, and only the one with most gives."""
    assume(sum(counts.values()) >= len(counts))
    numbers = iter(range(100))
    shares = {replica: [next(numbers) for _ in range(count)] for replica, count in counts.items()}
    found = one_for_each(shares)
    assert sorted(number for given in found.values() for number in given) == list(range(sum(counts.values())))
    for replica, had in shares.items():
        assert found[replica]
        if had:
            assert found[replica] == had[: len(found[replica])]
        else:
            assert len(found[replica]) == 1


def test_a_replica_with_fewer_stages_has_a_shorter_pipeline_to_fill():
    nominal = NominalBatch(replicas=2, per_replica=8, micro_batch=1, stages=4, healthy_ns=HEALTHY)
    whole, alone = ReplicaPace(ns=HEALTHY), ReplicaPace(ns=4 * HEALTHY, without=3)
    assert [pace.step_ns(8, nominal.stages) for pace in (whole, alone)] == [11 * HEALTHY, 32 * HEALTHY]
    split = split_batch({0: whole, 1: alone}, nominal, BatchPolicy())
    assert [share.count for share in split.shares] == [12, 4]
    assert split.step_ns == 16 * HEALTHY
    assert split.ideal_ns <= split.step_ns
    assert alone.cut(2).without == 3
