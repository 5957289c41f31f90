"""Plans of jobs with experts and context groups: pace, memory, batch, who gets which experts, and what is refused."""

import dataclasses
import itertools
from fractions import Fraction

import pytest
from hypothesis import given

from ntp_plugin.errors import BelowMinimum, Refused, StateLost
from ntp_plugin.planning.actions import DROP_REPLICA, REDUCE_TP
from ntp_plugin.planning.decision import decide
from ntp_plugin.planning.expert_groups import NOMINAL_LOAD, groups_of, load_of, replicas_in_step
from ntp_plugin.planning.job_plan import plan
from ntp_plugin.planning.memory_fit import activation_bytes, memory_use
from ntp_plugin.planning.pace import stage_work
from ntp_plugin.planning.recovery_plan import Nominal, plan_recovery
from ntp_plugin.planning.topology import SurvivingReplicas, parse_slots
from tests.unit.strategies import jobs_with_experts, make_job

HIDDEN, SEQ, MOE_FFN = 64, 128, 96
MODEL = {
    **{"layers": 2, "hidden": HIDDEN, "heads": 4, "ffn": 256, "vocab": 512, "vocab_multiple": 1, "seq": SEQ},
    **{"experts": 8, "moe_router_topk": 2, "moe_ffn": MOE_FFN},
}
EXPERT = 3 * HIDDEN * MOE_FFN
UNCOPIED = {"copies": {"count": 0}}


def job(*, tp=1, dp=8, ep=4, batch=64, model=(), ntp=(), **tables):
    parallel = {"tp": tp, "dp": dp, "ep": ep, "gpus_per_node": 4} | tables.pop("parallel", {})
    return make_job(
        parallel=parallel, model=MODEL | dict(model), batch={"global_batch": batch}, ntp=dict(ntp), **tables
    )


def load(nominal, replica, *lost):
    surviving = nominal.surviving(parse_slots(lost, nominal.topology))
    return load_of(surviving, replica, nominal.units.experts_of_slot)


# ---------------------------------------------------------------- load and pace


def test_the_slot_with_most_experts_computes_for_the_tokens_of_those_that_are_left():
    """Two experts to a slot of four. Three slots of a group that lost one have 8 experts, so one has three of them, and
    the tokens of three: 3/2 x 3/4."""
    nominal = Nominal.of(job())
    reduced = load(nominal, 0, "r1")
    assert (reduced.lost_places, reduced.tokens, reduced.expert_tokens) == ((1,), 1, Fraction(9, 8))
    assert load(nominal, 4, "r1").expert_tokens == 1, "another group has lost nobody"
    assert load(nominal, 0, "r1,r2").expert_tokens == Fraction(4, 2) * Fraction(2, 4)
    assert load(nominal, 0, "r1").expert_groups == 2
    assert load(nominal, 0, "r4,r5,r6,r7").expert_groups == 1


def test_a_micro_batch_of_a_reduced_group_takes_as_long_as_its_fullest_slot():
    nominal = Nominal.of(job())
    found = plan_recovery(nominal, lost=parse_slots(["r1"], nominal.topology))
    units = nominal.units.stages[0]
    products = 2 * HIDDEN * 4 * HIDDEN * 2 + 2 * HIDDEN * 512 + 2 * SEQ * 2 * HIDDEN  # of attention and vocabulary
    experts = 2 * 2 * EXPERT * 2  # of two experts in each of two layers
    assert stage_work(units, 1, ()) == products + experts
    expected = (products + experts * Fraction(9, 8)) / (products + experts)
    assert {share.ns for share in found.batch.shares if share.replica < 4} == {round(expected * 10**9)}
    assert {share.ns for share in found.batch.shares if share.replica > 3} == {10**9}


def test_a_group_that_is_a_part_of_a_replica_is_dropped_with_it_and_slows_nobody_down():
    nominal = Nominal.of(job(tp=4, dp=3, ep=2, parallel={"etp": 1}, batch=48))
    assert load(nominal, 0, "r1.s0.t0").expert_tokens == 1
    assert (load(nominal, 0).expert_groups, load(nominal, 0, "r1.s0.t0").expert_groups) == (6, 4)


