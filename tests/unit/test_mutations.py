"""The checks of `properties.py` can fail: each planning function gets a planted bug, and a check must fail.

A mutation replaces one function of a planning package by a wrong one; the named property then runs over fixed examples
from hypothesis and must raise. With the sound function the same run raises nothing.
"""

import dataclasses

import pytest
from hypothesis import Phase, given, settings

from ntp_plugin.planning import (
    batch_split,
    copy_placement,
    core_route,
    dealing,
    lanes,
    parity_groups,
    sequence_rows,
    shard_layout,
    transfers,
)
from ntp_plugin.planning import spans as sp
from ntp_plugin.reduction import core_slices
from tests.unit import properties
from tests.unit.strategies import families_with_patterns, jobs_with_experts, situations, situations_with_joiners
from tests.unit.test_batch_split import batches
from tests.unit.test_copy_placement import clusters
from tests.unit.test_lanes import degraded_jobs
from tests.unit.test_parity_groups import parity_clusters
from tests.unit.test_sequence_rows import cuts


def swap_first_two_owners(sound):
    """Wrong owner: the first unit of the first slot is given to the next slot too."""

    def broken(family, tp, pattern=()):
        layout = sound(family, tp, pattern)
        first, *others = [slot for slot, units in enumerate(layout.holdings) if units]
        holdings = list(layout.holdings)
        if others:
            holdings[others[0]] = (*holdings[others[0]], (holdings[first][0][0], holdings[first][0][0] + 1))
        return dataclasses.replace(layout, holdings=tuple(holdings))

    return broken


def cut_one_too_far(sound):
    """Off by one: every part but the last takes one from the next."""

    def broken(count, parts):
        sizes = sound(count, parts)
        if parts > 1 and sizes[-1]:
            sizes[0], sizes[-1] = sizes[0] + 1, sizes[-1] - 1
        return sizes

    return broken


def deal_all_to_the_next(_sound):
    """Unbalanced: the next place in the ring is offered everything, whatever its room."""

    class Greedy(dealing._Table):
        def admit(self, holder, wanted):
            return wanted if holder in self._room else 0

    return Greedy


def dealt_before_kept(sound):
    """Storage order: a survivor's orphans come first, so that its kept units are no prefix."""

    def broken(family, tp, pattern=()):
        layout = sound(family, tp, pattern)
        return dataclasses.replace(layout, holdings=tuple(tuple(reversed(units)) for units in layout.holdings))

    return broken


def forget_the_detours(sound):
    """Wrong members: a lane ignores where degraded replicas hold its units."""

    def broken(owners, patterns, degraded):
        return ()

    return broken


def lose_a_hop(sound):
    """A gradient is not sent to its core."""

    def broken(*args):
        assignment = sound(*args)
        return dataclasses.replace(assignment, hops=assignment.hops[1:])

    return broken


def in_storage_order(sound):
    """Both sides of a hop take the units in the order of their own memory."""
    return lambda *args: tuple(sorted(sound(*args)))


def twice_as_long_as_needed(sound):
    """The search for the shortest step does not find it."""
    return lambda crowd, micro_batches, stages: sound(crowd, micro_batches, stages) * 2


def one_too_many(sound):
    """A replica's limit is one above what fits, so the step is longer than planned."""
    return lambda self, step_ns, stages: sound(self, step_ns, stages) + 1


def copy_on_the_same_host(sound):
    """Copies are resettled without looking at failure domains."""

    def broken(node, nominal, placement, surplus):
        taken = {*placement.lost, *placement.holders(node), node}
        ring = ((nominal + step) % placement.nodes for step in range(placement.nodes))
        return next((holder for holder in ring if holder not in taken), None)

    return broken


def keep_a_parity_inside(sound):
    """A parity whose parity host is lost goes to the next living host, be it a member's."""
    return lambda nominal, nodes, surplus, _: sound(nominal, nodes, surplus, lambda host: host != nominal)


def share_inside_a_domain(_sound):
    """Hosts of one rack are taken for hosts of many."""
    return lambda *_: 1


def ask_the_dead(sound):
    """Units come from their old holder even if it is lost."""

    def broken(change, need):
        if need.holder is None:
            yield from sound(change, need)
        else:
            holder = dataclasses.replace(need.target, tp=need.holder)
            yield transfers._Source(slot=holder, origin=transfers.DOMAIN, span=need.span)

    return broken


def send_everything_twice(sound):
    """Each peer's part is sent again."""

    def broken(change, need):
        for source in sound(change, need):
            yield source
            yield dataclasses.replace(source, span=source.span)

    return broken


