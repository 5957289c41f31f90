"""Which slots are lost, which torch rank is which slot, what a slot holds. PURE.

Slots are numbered as Megatron numbers ranks (TP fastest, then replicas, then stages), as if nobody were lost. The
present processes take the torch ranks in that order. The nominal number of replicas follows from the number of started
processes and of lost slots.

A *column* is the set of slots, one of each stage, between which activations go. A full-width replica has one column for
each TP slot. All slots of a stage have the same activations, so in a column that has lost a slot another slot of that
stage stands in: the survivors in turn.

A replica that has lost all slots of a stage goes on without it, if layers may move (`planning/layer_cuts.py`). Its
columns have no slot of that stage, and the other stages keep their numbers.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Sequence

from ntp_plugin.config.sections import Parallel
from ntp_plugin.errors import ConfigError, Refused
from ntp_plugin.planning.expert_groups import groups_of, in_group, members
from ntp_plugin.planning.layer_cuts import Layers, place_layers
from ntp_plugin.planning.shard_layout import lay_out
from ntp_plugin.planning.spans import Spans
from ntp_plugin.planning.topology import Pattern, Slot, SurvivingReplicas, Topology, parse_slots
from ntp_plugin.planning.units import Family

SHARED = "shared vocabulary"
"""The family of a word embedding that is in both the first and the last stage."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The nominal layout without the lost slots, as one of its ranks sees it. Slots of replicas that are too narrow to
    go on are `idle`: they are present, and train nothing."""

    topology: Topology
    lost: frozenset[Slot]
    rank: int
    idle: frozenset[Slot] = frozenset()
    layers: Layers | None = None
    """Set if layers may move to other stages."""

    @property
    def degraded(self) -> bool:
        """Whether any slot is lost."""
        return bool(self.lost)

    @functools.cached_property
    def present(self) -> tuple[Slot, ...]:
        """The present slots, by torch rank."""
        everybody = (self.topology.slot_of(number) for number in range(self.topology.size))
        return tuple(slot for slot in everybody if slot not in self.lost)

    @functools.cached_property
    def slots(self) -> tuple[Slot, ...]:
        """The slots that train."""
        return tuple(slot for slot in self.present if slot not in self.idle)

    @functools.cached_property
    def ranks(self) -> dict[Slot, int]:
        """The torch rank of each slot that trains."""
        return {slot: rank for rank, slot in enumerate(self.present) if slot not in self.idle}

    @property
    def slot(self) -> Slot:
        """This rank's slot."""
        return self.present[self.rank]

    @property
    def is_idle(self) -> bool:
        """Whether this rank trains nothing."""
        return self.slot in self.idle

    @functools.cached_property
    def surviving(self) -> SurvivingReplicas:
        lost = self.lost | self.idle
        placement = None if self.layers is None else place_layers(self.topology, lost, 1, self.layers)
        return SurvivingReplicas(topology=self.topology, lost=lost, min_tp_width=1, placement=placement)

    @functools.cached_property
    def stages(self) -> tuple[int, ...]:
        """The stages of this rank's replica, first to last."""
        return tuple(self.surviving.stages(self.slot.replica))

    @property
    def is_held_once(self) -> bool:
        """Whether only one replica still trains, so that no other rank holds what it holds."""
        return len({slot.replica for slot in self.slots}) == 1

    @property
    def pattern(self) -> Pattern:
        """The slots that this rank's group has lost."""
        return self.surviving.pattern(self.slot.replica, self.slot.stage)

    @property
    def survivors(self) -> list[int]:
        """The present TP slots of this rank's group, in the order of its ranks."""
        return [tp for tp in range(self.topology.tp) if tp not in self.pattern]

    @property
    def width(self) -> int:
        """The TP degree of this rank's group."""
        return len(self.survivors)

    @property
    def context(self) -> int:
        """The context group of this rank's replica; without context parallelism, the replica."""
        return self.topology.context_of(self.slot.replica)

    @property
    def context_degree(self) -> int:
        """How many replicas share the sequences of this rank's context group."""
        return len(self.surviving.sharing(self.context))

    @property
    def is_context_leader(self) -> bool:
        """Whether this replica stands for its context group in sums in which all of its replicas have the same value.
        Without context parallelism every replica is a group of its own."""
        return self.topology.cp == 1 or self.surviving.sharing(self.context)[:1] == (self.slot.replica,)

    @property
    def is_replica_leader(self) -> bool:
        """Whether this slot contributes for its group to sums in which all of its slots have the same value."""
        return self.slot.tp == self.survivors[0]

    @property
    def first(self) -> bool:
        """Whether this is the first stage, the one with the embedding."""
        return self.slot.stage == self.stages[0]

    @property
    def last(self) -> bool:
        """Whether this is the last stage, the only one with losses."""
        return self.slot.stage == self.stages[-1]

    def held(self, family: Family) -> Spans:
        """Return the units of a family that this slot holds, in storage order."""
        if family.is_experts:
            return lay_out(family, self.topology.expert_slots, self.expert_pattern).holdings[self.expert_place.tp]
        return self.held_by(family)[self.slot.tp]

    def held_by(self, family: Family) -> Sequence[Spans]:
        """Return the same for every TP slot of this rank's group; a lost one holds nothing."""
        return lay_out(family, self.topology.tp, self.pattern).holdings

    # ------------------------------------------------ experts

    @property
    def expert_place(self) -> Slot:
        """This slot's place in its expert group."""
        return in_group(self.topology, self.slot)

    @functools.cached_property
    def expert_pattern(self) -> Pattern:
        """The places of this rank's expert group that train nothing."""
        place = self.expert_place
        return groups_of(self.surviving).pattern(place.replica, place.stage)

    @property
    def sends_experts_elsewhere(self) -> bool:
        """Whether experts of this rank's group are on other slots than nominally."""
        return bool(self.topology.expert_slots and self.expert_pattern)

    @functools.cached_property
    def reduced_expert_groups(self) -> tuple[tuple[Slot, ...], ...]:
        """The slots that train of every expert group that has lost some, by stage and group."""
        if not self.topology.expert_slots:
            return ()
        patterns = groups_of(self.surviving).patterns
        found = (members(self.surviving, group, stage) for group, stage in sorted(patterns))
        return tuple(slots for slots in found if slots)

    def without_lost(self, groups: Iterable[Iterable[int]]) -> list[list[int]]:
        """Return groups of nominal ranks as groups of torch ranks, without groups that have lost all ranks."""
        slots = ([self.topology.slot_of(number) for number in group] for group in groups)
        living = ([self.ranks[slot] for slot in group if slot in self.ranks] for group in slots)
        return [group for group in living if group]

    # ------------------------------------------------ columns

    def column(self, replica: int, tp: int) -> tuple[Slot, ...]:
        """Return the slots of a column, first stage to last."""
        stages = self.surviving.stages(replica)
        return tuple(self.in_column(Slot(replica=replica, stage=stage, tp=tp)) for stage in stages)

    def in_column(self, slot: Slot) -> Slot:
        """Return who is in this slot's place in its column: the slot itself unless it is lost."""
        pattern = self.surviving.pattern(slot.replica, slot.stage)
        if slot.tp not in pattern:
            return slot
        survivors = [tp for tp in range(self.topology.tp) if tp not in pattern]
        return dataclasses.replace(slot, tp=survivors[pattern.index(slot.tp) % len(survivors)])

    def receivers(self, stage: int) -> tuple[Slot, ...]:
        """Return the slots of another stage of this replica that this one sends to: those in whose columns it is."""
        group = self.topology.group(self.slot.replica, stage)
        return tuple(
            slot
            for slot in group
            if slot in self.ranks and self.in_column(dataclasses.replace(self.slot, tp=slot.tp)) == self.slot
        )

    def columns(self, groups: Iterable[Iterable[int]]) -> list[list[int]]:
        """Return pipeline groups of nominal ranks as columns of torch ranks, without groups that have lost all
        ranks."""
        found = []
        for first, *_ in groups:
            slot = self.topology.slot_of(first)
            column = self.column(slot.replica, slot.tp)
            if any(member.tp == slot.tp for member in column):
                found.append([self.ranks[member] for member in column])
        return found


