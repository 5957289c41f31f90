import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ntp_plugin.errors import BelowMinimum, Refused
from ntp_plugin.planning.batch_split import ReplicaPace
from ntp_plugin.planning.memory_fit import AS_IS, SMALLER, fit
from ntp_plugin.planning.pace import HEALTHY_NS
from ntp_plugin.planning.recovery_plan import Nominal, as_json, plan_recovery, within_memory
from ntp_plugin.planning.topology import parse_slots
from tests.unit import properties
from tests.unit.strategies import jobs, losses, make_job


@st.composite
def unsharded_losses(draw):
    job = draw(jobs())
    nominal = Nominal.of(make_job(**_tables(job, state={})))
    return nominal, draw(losses(nominal))


def _tables(job, **changed):
    names = ("parallel", "model", "batch", "state")
    tables = {
        name: {k: v for k, v in dataclasses.asdict(getattr(job, name)).items() if v is not None} for name in names
    }
    ntp = {"min_tp_width": job.ntp.min_tp_width, "granule": 1, "route": job.ntp.route, "copies": {"count": 0}}
    return tables | {"ntp": ntp} | changed


@given(unsharded_losses(), st.data())
def test_losses_in_any_order_give_the_same_plan_and_digest(case, data):
    nominal, lost = case
    orders = [data.draw(st.permutations(sorted(lost))) for _ in range(3)]
    properties.same_losses_same_plan(nominal, lost, orders)


@given(unsharded_losses())
def test_lose_then_return_is_the_identity(case):
    properties.lose_then_return_is_the_identity(*case)


@given(unsharded_losses(), st.data())
@settings(max_examples=40)
def test_a_plan_depends_only_on_the_lost_slots_and_not_on_their_order(case, data):
    nominal, lost = case
    first = frozenset(data.draw(st.sets(st.sampled_from(sorted(lost))))) if lost else frozenset()
    at_once, in_two = plan_recovery(nominal, lost=lost), plan_recovery(nominal, lost_before=first, lost=lost)
    assert at_once.routes == in_two.routes
    assert at_once.batch == in_two.batch
    assert at_once.dropped == in_two.dropped


def test_a_context_group_that_shares_a_sequence_among_fewer_runs_fewer_micro_batches():
    """Two groups of four; the first has two replicas left, which take twice as long for a micro-batch."""
    parallel = {"tp": 1, "cp": 4, "dp": 2}
    nominal = Nominal.of(make_job(parallel=parallel, model=SMALL, batch={"global_batch": 24}, ntp=UNCOPIED))
    plan = plan_recovery(nominal, lost=parse_slots(["r1"], nominal.topology))
    assert [(share.replica, share.count) for share in plan.batch.shares] == [(0, 8), (1, 16)]
    assert (plan.dropped, [str(slot) for slot in plan.idle]) == ((1, 3), ["r3.s0.t0"])


def test_a_context_group_without_a_replica_computes_nothing():
    parallel = {"tp": 1, "cp": 2, "dp": 2}
    nominal = Nominal.of(make_job(parallel=parallel, model=SMALL, batch={"global_batch": 4}, ntp=UNCOPIED))
    plan = plan_recovery(nominal, lost=parse_slots(["r0", "r1"], nominal.topology))
    assert [(share.replica, share.count) for share in plan.batch.shares] == [(1, 4)]


SMALL = {"layers": 1, "hidden": 8, "heads": 4, "ffn": 8, "vocab": 16}
UNCOPIED = {"copies": {"count": 0}}


def eight_by_two(*, seq=4096, **tables):
    return Nominal.of(
        make_job(
            parallel={"tp": 4, "pp": 2, "dp": 4, "gpus_per_node": 4},
            model={"layers": 2, "hidden": 64, "heads": 8, "ffn": 256, "vocab": 1000, "seq": seq},
            **tables,
        )
    )