def test_replicas_that_share_sequences_and_experts_are_in_step():
    """Context groups of two, expert groups of four: one lost replica leaves three, of which one has whole sequences."""
    nominal = Nominal.of(job(dp=4, parallel={"cp": 2}))
    assert list(replicas_in_step(nominal.topology, 3)) == [0, 1, 2, 3]
    reduced = load(nominal, 2, "r0")
    assert reduced.tokens == 2, "all wait for the replica that computes whole sequences"
    assert reduced.expert_tokens == Fraction(2 + 1 + 1, 4) * Fraction(3, 2)


def test_context_groups_of_several_expert_groups_are_in_step_too():
    """Four share a sequence, and two experts: after a loss two go on, one expert group is lost and one is whole."""
    nominal = Nominal.of(job(dp=2, ep=2, parallel={"cp": 4}))
    assert list(replicas_in_step(nominal.topology, 3)) == [0, 1, 2, 3]
    found = plan_recovery(nominal, lost=parse_slots(["r1"], nominal.topology))
    assert (found.dropped, found.batch.shares[0].ns) == ((1, 3), 2 * 10**9)


@given(jobs_with_experts())
def test_lost_places_are_those_of_the_expert_groups(found):
    topology, lost, each = found
    surviving = SurvivingReplicas(topology=topology, lost=lost, min_tp_width=1)
    groups = groups_of(surviving)
    per_replica = topology.tp / topology.expert_slots
    for replica, stage in itertools.product(surviving.replicas, range(topology.pp)):
        reduced = load_of(surviving, replica, each)
        assert reduced.lost_places == groups.pattern(int(replica * per_replica), stage)
        assert reduced.expert_tokens >= 1, "the fullest slot has no fewer experts for each token"
    assert load_of(surviving, surviving.replicas[0], each).expert_groups == len(groups.replicas)


# ---------------------------------------------------------------- memory


