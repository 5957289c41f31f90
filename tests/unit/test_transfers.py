import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntp_plugin.config.sections import CopyPolicy
from ntp_plugin.errors import Refused, StateLost
from ntp_plugin.planning import spans as sp
from ntp_plugin.planning.copy_placement import place_copies
from ntp_plugin.planning.parity_groups import share_parities
from ntp_plugin.planning.recovery_plan import Nominal, plan_recovery
from ntp_plugin.planning.topology import parse_slots
from ntp_plugin.planning.transfers import Change, optimizer_blocks, plan_block_deals
from tests.unit import properties
from tests.unit.strategies import make_job, situations, situations_with_joiners


@given(situations())
def test_every_transfer_is_needed_possible_and_made_once(situation):
    properties.transfers_turn_one_layout_into_the_next(*situation)


@given(situations())
def test_the_same_with_copies_of_sharded_optimizer_state(situation):
    nominal, lost_before, lost = situation
    try:
        copies = place_copies(nominal.topology, CopyPolicy(), nominal.surviving(lost_before).lost_nodes)
    except Refused:
        return  # one host alone has nowhere to copy to
    properties.transfers_turn_one_layout_into_the_next(nominal, lost_before, lost, copies)


@given(situations())
def test_the_same_with_parities_of_such_copies(situation):
    nominal, lost_before, lost = situation
    try:
        parities = share_parities(nominal.topology, CopyPolicy(mode="xor:2"), nominal.surviving(lost_before).lost_nodes)
    except Refused:
        return  # two hosts have nowhere to keep a parity of both
    properties.transfers_turn_one_layout_into_the_next(nominal, lost_before, lost, parities)


@given(situations_with_joiners())
def test_new_processes_in_old_slots_get_the_same_transfers(situation):
    properties.transfers_turn_one_layout_into_the_next(*situation)


@given(st.integers(1, 200), st.integers(1, 8), st.data())
def test_optimizer_blocks_stay_complete_even_and_in_place(elements, replicas, data):
    dropped = data.draw(st.frozensets(st.integers(0, replicas - 1), max_size=replicas - 1))
    blocks = optimizer_blocks(elements, replicas, dropped)
    held = {replica: sp.size(blocks.kept[replica]) + sp.size(blocks.dealt[replica]) for replica in blocks.kept}
    assert sum(held.values()) == elements
    assert max(held.values()) - min(held.values()) <= 1
    nominal = sp.even_cut(((0, elements),), replicas)
    assert all(blocks.kept[replica] == nominal[replica] for replica in held)


@given(situations())
def test_every_shard_of_a_dropped_or_rejoining_replica_is_moved_once(situation):
    nominal, lost_before, lost = situation
    before, after = nominal.surviving(lost_before), nominal.surviving(lost)
    try:
        copies = place_copies(nominal.topology, CopyPolicy(), before.lost_nodes)
    except Refused:
        return
    change = Change(before=before, after=after, units=nominal.units, state=nominal.state, copies=copies)
    dropped, back = after.dropped - before.dropped, before.dropped - after.dropped
    try:
        deals = plan_block_deals(change)
    except StateLost:
        homes = [nominal.topology.node_of(slot) for slot in lost - lost_before if slot.replica in dropped]
        assert any({home, *copies.holders(home)} <= set(after.lost_nodes) for home in homes)
        return
    expected = {slot for replica in dropped for slot in living_slots(before, replica)}
    expected |= {slot for replica in back for slot in living_slots(after, replica)}
    assert sorted(blocks.slot for blocks in deals) == (sorted(expected) if nominal.state.distributed_optimizer else [])
    for blocks in deals:
        assert (blocks.source is None) == (blocks.slot.replica in back)
        assert blocks.source is None or blocks.source not in lost
        assert blocks.source in (None, blocks.slot) or blocks.slot in lost


def living_slots(surviving, replica):
    topology = surviving.topology
    return [
        slot for stage in range(topology.pp) for slot in topology.group(replica, stage) if slot not in surviving.lost
    ]


def nominal_job(dp=2, **tables):
    return Nominal.of(
        make_job(
            parallel={"tp": 4, "pp": 1, "dp": dp, "gpus_per_node": 4},
            model={"layers": 2, "hidden": 64, "heads": 8, "ffn": 256, "vocab": 100, "vocab_multiple": 1},
            **tables,
        )
    )


def plan(nominal, words, before=""):
    slots = [parse_slots([text] if text else [], nominal.topology) for text in (words, before)]
    return plan_recovery(nominal, lost=slots[0], lost_before=slots[1])


def test_a_single_replica_resumes_from_copies():
    job = nominal_job(dp=2, ntp={"copies": {"count": 1}})
    moves = plan(job, "r0,r1.s0.t2", before="r0").transfers
    assert {move.origin for move in moves if move.family == "mlp"} == {"near copy"}
    assert {str(move.of) for move in moves if move.of} == {"r1.s0.t2"}


def test_a_lost_optimizer_shard_comes_from_the_far_copy_and_weights_from_a_peer():
    job = nominal_job(dp=2, state={"distributed_optimizer": True}, ntp={"copies": {"count": 1}})
    moves = plan(job, "r1.s0.t2").transfers
    origins = {(move.what, move.origin) for move in moves if move.family == "attention"}
    assert origins == {("weights", "peer"), ("optimizer", "far copy")}


def test_a_lost_hosts_optimizer_shard_comes_from_a_parity_and_a_lost_slots_from_its_near_copy():
    job = nominal_job(dp=3, state={"distributed_optimizer": True}, ntp={"copies": {"mode": "xor:2"}})
    moves = plan(job, "r1.s0.t2").transfers
    assert {move.origin for move in moves if move.of} == {"near copy"}
    deals = plan(job, "r1").block_deals
    assert [(str(deal.slot), deal.origin) for deal in deals] == [(f"r1.s0.t{tp}", "parity") for tp in range(4)]
    assert {deal.source.replica for deal in deals} == {0, 2}, "parity_hosts rotate"
    with pytest.raises(StateLost, match=r"the hosts of its copies are lost as well.*copies\.mode = copy"):
        plan(job, "r1,r2")


@pytest.mark.parametrize(
    ("job", "words", "before", "reason"),
    [
        ({"state": {"distributed_optimizer": True}, "ntp": {"copies": {"count": 0}}}, "r1.s0.t2", "", "copies are off"),
        ({"ntp": {"copies": {"count": 0}}}, "r0,r1.s0.t2", "r0", "copies are off"),
        ({}, "r0.s0.t1,r1.s0.t1", "", "its copies hold no weights"),
        ({"state": {"distributed_optimizer": True}, "ntp": {"copies": {"count": 0}}}, "r0", "", "copies are off"),
        ({"state": {"distributed_optimizer": True}, "dp": 4}, "r0,r1", "", "the hosts of its copies are lost as well"),
    ],
)
def test_state_without_a_holder_is_named_with_a_fix(job, words, before, reason):
    with pytest.raises(StateLost, match=rf"r\d\.s0\.t\d is held by no living slot, and {reason}.*checkpoint"):
        plan(nominal_job(**job), words, before)


def test_each_survivor_is_fed_by_a_replica_of_its_own():
    moves = plan(nominal_job(dp=8), "r2.s0.t1").transfers
    peers = {move.target: move.source.replica for move in moves if move.family == "mlp"}
    assert len(set(peers.values())) == len(peers) == 3
