"""Plans which experts change slots when an expert group loses places or gets them back, and where their state is.

The slots of a group that has lost places have more experts than nominally, so they need more memory. The state of these
comes from copies in memory, also where another expert group has the same ones: all ranks go back to the step of the
copies.
"""

import dataclasses
from collections import Counter

from ntp_plugin.config.sections import State
from ntp_plugin.errors import StateLost
from ntp_plugin.planning.expert_groups import GroupLoad, alike_in_experts, groups_of, in_job, living_groups, members
from ntp_plugin.planning.memory_fit import MemoryUse, memory_use
from ntp_plugin.planning.shard_layout import lay_experts_out, lay_out, overlay
from ntp_plugin.planning.topology import WHOLE, Pattern, Slot, SurvivingReplicas
from ntp_plugin.planning.transfers import Change, copy_reader


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpertDeal:
    """Experts of each layer, or column parts of them, that `target` has in place of `holder`.

    `size` is that of their weights and optimizer state, in bytes.
    """

    holder: Slot
    target: Slot
    experts: int
    size: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpertGroupChange:
    """A stage of an expert group that loses places or gets them back, and trained before.

    Attributes:
        group: The number of the group.
        stage: The stage.
        members: The slots that train, in the order of their places.
        before: The places that held nothing before.
        after: Those that hold nothing now.
        fullest: The experts of each layer on the fullest slot, before and now.
        ideal: The least number that so many slots allow now.
        deals: Which experts change slots.
        memory_before: Memory of the fullest slot before.
        memory_after: The same now.
    """

    group: int
    stage: int
    members: tuple[Slot, ...]
    before: Pattern
    after: Pattern
    fullest: tuple[int, int]
    ideal: int
    deals: tuple[ExpertDeal, ...]
    memory_before: MemoryUse
    memory_after: MemoryUse


def plan_expert_groups(change: Change) -> tuple[ExpertGroupChange, ...]:
    """List the expert groups that train before and after a change, and whose places change, by group and stage."""
    if not change.after.topology.expert_slots:
        return ()
    before, after = groups_of(change.before), groups_of(change.after)
    places, keys = after.topology.tp, {*before.patterns, *after.patterns}
    patterns = {key: (before.pattern(*key), after.pattern(*key)) for key in sorted(keys)}
    return tuple(
        _changed(change, group, stage, *both)
        for (group, stage), both in patterns.items()
        if both[0] != both[1] and max(map(len, both)) < places
    )


def require_expert_state(change: Change) -> None:
    """Raise `StateLost` unless what each newly lost slot held is copied, or some other slot holds the same."""
    before, after = change.before, change.after
    for slot in sorted(after.lost - before.lost):
        sharded = change.state.distributed_optimizer
        alike = [slot] if sharded else alike_in_experts(after.topology, slot)
        if not any(copy_reader(change, other) or other not in after.lost for other in alike):
            raise StateLost(
                f"the experts of {slot} are held by no living slot, and copies of them are "
                + ("off" if change.copies is None else "on lost hosts"),
                fix="set copies.mode to copy" if change.copies is None else "set copies.far to a wider domain",
            )
    if change.copies is None and after.lost - before.lost:
        raise StateLost(
            "a job with experts restores what a lost slot held from copies, and copies are off",
            fix="leave copies.mode = off out",
        )


def _changed(change: Change, group: int, stage: int, before: Pattern, after: Pattern) -> ExpertGroupChange:
    places, each = change.after.topology.expert_slots, change.units.experts_of_slot
    layouts = [lay_experts_out(places, each, pattern) for pattern in (before, after)]
    return ExpertGroupChange(
        group=group,
        stage=stage,
        members=members(change.after, group, stage),
        before=before,
        after=after,
        fullest=(layouts[0].widest, layouts[1].widest),
        ideal=layouts[1].ideal,
        deals=_deals(change, group, stage, before, after),
        memory_before=_memory(change, change.before, stage, before),
        memory_after=_memory(change, change.after, stage, after),
    )


def _deals(change: Change, group: int, stage: int, before: Pattern, after: Pattern) -> tuple[ExpertDeal, ...]:
    topology, state, units = change.after.topology, change.state, change.units.stages[stage]
    sharers = living_groups(change.after) if state.distributed_optimizer else 1
    counts, elements = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for family in units.experts:
        layouts = [lay_out(family, family.units, pattern) for pattern in (before, after)]
        for (start, stop), (holder, target) in overlay(layouts):
            if holder != target:
                counts[holder, target] += stop - start
                elements[holder, target] += (stop - start) * units.elements_per_unit[family.name]
    slots = [in_job(topology, Slot(replica=group, stage=stage, tp=place)) for place in range(topology.expert_slots)]
    return tuple(
        ExpertDeal(
            holder=slots[holder],
            target=slots[target],
            experts=count,
            size=_bytes(elements[holder, target], state, sharers),
        )
        for (holder, target), count in sorted(counts.items())
    )


def _bytes(elements: int, state: State, sharers: int) -> int:
    return elements * state.weight_bytes - (-elements * state.optimizer_bytes // sharers)


def _memory(change: Change, surviving: SurvivingReplicas, stage: int, pattern: Pattern) -> MemoryUse:
    return memory_use(
        change.units.stages[stage],
        surviving.topology.tp,
        WHOLE,
        change.state,
        replicas=len(surviving.replicas),
        packing=bool(pattern),
        load=GroupLoad(lost_places=pattern, expert_groups=living_groups(surviving)),
    )