def test_equal_losses_in_different_replicas_give_equal_layouts_and_share_lanes():
    nominal = eight_by_two()
    one = plan_recovery(nominal, lost=parse_slots(["r1.s0.t2"], nominal.topology))
    two = plan_recovery(nominal, lost=parse_slots(["r1.s0.t2", "r3.s0.t2"], nominal.topology))
    assert [lane.units for lane in one.routes[0].lanes.lanes] == [lane.units for lane in two.routes[0].lanes.lanes]
    assert all(
        {tp for _, tp in lane.detours} <= {lane.detours[0][1]} for lane in two.routes[0].lanes.lanes if lane.detours
    )


def test_different_facts_have_different_digests():
    nominal = eight_by_two()
    losses_ = [
        parse_slots(words, nominal.topology) for words in ([], ["r1.s0.t2"], ["r1.s0.t3"], ["r2.s0.t2"], ["r1.s1.t2"])
    ]
    digests = [plan_recovery(nominal, lost=lost).digest for lost in losses_]
    digests.append(plan_recovery(eight_by_two(ntp={"min_tp_width": 2}), lost=losses_[1]).digest)
    assert len(set(digests)) == len(digests)


def test_a_replica_below_the_minimum_width_is_dropped_and_its_living_slots_are_idle():
    nominal = eight_by_two(ntp={"min_tp_width": 3})
    plan = plan_recovery(nominal, lost=parse_slots(["r1.s0.t0", "r1.s0.t1", "r2.s1.t3"], nominal.topology))
    assert plan.dropped == (1,)
    assert plan.degraded == (2,)
    assert len(plan.idle) == 6
    assert {share.replica for share in plan.batch.shares} == {0, 2, 3}
    assert not any(move.target.replica == 1 for move in plan.transfers)


def test_a_plan_without_replicas_is_refused_with_the_numbers():
    nominal = eight_by_two(ntp={"min_tp_width": 4})
    lost = parse_slots([f"r{replica}.s1.t{replica}" for replica in range(4)], nominal.topology)
    with pytest.raises(BelowMinimum, match="best of 4 has a stage with 3 of 4 TP slots, and min_tp_width is 4"):
        plan_recovery(nominal, lost=lost)


def test_a_measured_pace_overrules_the_one_that_widths_suggest():
    nominal = eight_by_two()
    lost = parse_slots(["r1.s0.t2"], nominal.topology)
    guessed = plan_recovery(nominal, lost=lost)
    slow = plan_recovery(nominal, lost=lost, measured={0: ReplicaPace(ns=3 * HEALTHY_NS)})
    counts = [[share.count for share in plan.batch.shares] for plan in (guessed, slow)]
    assert sum(counts[0]) == sum(counts[1]) == 64
    assert counts[1][0] < counts[1][1] < counts[0][0]
    assert guessed.transfers == slow.transfers
    assert guessed.digest != slow.digest


@pytest.mark.parametrize("gb", [None, 0.002])
def test_another_global_batch_is_split_as_by_a_plan_of_its_own(gb):
    """In one layout; with a memory limit, in micro-batches of the same size."""
    hardware = {} if gb is None else {"hardware": {"gpu_memory_gb": gb}, "seq": 128}
    sizes = {size: eight_by_two(batch={"micro_batch": 4, "global_batch": size}, **hardware) for size in (64, 160)}
    lost = parse_slots(["r1.s0.t2", "r2.s1.t0"], sizes[64].topology)
    plans = {size: plan_recovery(nominal, lost=lost) for size, nominal in sizes.items()}
    assert plans[160].split_of(64) == plans[64].batch != plans[160].batch == plans[160].split_of(160)


LOST = ("r1.s0.t2",)
FOURS = {"micro_batch": 4, "global_batch": 64}


def limited(gb, **tables):
    return eight_by_two(seq=128, hardware={"gpu_memory_gb": gb}, batch=FOURS, **tables)


