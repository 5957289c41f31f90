"""Properties of planning, each a function that raises `AssertionError` if it does not hold.

Functions of the planning packages are called through their modules, so that `test_mutations.py` can break one and see
these checks fail. Brute force works unit by unit; planning works by runs of units.
"""

import itertools
from collections import Counter, defaultdict

import torch

from ntp_plugin.config.sections import BatchPolicy
from ntp_plugin.planning import (
    batch_split,
    copy_placement,
    core_route,
    expert_groups,
    lanes,
    parity_groups,
    recovery_plan,
    shard_layout,
    topology,
    transfers,
)
from ntp_plugin.reduction import core_slices, gradient_lanes
from tests.unit.strategies import expert_families


def each(spans):
    """The numbers one by one, in the order of the runs."""
    return [number for start, stop in spans for number in range(start, stop)]


# ---------------------------------------------------------------- layouts


def layout_owns_every_unit_once(family, tp, pattern):
    layout = shard_layout.lay_out(family, tp, pattern)
    held = [unit for units in layout.holdings for unit in each(units)]
    assert sorted(held) == list(range(family.units))
    assert all(not layout.holdings[slot] for slot in pattern)
    assert each(tuple((start, stop) for start, stop, _ in layout.segments)) == list(range(family.units))


def layout_is_as_even_as_can_be(family, tp, pattern):
    layout = shard_layout.lay_out(family, tp, pattern)
    sizes = [len(each(units)) for slot, units in enumerate(layout.holdings) if slot not in pattern]
    assert max(sizes) - min(sizes) <= 1
    assert layout.widest == max(sizes) == layout.ideal == -(-family.units // (tp - len(pattern)))


def survivors_keep_a_prefix(family, tp, pattern):
    nominal = shard_layout.lay_out(family, tp, ()).holdings
    degraded = shard_layout.lay_out(family, tp, pattern).holdings
    for slot in range(tp):
        if slot in pattern:
            continue
        if family.contiguous:
            units = each(degraded[slot])
            assert units == list(range(units[0], units[0] + len(units)))
        else:
            kept = each(nominal[slot])
            assert each(degraded[slot])[: len(kept)] == kept


# ---------------------------------------------------------------- sequences


def rows_are_held_once_in_order(rows):
    """The slots together store the sequence and then its pads, and no more pads than needed."""
    held = [list(range(*rows.held(place))) for place in range(rows.width)]
    assert [row for part in held for row in part] == list(range(rows.length))
    assert all(len(part) <= rows.stored for part in held)
    assert all(len(part) == rows.stored or not any(held[place + 1 :]) for place, part in enumerate(held))
    assert rows.pads == rows.stored * rows.width - rows.length
    assert 0 <= rows.pads < rows.width * rows.granule


# ---------------------------------------------------------------- lanes


def _owner(family, tp, pattern, unit):
    holdings = shard_layout.lay_out(family, tp, pattern).holdings
    return next(slot for slot, units in enumerate(holdings) if unit in each(units))


def lanes_are_the_owner_tuples(nominal, lost):
    surviving = nominal.surviving(lost)
    tp = nominal.topology.tp
    for stage, units in enumerate(nominal.units.stages):
        expected = defaultdict(set)
        for family in units.families:
            for unit in range(family.units):
                owners = tuple(
                    topology.Slot(
                        replica=replica, stage=stage, tp=_owner(family, tp, surviving.pattern(replica, stage), unit)
                    )
                    for replica in surviving.replicas
                )
                expected[owners].add((family.name, unit))
        planned = lanes.plan_lanes(surviving, units, stage)
        found = {
            tuple(lane.members(surviving)): {(name, unit) for name, spans in lane.units for unit in each(spans)}
            for lane in planned.lanes
        }
        assert found == dict(expected)
        assert len(found) == len(planned.lanes)
        reached = {slot for lane in planned.lanes for slot in lane.members(surviving)}
        living = {
            slot
            for replica in surviving.replicas
            for slot in nominal.topology.group(replica, stage)
            if slot not in lost
        }
        assert reached == living


def both_routes_give_every_slot_the_same_sums(nominal, lost):
    """Each slot's gradient of a unit is one symbol; a sum is a multiset of symbols."""
    surviving = nominal.surviving(lost)
    for stage, units in enumerate(nominal.units.stages):
        direct = _sums_direct(surviving, units, stage)
        assert direct == _sums_via_core(surviving, units, stage)
        for symbols in direct.values():
            assert set(symbols) == set(surviving.replicas), "each replica counts once"
            assert max(symbols.values()) == 1


def _sums_direct(surviving, units, stage):
    sums = {}
    for lane in lanes.plan_lanes(surviving, units, stage).lanes:
        members = lane.members(surviving)
        for name, spans in lane.units:
            for unit in each(spans):
                for slot in members:
                    assert (slot, name, unit) not in sums
                    sums[slot, name, unit] = Counter(member.replica for member in members)
    return sums


def _sums_via_core(surviving, units, stage):
    route = core_route.plan_core_route(surviving, units, stage)
    tp = surviving.topology.tp
    assignments = {assignment.pattern: assignment for assignment in route.assignments}
    arrived, home = defaultdict(Counter), {}
    for replica in surviving.replicas:
        pattern = surviving.pattern(replica, stage)
        assignment = assignments[pattern]
        hops = {(hop.source, hop.family, unit): hop.target for hop in assignment.hops for unit in each(hop.units)}
        assert len(hops) == sum(len(each(hop.units)) for hop in assignment.hops), "a unit hops once"
        living = {slot for slot in range(tp) if slot not in pattern}
        assert set(assignment.tp_slots) <= living
        assert len(set(assignment.tp_slots)) == len(route.cores)
        for family in units.families:
            for slot, held in enumerate(shard_layout.lay_out(family, tp, pattern).holdings):
                for unit in each(held):
                    place = hops.get((slot, family.name, unit), slot)
                    assert place in assignment.tp_slots, "every unit gets to a core"
                    arrived[assignment.tp_slots.index(place), family.name, unit][replica] += 1
                    home[topology.Slot(replica=replica, stage=stage, tp=slot), family.name, unit] = place
    sums = {}
    for (slot, name, unit), place in home.items():
        core = assignments[surviving.pattern(slot.replica, stage)].tp_slots.index(place)
        assert unit in each(dict(route.cores[core])[name]), "the core reduces what was sent to it"
        sums[slot, name, unit] = arrived[core, name, unit]
    return sums


def cores_get_their_units_and_give_them_back(nominal, lost):
    """Slot by slot and tensor by tensor, with the number of each place in the whole for a gradient."""
    surviving, tp = nominal.surviving(lost), nominal.topology.tp
    for stage, units in enumerate(nominal.units.stages):
        route = core_route.plan_core_route(surviving, units, stage)
        tensors = [tensor for tensor, _ in units.tensors if tensor.family]
        for pattern in lanes.segment_patterns(surviving, stage):
            living = [slot for slot in range(tp) if slot not in pattern]
            tp_slots = [
                core_slices.find_core_slices(route, units, tp=tp, pattern=pattern, slot=slot) for slot in living
            ]
            held = [_held_by(units, tp, pattern, slot) for slot in living]
            mine = [{tensor.name: _places(tensor, units[tensor.family]) for tensor in tensors} for units in held]
            parts = [{name: torch.full(shape, -1.0) for name, shape in tp_slot.parts.items()} for tp_slot in tp_slots]
            back = [{name: torch.full_like(values, -1.0) for name, values in own.items()} for own in mine]
            for one, other in itertools.product(range(len(tp_slots)), repeat=2):
                _hand_over(tp_slots[one].out[other], mine[one], tp_slots[other].into[one], parts[other])
            for tp_slot, part in zip(tp_slots, parts, strict=True):
                reduced = dict(route.cores[tp_slot.core]) if tp_slot.core is not None else {}
                assert part.keys() == {tensor.name for tensor in tensors if reduced.get(tensor.family)}
                assert all(part[t.name].equal(_places(t, reduced[t.family])) for t in tensors if t.name in part)
            for one, other in itertools.product(range(len(tp_slots)), repeat=2):
                _hand_over(tp_slots[other].into[one], parts[other], tp_slots[one].out[other], back[one])
            assert all(back[at][name].equal(values) for at, own in enumerate(mine) for name, values in own.items())


def _held_by(units, tp, pattern, slot):
    return {family.name: shard_layout.lay_out(family, tp, pattern).holdings[slot] for family in units.families}


def _places(tensor, units):
    """The number in the full tensor of each element of a part with these units."""
    whole = torch.arange(float(tensor.elements)).view(tensor.shape)
    return whole.index_select(tensor.dim, torch.tensor(each(tensor.local_index(units)), dtype=torch.long))


def _hand_over(leaving, source, arriving, target):
    assert bool(leaving) == bool(arriving)
    if leaving:
        gradient_lanes.unpack(arriving, target, gradient_lanes.pack(leaving, source))


# ---------------------------------------------------------------- batch


def strict_split_is_exact_and_the_shortest(paces, nominal):
    split = batch_split.split_batch(paces, nominal, BatchPolicy())
    held = [number for share in split.shares for number in each(share.kept) + each(share.dealt)]
    assert sorted(held) == list(range(nominal.total))
    assert sum(share.count * share.size for share in split.shares) == nominal.total * nominal.micro_batch
    for share in split.shares:
        first = share.replica * nominal.per_replica
        assert each(share.kept) == list(range(first, first + len(each(share.kept))))
    everybody = list(paces.values())
    best = min(
        max(pace.step_ns(count, nominal.stages) for pace, count in zip(everybody, counts, strict=True))
        for counts in _integer_splits(nominal.total, len(everybody))
    )
    assert split.step_ns == best
    assert split.ideal_ns <= split.step_ns


def _integer_splits(total, parts):
    for cuts in itertools.combinations_with_replacement(range(total + 1), parts - 1):
        yield [after - before for before, after in itertools.pairwise((0, *cuts, total))]


# ---------------------------------------------------------------- copies


def far_copies_are_far(topology_, policy, lost_nodes):
    placement = copy_placement.place_copies(topology_, policy, lost_nodes)
    size = copy_placement.domain_size(topology_, policy.far)
    for node in range(topology_.nodes):
        if node in lost_nodes:
            continue
        holders = placement.holders(node)
        assert len(set(holders)) == len(holders)
        assert not set(holders) & set(lost_nodes)
        assert all(holder // size != node // size for holder in holders)
        possible = sum(other not in lost_nodes and other // size != node // size for other in range(topology_.nodes))
        assert len(holders) == min(policy.count, possible)


def parities_protect(topology_, policy, lost_nodes):
    """Each living slot shares with others of other domains, all of the same mind, and a host in none of these keeps the
    parity; who shared before a loss and is left shares after it, as long as some host is left outside."""
    parities = parity_groups.share_parities(topology_, policy, lost_nodes)
    whole = parity_groups.share_parities(topology_, policy, ())
    size = copy_placement.domain_size(topology_, policy.far)

    def domain(slot):
        return topology_.node_of(slot) // size

    living = [
        slot for slot in map(topology_.slot_of, range(topology_.size)) if topology_.node_of(slot) not in lost_nodes
    ]
    domains = {domain(slot) for slot in living}
    for slot in living:
        group, before = parities.group_of(slot), whole.group_of(slot)
        if group is None:
            assert len(domains) == 1, "some host is in another domain"
            continue
        assert slot in group.members
        assert all(parities.group_of(other) == group for other in group.members), "each is in one group"
        assert set(group.members) <= set(living)
        assert len({domain(other) for other in group.members}) == len(group.members) <= policy.sharers
        assert group.parity_host not in lost_nodes
        assert group.parity_host // size not in {domain(other) for other in group.members}
        assert set(group.members) <= set(before.members), "no slot changes groups"
        left = {other for other in before.members if other in living}
        outside = domains - {domain(other) for other in left}
        if outside:
            assert set(group.members) == left, "survivors stay together"
        if before.parity_host not in lost_nodes:
            assert group.parity_host == before.parity_host, "and with their parity_host"


# ---------------------------------------------------------------- transfers


def transfers_turn_one_layout_into_the_next(nominal, lost_before, lost, copies=None, empty=frozenset()):
    """Replay the plan on a world of (slot -> units): sources held what they give, targets end with their layout."""
    before, after = nominal.surviving(lost_before), nominal.surviving(lost)
    change = transfers.Change(
        before=before, after=after, units=nominal.units, state=nominal.state, copies=copies, empty=empty
    )
    try:
        moves = transfers.plan_transfers(change)
    except transfers.StateLost:
        assert _some_optimizer_shard_is_lost(before, after, copies, empty), "state is called lost only where it is"
        return
    start, goal = _world(nominal, before), _world(nominal, after, without_blocks=before.dropped)
    start |= {slot: set() for slot in empty}
    received = defaultdict(set)
    for move in moves:
        assert move.target not in lost, "nothing goes to a lost slot"
        assert move.source not in lost, "nothing comes from a lost slot"
        assert move.size > 0
        if move.of is None:
            assert move.source not in lost_before | empty, "nor from one that was lost before, or holds nothing"
        else:
            assert move.of in lost - lost_before, "copies serve for slots that are lost now"
            assert nominal.topology.node_of(move.source) in _hosts_that_give(copies, move.of, after)
        parts = _slices_of(move)
        assert len(parts) == len(set(parts)), "nothing is twice in a transfer"
        for part in parts:
            assert part not in received[move.target], "nothing moves twice"
            assert part not in start[move.target], "nothing moves to where it is"
            assert part in start[move.of or move.source], "a source gives what it held"
            received[move.target].add(part)
    for slot, wanted in goal.items():
        assert wanted <= start[slot] | received[slot], "every slot ends with all of its new layout"
        assert received[slot] <= wanted, "and is sent nothing else"


def _some_optimizer_shard_is_lost(before, after, copies, empty):
    """A slot whose replica trained and continues is newly lost, and no host with its shard in memory is alive."""
    return any(
        copies is None or _hosts_that_give(copies, slot, after) <= set(after.lost_nodes)
        for slot in (after.lost | empty) - before.lost
        if slot.replica not in before.dropped | after.dropped
    )


def _hosts_that_give(copies, slot, after):
    """Hosts of a slot's shard: with a copy, or with a parity whose other members' hosts are alive."""
    home = after.topology.node_of(slot)
    if isinstance(copies, copy_placement.Placement):
        return {home, *copies.holders(home)}
    group = copies.group_of(slot)
    others = {after.topology.node_of(other) for other in group.members} - {home} if group else set()
    return {home} if group is None or others & set(after.lost_nodes) else {home, group.parity_host}


def _slices_of(move):
    what = {"state": "weights"}.get(move.what, move.what)
    if move.family == transfers.REPLICATED:
        return [(what, move.family, 0)]
    return [(what, move.family, unit) for unit in each(move.units)]


def _world(nominal, surviving, without_blocks=frozenset()):
    """Slot -> its state; a rejoining replica gets its optimizer blocks by block deals, not by transfers."""
    world = defaultdict(set)
    sharded = nominal.state.distributed_optimizer
    for replica in surviving.replicas:
        for stage, units in enumerate(nominal.units.stages):
            pattern = surviving.pattern(replica, stage)
            for slot in nominal.topology.group(replica, stage):
                if slot.tp in pattern:
                    continue
                if units.replicated_elements:
                    world[slot].add(("weights", transfers.REPLICATED, 0))
                for family in units.families:
                    held = shard_layout.lay_out(family, nominal.topology.tp, pattern).holdings[slot.tp]
                    blocks = sharded and replica not in without_blocks
                    kinds = ("weights", "optimizer") if blocks else ("weights",)
                    world[slot] |= {(kind, family.name, unit) for unit in each(held) for kind in kinds}
    return world


# ---------------------------------------------------------------- plans


def same_losses_same_plan(nominal, lost, orders):
    plans = [recovery_plan.plan_recovery(nominal, lost=frozenset(order)) for order in orders]
    assert len({plan.digest for plan in plans}) == 1
    assert all(plan == plans[0] for plan in plans)


def lose_then_return_is_the_identity(nominal, lost):
    whole = recovery_plan.plan_recovery(nominal, lost=frozenset())
    back = recovery_plan.plan_recovery(nominal, lost_before=lost, lost=frozenset())
    assert back.routes == whole.routes
    assert back.batch == whole.batch
    assert back.resettled_copies == whole.resettled_copies == ()
    assert not back.degraded
    assert not back.dropped


def experts_are_once_in_each_group(nominal, lost, number):
    """Each expert group that is left has every expert once, and each of its slots its own, within one of the others."""
    after, places = topology.SurvivingReplicas(topology=nominal, lost=lost, min_tp_width=1), nominal.expert_slots
    groups, families = expert_groups.groups_of(after), expert_families(nominal.expert_slots, number)
    for stage, group in itertools.product(range(nominal.pp), groups.replicas):
        pattern = groups.pattern(group, stage)
        held = [expert_groups.holdings(families, places, pattern, place) for place in range(places)]
        assert sorted(itertools.chain(*held)) == list(itertools.product(range(places), range(number)))
        sizes = [len(mine) for place, mine in enumerate(held) if place not in pattern]
        assert max(sizes) - min(sizes) <= 1
        for place, mine in enumerate(held):
            assert place in pattern or {(place, own) for own in range(number)} <= set(mine)