def plan_start(lost: Sequence[str], *, tp: int, pp: int, processes: int, rank: int) -> Layout:
    """Return the layout of this number of processes, without the slots named as lost."""
    problem: ConfigError | None = None
    for dp in range(-(-processes // (tp * pp)), processes + 1):
        topology = Topology.of(Parallel(tp=tp, pp=pp, dp=dp))
        try:
            named = parse_slots(lost, topology)
        except ConfigError as error:  # a slot may belong to a replica beyond this dp: try more
            problem = error
            continue
        if topology.size - len(named) == processes:
            layout = Layout(topology=topology, lost=named, rank=rank)
            lost_stages(layout)  # refuses a replica without a slot
            return layout
        problem = None
    raise problem or ConfigError(
        f"{processes} processes are not full-width replicas of TP {tp} x PP {pp} but for {', '.join(lost) or 'nobody'}",
        fix="start one process for each slot that is not lost",
    )


def lost_stages(layout: Layout) -> list[tuple[int, int]]:
    """Return (replica, stage) of each stage that has lost all of its slots; raises if a replica has no stage left."""
    topology = layout.topology
    found = [group for group, pattern in layout.surviving.patterns.items() if len(pattern) == topology.tp]
    for replica, lost in Counter(replica for replica, _ in found).items():
        if lost == topology.pp:
            raise Refused(
                f"replica {replica} has no slot left",
                fix="leave the replica out: start fewer processes, and divide the global batch by their number",
            )
    return found
