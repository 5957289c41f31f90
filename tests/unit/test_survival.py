"""Which losses a job survives, planned before anything is lost, by where its state is."""

import dataclasses

import pytest

from ntp_plugin.config.sections import ActionsPolicy, Batch, CopyPolicy, Hardware, Model, Parallel, Policy, State
from ntp_plugin.errors import Refused
from ntp_plugin.planning import survival
from ntp_plugin.planning.recovery_plan import Nominal
from ntp_plugin.planning.survival import COPIES, NOTHING_MOVES, OTHER_RANKS, copy_memory, kinds_of_loss, survivals
from ntp_plugin.planning.topology import Topology
from ntp_plugin.planning.units import transformer_units

MODEL = Model(layers=4, hidden=64, heads=8, ffn=256, vocab=1000)
SLOT, PAIR, REPLICA = "any one slot", "two slots of one stage of a replica", "all slots of a replica"
SAME, HOST, HOSTS = "the same slot of all replicas", "any one host", "two neighbouring hosts"


def job(*, tp=4, pp=1, dp=2, per_host=4, sharded=False, policy=None):
    topology = Topology.of(Parallel(tp=tp, pp=pp, dp=dp, gpus_per_node=per_host))
    return Nominal(
        topology=topology,
        units=transformer_units(MODEL, tp=tp, pp=pp),
        batch=Batch(global_batch=8 * dp),
        state=State(distributed_optimizer=sharded),
        hardware=Hardware(),
        policy=policy or Policy(),
    )


def found(nominal, copies=None):
    return {survival.kind: survival for survival in survivals(nominal, copies)}


def goes_on(nominal, copies=None):
    return {kind for kind, survival in found(nominal, copies).items() if not survival.exit_code}


def test_replicas_hold_each_others_state():
    losses = found(job())
    assert {kind for kind in losses if not losses[kind].exit_code} == {SLOT, PAIR, REPLICA, HOST}
    assert losses[SLOT].state_from == (OTHER_RANKS,)
    assert losses[REPLICA].state_from == (NOTHING_MOVES,)
    assert (losses[SAME].survived, losses[SAME].exit_code) == (0, 4)
    assert "state of r0.s0.t0 is held by no living slot" in losses[SAME].why
    assert losses[SAME].example == "r0.s0.t0, r1.s0.t0"


def test_copies_of_everything_also_survive_the_same_slot_everywhere():
    assert found(job(), CopyPolicy())[SAME].state_from == (COPIES, OTHER_RANKS)


@pytest.mark.parametrize(
    ("copies", "survived"),
    [
        (None, set()),
        (CopyPolicy(mode="near"), {SLOT, PAIR, SAME}),
        (CopyPolicy(), {SLOT, PAIR, SAME, REPLICA, HOST}),
    ],
    ids=["none", "near", "far"],
)
def test_a_sharded_optimizer_needs_copies(copies, survived):
    """A replica is a host here, so it takes near copies with it, and far ones are on the other host."""
    assert goes_on(job(sharded=True), copies) == survived


def test_two_hosts_take_a_far_copy_with_them_unless_there_are_two():
    nominal = job(dp=4, sharded=True)
    loss = found(nominal, CopyPolicy())[HOSTS]
    assert (loss.exit_code, loss.example) == (4, "node0 and node1")
    assert found(nominal, CopyPolicy(count=2))[HOSTS].exit_code == 0


def test_one_host_may_be_lost_of_each_parity():
    losses = found(job(dp=4, sharded=True), CopyPolicy(mode="xor:2"))
    assert losses[HOST].exit_code == 0
    assert (losses[HOSTS].exit_code, losses[HOSTS].survived < losses[HOSTS].planned) == (4, True)


def test_one_replica_alone():
    alone = job(dp=1)
    assert goes_on(alone) == set()
    losses = found(alone, CopyPolicy())
    assert {kind for kind in losses if not losses[kind].exit_code} == {SLOT, PAIR}
    assert losses["the only host"].why == "all ranks are lost"
    assert losses[REPLICA].exit_code == 3


def test_a_replica_that_may_not_be_narrower_is_dropped():
    losses = found(job(policy=Policy(min_tp_width=4)))
    assert losses[SLOT].step_time == 2.0
    assert losses[SLOT].state_from == (NOTHING_MOVES,)
    assert found(job())[SLOT].step_time < 2.0


def test_a_restart_that_is_worth_more_ends_the_job():
    actions = ActionsPolicy(restart_s=1.0)
    loss = found(job(policy=Policy(actions=actions)))[SLOT]
    assert (loss.exit_code, loss.fix) == (8, "leave actions.restart_s out")


def test_too_few_hosts_for_the_copies_are_refused():
    with pytest.raises(Refused, match=r"xor:2 needs 2 node domains"):
        survivals(job(sharded=True), CopyPolicy(mode="xor:2"))


def test_of_many_losses_some_are_planned_the_first_and_the_last_among_them():
    nominal = job(dp=64)
    loss = found(nominal)[SLOT]
    assert (loss.losses, loss.planned, loss.survived) == (256, survival.MOST, survival.MOST)
    every = next(iter(kinds_of_loss(nominal.topology))).losses
    spread = survival._spread(every)
    assert (spread[0], spread[-1]) == (every[0], every[-1])
    assert len({one.name for one in spread}) == survival.MOST


def test_of_losses_of_many_slots_fewer_are_planned():
    losses = found(job(dp=128))[SAME]
    assert (losses.losses, losses.planned) == (4, 4)
    losses = found(job(dp=256))[SAME]
    assert (losses.losses, losses.planned, losses.exit_code) == (4, 1, 4)


def test_the_memory_of_copies():
    nominal = job(sharded=True, per_host=4)
    elements = max(survival.slot_elements(nominal.units.stages[0], 4, ()))
    both = copy_memory(nominal, CopyPolicy(), bytes_per_parameter=12)
    assert both.version == -(-elements * 12 // 2)
    assert (both.near, both.far, both.host) == (2 * both.version, 2 * both.version, 4 * 4 * both.version)
    assert copy_memory(nominal, CopyPolicy(mode="near"), bytes_per_parameter=12).far == 0
    whole = dataclasses.replace(nominal, state=State())
    assert copy_memory(whole, CopyPolicy(count=1), bytes_per_parameter=12).version == elements * 12
    parities = copy_memory(job(dp=4, sharded=True), CopyPolicy(mode="xor:2"), bytes_per_parameter=12)
    assert parities.far == parities.near // 2


def job_with_experts(expert_slots, **options):
    """Eight replicas on two hosts, whose experts are in groups of so many ranks."""
    nominal = job(tp=1, dp=8, per_host=4, **options)
    return dataclasses.replace(nominal, topology=dataclasses.replace(nominal.topology, expert_slots=expert_slots))


def test_experts_come_from_copies():
    nominal = job_with_experts(4)
    assert found(nominal, CopyPolicy())[SLOT].state_from == (COPIES,)
    without = found(nominal)[SLOT]
    assert (without.survived, without.exit_code) == (0, 4)
    assert "copies are off" in without.why


@pytest.mark.parametrize(
    ("expert_slots", "sharded", "survives"), [(4, False, True), (8, False, False), (4, True, False)]
)
def test_a_host_that_takes_its_copies_along(expert_slots, sharded, survives):
    """Another expert group has the same experts, and nobody the same part of a sharded optimizer."""
    lost = found(job_with_experts(expert_slots, sharded=sharded), CopyPolicy(mode="near"))[HOST]
    assert (lost.exit_code == 0) == survives
    assert survives or "on lost hosts" in lost.why