def test_a_slot_holds_its_experts_beside_all_else_and_shares_their_optimizer_with_fewer():
    nominal = Nominal.of(job(state={"distributed_optimizer": True}))
    units = nominal.units.stages[0]
    own = 2 * (4 * HIDDEN * HIDDEN + 2 * HIDDEN + 8 * HIDDEN) + 2 * 512 * HIDDEN + HIDDEN
    use = memory_use(units, 1, (), nominal.state, replicas=8, packing=False, load=load(nominal, 0))
    assert use.weights == 2 * (own + 2 * 2 * EXPERT)
    assert use.optimizer == own * 12 // 8 + 2 * 2 * EXPERT * 12 // 2
    reduced = memory_use(units, 1, (), nominal.state, replicas=7, packing=False, load=load(nominal, 0, "r1"))
    assert reduced.weights == 2 * (own + 2 * 3 * EXPERT)
    assert reduced.optimizer == -(-own * 12 // 7) + 2 * 3 * EXPERT * 12 // 2


def guarded(*, gb=1000.0, **options):
    return Nominal.of(job(hardware={"gpu_memory_gb": gb}, **options))


def test_activations_are_those_of_the_tokens_that_come_to_a_slot():
    """A token is on two experts. Of each the slot keeps its row, the gate, the up half and their product."""
    nominal = guarded()
    attention = SEQ * (HIDDEN * 5 + 4 * HIDDEN * 2)
    experts = SEQ * HIDDEN * 5 + 2 * SEQ * (HIDDEN + 3 * MOE_FFN) * 2
    assert activation_bytes(nominal.training, 0, 1, ()) == 2 * (attention + experts)
    more = 2 * 2 * SEQ * (HIDDEN + 3 * MOE_FFN) * 2 // 8
    assert activation_bytes(nominal.training, 0, 1, (), load=load(nominal, 0, "r1")) == 2 * (attention + experts) + more


def test_column_parts_of_an_expert_all_get_its_tokens():
    nominal = guarded(tp=2, dp=4, ep=4, parallel={"etp": 2})
    attention = SEQ // 2 * (HIDDEN * 5 + 4 * HIDDEN * 2)
    experts = SEQ // 2 * HIDDEN * 5 + 2 * SEQ * (HIDDEN + 3 * MOE_FFN // 2) * 2
    assert activation_bytes(nominal.training, 0, 2, ()) == 2 * (attention + experts)


def test_shared_experts_keep_what_they_compute_from_and_their_input_once():
    with_shared = guarded(model={"moe_shared_expert_ffn": 32})
    more = activation_bytes(with_shared.training, 0, 1, ()) - activation_bytes(guarded().training, 0, 1, ())
    assert more == 2 * SEQ * 3 * 32 * 2


def test_a_part_of_a_sequence_takes_a_part_of_the_memory():
    whole, parts = (Nominal.of(job(ep=1, dp=8 // cp, parallel={"cp": cp})) for cp in (1, 4))
    guards = [dataclasses.replace(one, guard=guarded().guard) for one in (whole, parts)]
    kept = [activation_bytes(one.training, 0, 1, ()) for one in guards]
    assert kept[0] == 4 * kept[1]
    assert activation_bytes(guards[1].training, 0, 1, (), load=load(parts, 0, "r1,r2")) == 2 * kept[1]


def test_a_plan_that_does_not_fit_names_the_experts_of_the_fullest_slot():
    nominal = guarded(ntp=UNCOPIED)
    lost = parse_slots(["r1"], nominal.topology)
    use = plan_recovery(nominal, lost=lost).expert_groups[0]
    between = (use.memory_before.total + use.memory_after.total) / 2e9
    tight = dataclasses.replace(nominal, guard=dataclasses.replace(nominal.guard, limit=between * 1e9))
    plan_recovery(tight, lost=frozenset())
    with pytest.raises(Refused, match="stage 0 with 3 experts on a slot, where 2 are nominal, does not fit into"):
        plan_recovery(tight, lost=lost)


def test_a_reduced_group_runs_smaller_micro_batches_where_it_needs_to_and_no_other_does():
    options = {"ntp": UNCOPIED, "parallel": {}, "model": {"seq": 4096}}
    nominal = dataclasses.replace(guarded(**options))
    nominal = dataclasses.replace(nominal, batch=dataclasses.replace(nominal.batch, micro_batch=2))
    lost = parse_slots(["r1"], nominal.topology)
    most = memory_use(
        nominal.units.stages[0], 1, (), nominal.state, replicas=7, packing=True, load=load(nominal, 0, "r1")
    ).total + activation_bytes(nominal.training, 0, 1, (), load=load(nominal, 0, "r1"))
    tight = dataclasses.replace(nominal, guard=dataclasses.replace(nominal.guard, limit=most - 1))
    sizes = {share.replica: share.size for share in plan_recovery(tight, lost=lost).batch.shares}
    assert sizes == {0: 1, 2: 1, 3: 1, 4: 2, 5: 2, 6: 2, 7: 2}


# ---------------------------------------------------------------- who gets what


def test_the_experts_of_a_dropped_replica_are_dealt_to_the_rest_of_its_group():
    nominal = Nominal.of(job(tp=2, dp=4, ep=4, parallel={"etp": 1}, ntp=UNCOPIED, batch=16))
    found = plan_recovery(nominal, lost=parse_slots(["r1.s0.t1"], nominal.topology))
    assert (found.dropped, found.degraded, [str(slot) for slot in found.idle]) == ((1,), (), ["r1.s0.t0"])
    (group,) = found.expert_groups
    assert [str(slot) for slot in group.members] == ["r0.s0.t0", "r0.s0.t1"]
    assert (group.before, group.after, group.fullest, group.ideal) == ((), (2, 3), (2, 4), 4)
    dealt = {(str(deal.holder), str(deal.target)): deal.experts for deal in group.deals}
    assert sum(dealt.values()) == 4 and {holder for holder, _ in dealt} == {"r1.s0.t0", "r1.s0.t1"}
    assert sum(deal.size for deal in group.deals) == 4 * 2 * EXPERT * (2 + 12)


def test_experts_come_back_to_where_they_were():
    nominal = Nominal.of(job(ntp=UNCOPIED))
    lost = parse_slots(["r1"], nominal.topology)
    (there,) = plan_recovery(nominal, lost=lost).expert_groups
    (back,) = plan_recovery(nominal, lost_before=lost, lost=frozenset()).expert_groups
    assert {(d.holder, d.target, d.experts) for d in there.deals} == {
        (d.target, d.holder, d.experts) for d in back.deals
    }
    assert (there.fullest, back.fullest) == ((2, 3), (3, 2))


def test_a_lost_group_deals_nothing():
    nominal = Nominal.of(job(ntp=UNCOPIED))
    assert plan_recovery(nominal, lost=parse_slots(["r0,r1,r2,r3"], nominal.topology)).expert_groups == ()


def test_replicas_of_a_group_run_alike_many_micro_batches():
    nominal = Nominal.of(job(ntp=UNCOPIED, batch=64))
    found = plan_recovery(nominal, lost=parse_slots(["r1"], nominal.topology))
    counts = {share.replica: share.count for share in found.batch.shares}
    assert sum(counts.values()) == 64
    assert len({found.runs(replica) for replica in (0, 2, 3)}) == len({found.runs(r) for r in (4, 5, 6, 7)}) == 1
    assert found.runs(4) == max(counts[replica] for replica in (4, 5, 6, 7)) > min(counts[r] for r in (4, 5, 6, 7))
    longest = max(found.runs(share.replica) * share.ns for share in found.batch.shares)
    assert found.batch.step_ns == longest, "padding makes no step longer"


def test_a_dense_job_has_no_load_and_no_expert_groups():
    nominal = Nominal.of(make_job(parallel={"tp": 2, "dp": 2}, model={k: MODEL[k] for k in DENSE}, ntp=UNCOPIED))
    lost = parse_slots(["r0.s0.t0"], nominal.topology)
    assert load_of(nominal.surviving(lost), 0, 0) == NOMINAL_LOAD
    assert plan_recovery(nominal, lost=lost).expert_groups == ()
    assert plan_recovery(nominal, lost=lost).degraded == (0,)


DENSE = ("layers", "hidden", "heads", "ffn", "vocab")


# ---------------------------------------------------------------- the choice, and refusals


def test_a_job_with_experts_drops_the_replica():
    nominal = Nominal.of(job(ntp=UNCOPIED | {"actions": {"restart_s": 1e9}}))
    choice = decide(plan_recovery(nominal, lost=parse_slots(["r1"], nominal.topology)))
    rows = {row.action: row for row in choice.table}
    assert choice.action == DROP_REPLICA
    assert "a replica with experts keeps its full width" in rows[REDUCE_TP].reason


def test_the_forecast_of_a_drop_knows_the_reduced_group():
    nominal = Nominal.of(job(ntp=UNCOPIED | {"actions": {"restart_s": 1e9}}))
    found = plan_recovery(nominal, lost=parse_slots(["r1"], nominal.topology))
    dropped = next(row for row in decide(found).table if row.action == DROP_REPLICA)
    assert dropped.throughput == pytest.approx(found.batch.nominal_ns / found.batch.step_ns)


@pytest.mark.parametrize(
    ("lose", "copies", "error", "message"),
    [
        (["r1"], {"mode": "off"}, StateLost, "copies of them are off|copies are off"),
        (["node0"], {"mode": "near"}, StateLost, None),
        (["r0,r1,r2,r3,r4,r5,r6,r7"], {}, BelowMinimum, "no replica is left"),
    ],
)
def test_state_that_nobody_has_is_refused(lose, copies, error, message):
    described = job(ntp={"copies": copies}, state={"distributed_optimizer": True})
    with pytest.raises(error, match=message):
        plan(dataclasses.replace(described, lose=tuple(lose)))


def test_one_more_host_keeps_the_state():
    described = job(state={"distributed_optimizer": True})
    assert plan(dataclasses.replace(described, lose=("node0",))).dropped == (0, 1, 2, 3)


def test_stages_without_experts_are_refused_as_in_a_live_job():
    with pytest.raises(Refused, match="stage 0 of the pipeline has no layer of experts"):
        Nominal.of(job(model={"moe_layer_freq": "[0,1]"}, parallel={"pp": 2}))