def bytes_of(nominal, pattern, rung):
    """The guard's bytes of the first stage, which has the most micro-batches in flight."""
    tried = fit(
        nominal.training, 0, nominal.topology.tp, pattern, limit=0, replicas=4, packing=True, rungs=(AS_IS, SMALLER)
    )
    return tried[rung].bytes


def shares(nominal, words=LOST):
    plan = plan_recovery(nominal, lost=parse_slots(words, nominal.topology))
    return [(share.count, share.size) for share in plan.batch.shares]


def between(nominal, pattern, rung):
    """GB in which that rung has room, and the one before has not."""
    return (bytes_of(nominal, pattern, rung) + bytes_of(nominal, pattern, rung - 1)) / 2e9


def test_a_degraded_replica_runs_smaller_micro_batches_where_its_memory_is_short():
    roomy = limited(80)
    assert shares(roomy) == [(4, 4), (4, 4), (4, 4), (4, 4)]
    short = limited(between(roomy, (2,), 1))
    assert shares(short) == [(4, 4), (8, 2), (4, 4), (4, 4)]
    shorter = limited(between(roomy, (2,), 2))
    assert shares(shorter) == [(8, 2), (16, 1), (8, 2), (8, 2)], "nominal ones also have the buffers of lanes"
    plans = [plan_recovery(nominal, lost=parse_slots(LOST, roomy.topology)) for nominal in (roomy, short)]
    assert plans[0].digest != plans[1].digest
    assert plans[0].transfers == plans[1].transfers


def test_too_little_memory_is_refused_before_anyone_changes():
    nominal = limited(bytes_of(limited(80), (2,), 2) / 1e9 - 1e-6)
    with pytest.raises(Refused, match=r"stage 0 at TP width 3 does not fit into .* GB per GPU: as is .* higher min_tp"):
        shares(nominal)


def test_a_replica_that_would_not_fit_is_excluded_from_the_start():
    roomy = limited(80)
    assert within_memory(roomy) == roomy
    two_wide = within_memory(limited(bytes_of(roomy, (2, 3), 2) / 1e9 + 1e-6))
    assert two_wide.policy.min_tp_width == 2
    three_wide = within_memory(limited(bytes_of(roomy, (2, 3), 2) / 1e9 - 1e-6))
    assert three_wide.policy.min_tp_width == 3
    assert shares(three_wide, ["r1.s0.t2", "r1.s0.t3"]) == [(6, 4), (5, 4), (5, 4)]
    assert within_memory(limited(80, ntp={"min_tp_width": 3})).policy.min_tp_width == 3


def test_micro_batches_of_a_mean_loss_are_not_split():
    nominal = limited(between(limited(80), (2,), 1))
    assert nominal.guard is not None
    mean = dataclasses.replace(nominal, guard=dataclasses.replace(nominal.guard, smaller=False))
    with pytest.raises(Refused, match=r"stage 0 at TP width 3 does not fit"):
        shares(mean)
    assert within_memory(mean).policy.min_tp_width == 4


def test_a_memory_limit_below_the_nominal_layout_is_refused():
    with pytest.raises(Refused, match=r"at TP width 4 does not fit into 0\.001 GB per GPU: as is 0\.\d+ GB\. Fix"):
        within_memory(limited(0.001))


def test_the_digest_covers_every_field_of_the_plan():
    nominal = eight_by_two()
    plan = plan_recovery(nominal, lost=parse_slots(["r1.s0.t2"], nominal.topology))
    text = as_json(plan)
    assert all(f'"{name}":' in text for name in plan.__dataclass_fields__)
    assert text == as_json(plan_recovery(nominal, lost=parse_slots(["r1.s0.t2"], nominal.topology)))


def test_every_pair_of_losses_in_a_group_gives_a_plan_that_replays():
    nominal = eight_by_two()
    for pair in itertools.combinations(nominal.topology.group(1, 0), 2):
        properties.transfers_turn_one_layout_into_the_next(nominal, frozenset(pair[:1]), frozenset(pair))
        properties.lanes_are_the_owner_tuples(nominal, frozenset(pair))