def forget_rejoined_slots(sound):
    """Groups that only got slots back move nothing."""
    return lambda change: {group for group in sound(change) if group in change.after.patterns}


def ask_the_empty(sound):
    """A new process is taken for the one that had its slot."""
    return lambda change, slot: slot in change.after.lost


def hold_pads(sound):
    """The last slot's pads are taken for rows of the sequence."""
    return lambda rows, place: (place * rows.stored, (place + 1) * rows.stored)


SOUND_LAY_OUT = shard_layout.lay_out
LAYOUT, BATCH, COPIES, PARITIES = families_with_patterns(), batches(), clusters(), parity_clusters()


def leave_orphans_alone(sound):
    """Lost: the experts of a lost slot go to nobody."""

    def broken(family, places, pattern):
        return [
            sp.intersection(units, ((place, place + 1),)) for place, units in enumerate(sound(family, places, pattern))
        ]

    return broken


MUTATIONS = [
    (
        shard_layout,
        "_of_one_number",
        leave_orphans_alone,
        properties.experts_are_once_in_each_group,
        jobs_with_experts(),
    ),
    (shard_layout, "lay_out", swap_first_two_owners, properties.layout_owns_every_unit_once, LAYOUT),
    (sp, "even_sizes", cut_one_too_far, properties.layout_is_as_even_as_can_be, LAYOUT),
    (dealing, "_Table", deal_all_to_the_next, properties.layout_is_as_even_as_can_be, LAYOUT),
    (shard_layout, "lay_out", dealt_before_kept, properties.survivors_keep_a_prefix, LAYOUT),
    (lanes, "_detours", forget_the_detours, properties.lanes_are_the_owner_tuples, degraded_jobs()),
    (core_route, "_assign_cores", lose_a_hop, properties.both_routes_give_every_slot_the_same_sums, degraded_jobs()),
    (core_route, "_assign_cores", lose_a_hop, properties.cores_get_their_units_and_give_them_back, degraded_jobs()),
    (
        core_slices,
        "local_ranges",
        in_storage_order,
        properties.cores_get_their_units_and_give_them_back,
        degraded_jobs(),
    ),
    (
        batch_split,
        "shortest_step_ns",
        twice_as_long_as_needed,
        properties.strict_split_is_exact_and_the_shortest,
        BATCH,
    ),
    (
        batch_split.ReplicaPace,
        "most_within",
        one_too_many,
        properties.strict_split_is_exact_and_the_shortest,
        BATCH,
    ),
    (copy_placement, "_lightest_host", copy_on_the_same_host, properties.far_copies_are_far, COPIES),
    (parity_groups, "lightest_host", keep_a_parity_inside, properties.parities_protect, PARITIES),
    (parity_groups, "domain_size", share_inside_a_domain, properties.parities_protect, PARITIES),
    (transfers, "_sources", ask_the_dead, properties.transfers_turn_one_layout_into_the_next, situations()),
    (transfers, "_sources", send_everything_twice, properties.transfers_turn_one_layout_into_the_next, situations()),
    (
        transfers,
        "_changed_groups",
        forget_rejoined_slots,
        properties.transfers_turn_one_layout_into_the_next,
        situations(),
    ),
    (
        transfers.Change,
        "holds_nothing",
        ask_the_empty,
        properties.transfers_turn_one_layout_into_the_next,
        situations_with_joiners(),
    ),
    (
        sequence_rows.SequenceRows,
        "held",
        hold_pads,
        properties.rows_are_held_once_in_order,
        cuts.map(lambda rows: (rows,)),
    ),
]


def run_over_examples(check, cases):
    """The check over the same examples each time; the first that fails is raised as it is."""

    @settings(max_examples=300, derandomize=True, database=None, phases=[Phase.generate])
    @given(cases)
    def over(case):
        check(*case)

    over()


@pytest.mark.parametrize(
    "mutation", MUTATIONS, ids=[f"{broken.__name__}-{check.__name__}" for _, _, broken, check, _ in MUTATIONS]
)
def test_a_planted_bug_is_detected(monkeypatch, mutation):
    room, function, broken, check, cases = mutation
    run_over_examples(check, cases)
    SOUND_LAY_OUT.cache_clear()
    monkeypatch.setattr(room, function, broken(getattr(room, function)))
    try:
        with pytest.raises(AssertionError):
            run_over_examples(check, cases)
    finally:
        SOUND_LAY_OUT.cache_clear()
