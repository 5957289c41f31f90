"""Defines slots, the nominal layout, and the replicas that survive losses.

A slot is a place in the nominal layout, (replica, stage, TP slot), and never renumbers. Ranks follow Megatron's
default order: TP fastest, then context parallel, then data parallel, then pipeline; or, with `dp_last`, the pipeline
before data parallel. Hosts hold consecutive ranks.

A group is the TP slots of one stage of one replica. Its *pattern* is the ascending tuple of its lost TP slots; two
groups with the same pattern have the same layout. A replica with a group narrower than the minimum is dropped: its
living slots are idle.

With context parallelism, `cp` consecutive replicas are a *context group*: they compute every sample together, each with
its part of the sequence. Each holds all weights, so they are replicas like others wherever weights or gradients matter.
What a slot sends to the same slot of the others are its own heads, so all of a context group have the full width: a
replica that has lost a slot is dropped, and the others share the sequence. Their number has to divide `cp`, so that the
sequence divides as well; any others of them are idle.

If layers may move (`layer_placement.py`), a replica with a group narrower than the minimum goes on without that stage:
its other stages have all layers, and living slots of that group are idle. What holds for a run of layers, and not for a
stage, is then asked for by segment. Without a placement the segments are the stages.
"""

import dataclasses
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping

from ntp_plugin.config.sections import Parallel
from ntp_plugin.errors import BelowMinimum, ConfigError
from ntp_plugin.planning.layer_placement import LayerPlacement

type Pattern = tuple[int, ...]
WHOLE: Pattern = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Slot:
    """A place in the nominal layout, written r3.s1.t5."""

    replica: int
    stage: int
    tp: int

    def __str__(self) -> str:
        return f"r{self.replica}.s{self.stage}.t{self.tp}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """The nominal layout.

    Attributes:
        tp: The slots of a group.
        pp: The stages.
        dp: The replicas, each with all weights: in Megatron's words, its data-parallel degree times `cp`.
        cp: The replicas of a context group.
        dp_last: Whether ranks are numbered by stages before context groups.
        expert_slots: The ranks of an expert group (`expert_groups.py`); 0 without experts.
    """

    tp: int
    pp: int
    dp: int
    gpus_per_node: int
    nodes_per_rack: int
    racks_per_power_row: int
    cp: int = 1
    dp_last: bool = False
    expert_slots: int = 0

    @classmethod
    def of(cls, parallel: Parallel, *, experts: bool = False) -> "Topology":
        """The layout that the keys describe, of a model with or without experts."""
        known = {field.name for field in dataclasses.fields(cls)}
        same = {name: value for name, value in dataclasses.asdict(parallel).items() if name in known}
        slots = parallel.ep * parallel.expert_parts if experts else 0
        return cls(**{**same, "dp": parallel.dp * parallel.cp, "expert_slots": slots})

    @property
    def size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def nodes(self) -> int:
        return -(-self.size // self.gpus_per_node)

    def rank_of(self, slot: Slot) -> int:
        if self.dp_last:
            context, part = divmod(slot.replica, self.cp)
            return ((context * self.pp + slot.stage) * self.cp + part) * self.tp + slot.tp
        return (slot.stage * self.dp + slot.replica) * self.tp + slot.tp

    def slot_of(self, rank: int) -> Slot:
        group, tp = divmod(rank, self.tp)
        if self.dp_last:
            rest, part = divmod(group, self.cp)
            context, stage = divmod(rest, self.pp)
            return Slot(replica=context * self.cp + part, stage=stage, tp=tp)
        stage, replica = divmod(group, self.dp)
        return Slot(replica=replica, stage=stage, tp=tp)

    def node_of(self, slot: Slot) -> int:
        return self.rank_of(slot) // self.gpus_per_node

    def slots_on(self, node: int) -> list[Slot]:
        first = node * self.gpus_per_node
        return [self.slot_of(rank) for rank in range(first, min(first + self.gpus_per_node, self.size))]

    @property
    def degrees(self) -> str:
        """The layout as people write it: TP8 x PP2 x DP4, with CP before DP where there is some."""
        contexts = f"CP{self.cp} x " if self.cp > 1 else ""
        return f"TP{self.tp} x PP{self.pp} x {contexts}DP{self.contexts}"

    @property
    def narrows(self) -> bool:
        """Whether a replica that has lost a slot may go on with the others. One that shares sequences with other
        replicas, or sends tokens to experts, keeps its full width."""
        return self.cp == 1 and not self.expert_slots

    @property
    def contexts(self) -> int:
        """The number of context groups, which are what samples are shared out to."""
        return self.dp // self.cp

    def context_of(self, replica: int) -> int:
        """The context group of a replica."""
        return replica // self.cp

    def context_degree(self, living: int) -> int:
        """How many of the living replicas of a context group share the sequence."""
        return max((degree for degree in range(1, living + 1) if not self.cp % degree), default=0)

    def group(self, replica: int, stage: int) -> list[Slot]:
        return [Slot(replica=replica, stage=stage, tp=tp) for tp in range(self.tp)]


_NAME = re.compile(
    r"r(?P<replica>\d{1,9})(\.s(?P<stage>\d{1,9})(\.t(?P<tp>\d{1,9}))?)?|node(?P<node>\d{1,9})", re.ASCII
)


def parse_slots(words: Iterable[str], topology: Topology) -> frozenset[Slot]:
    """The slots that the words name: one slot, a stage of a replica, a replica, or a host; commas separate."""
    found: set[Slot] = set()
    for word in (part.strip() for text in words for part in text.split(",")):
        match = _NAME.fullmatch(word)
        if match is None:
            raise ConfigError(
                f"{word!r} does not name a slot", fix="write r3.s1.t5, a stage r3.s1, a replica r3, or a host node7"
            )
        found.update(_named(word, {part: int(text) for part, text in match.groupdict().items() if text}, topology))
    return frozenset(found)


def _named(word: str, parts: Mapping[str, int], topology: Topology) -> list[Slot]:
    counts = {"replica": topology.dp, "stage": topology.pp, "tp": topology.tp, "node": topology.nodes}
    letters = {"replica": "r", "stage": "s", "tp": "t", "node": "node"}
    for part, number in parts.items():
        if number >= counts[part]:
            letter = letters[part]
            raise ConfigError(
                f"{word} is not in this layout of dp = {topology.dp}, pp = {topology.pp}, tp = {topology.tp}",
                fix=f"{letter}0 to {letter}{counts[part] - 1} exist",
            )
    if "node" in parts:
        return topology.slots_on(parts["node"])
    stages = [parts["stage"]] if "stage" in parts else range(topology.pp)
    slots = [slot for stage in stages for slot in topology.group(parts["replica"], stage)]
    return [slots[parts["tp"]]] if "tp" in parts else slots


@dataclasses.dataclass(frozen=True, kw_only=True)
class SurvivingReplicas:
    """The replicas that survive losses: a pure function of (topology, lost slots, minimum width), and of where layers
    are, if they may move."""

    topology: Topology
    lost: frozenset[Slot]
    min_tp_width: int
    placement: LayerPlacement | None = None

    @property
    def narrowest(self) -> int:
        """The width below which a replica is dropped."""
        return self.min_tp_width if self.topology.narrows else self.topology.tp

    @functools.cached_property
    def patterns(self) -> Mapping[tuple[int, int], Pattern]:
        """(replica, stage) -> pattern, for every group that lost a slot."""
        groups: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for slot in sorted(self.lost):
            groups[slot.replica, slot.stage].append(slot.tp)
        return {group: tuple(lost) for group, lost in groups.items()}

    @functools.cached_property
    def dropped(self) -> frozenset[int]:
        """Replicas with a stage that is narrower than the minimum, and those that a context group has no use for."""
        most = self.topology.tp - self.narrowest
        narrow = frozenset(
            replica
            for (replica, stage), pattern in self.patterns.items()
            if len(pattern) > most and stage in self.stages(replica)
        )
        return narrow | self._without_a_part(narrow)

    def _without_a_part(self, narrow: Collection[int]) -> frozenset[int]:
        """The full-width replicas for which there is no part of the sequence."""
        cp, found = self.topology.cp, set[int]()
        for context in {self.topology.context_of(replica) for replica in narrow} if cp > 1 else ():
            whole = [replica for replica in range(context * cp, (context + 1) * cp) if replica not in narrow]
            found.update(whole[self.topology.context_degree(len(whole)) :])
        return frozenset(found)

    def sharing(self, context: int) -> tuple[int, ...]:
        """The replicas that share the sequences of a context group, ascending."""
        first, cp = context * self.topology.cp, self.topology.cp
        return tuple(replica for replica in range(first, first + cp) if replica not in self.dropped)

    @functools.cached_property
    def degraded(self) -> Mapping[tuple[int, int], Pattern]:
        """The patterns of the degraded groups of surviving replicas."""
        return {
            (replica, stage): pattern
            for (replica, stage), pattern in self.patterns.items()
            if replica not in self.dropped and stage in self.stages(replica)
        }

    @functools.cached_property
    def replicas(self) -> tuple[int, ...]:
        """The surviving replicas, ascending."""
        return tuple(replica for replica in range(self.topology.dp) if replica not in self.dropped)

    @functools.cached_property
    def degraded_replicas(self) -> frozenset[int]:
        """The surviving replicas with fewer slots in some stage, or without a stage."""
        moved = [] if self.placement is None else self.placement.moved
        return frozenset(replica for replica, _ in self.degraded) | {one for one in moved if one not in self.dropped}

    @functools.cached_property
    def lost_nodes(self) -> tuple[int, ...]:
        """Hosts that have lost all of their slots, so that their memory is out of reach. Ascending."""
        counts = Counter(self.topology.node_of(slot) for slot in self.lost)
        return tuple(sorted(node for node, lost in counts.items() if lost == len(self.topology.slots_on(node))))

    def pattern(self, replica: int, stage: int) -> Pattern:
        return self.patterns.get((replica, stage), WHOLE)

    def stages(self, replica: int) -> Collection[int]:
        """The stages of a replica that have layers, ascending."""
        return range(self.topology.pp) if self.placement is None else self.placement.stages(replica)

    def segments_of(self, replica: int, stage: int) -> tuple[int, ...]:
        """The segments that a stage of a replica has."""
        return (stage,) if self.placement is None else self.placement.segments_of(replica, stage)

    def stage_of(self, replica: int, segment: int) -> int:
        """The stage of a replica that has a segment."""
        return segment if self.placement is None else self.placement.stage_of(replica, segment)

    def slot_of(self, replica: int, segment: int, tp: int) -> Slot:
        """The TP slot of the stage of a replica that has a segment."""
        return Slot(replica=replica, stage=self.stage_of(replica, segment), tp=tp)

    def pattern_of_segment(self, replica: int, segment: int) -> Pattern:
        """The pattern of the group that has a segment."""
        return self.pattern(replica, self.stage_of(replica, segment))

    def patterns_of_segment(self, segment: int) -> Mapping[Pattern, tuple[int, ...]]:
        """The patterns of the degraded groups that have a segment in surviving replicas, each with its replicas,
        ascending."""
        return self._degraded_by_segment.get(segment, {})

    @functools.cached_property
    def _degraded_by_segment(self) -> Mapping[int, Mapping[Pattern, tuple[int, ...]]]:
        segments: defaultdict[int, defaultdict[Pattern, list[int]]] = defaultdict(lambda: defaultdict(list))
        for (replica, stage), pattern in sorted(self.degraded.items()):
            for segment in self.segments_of(replica, stage):
                segments[segment][pattern].append(replica)
        return {
            segment: {pattern: tuple(replicas) for pattern, replicas in sorted(patterns.items())}
            for segment, patterns in segments.items()
        }

    @functools.cached_property
    def is_nominally_cut(self) -> bool:
        """Whether all replicas that train have each layer on its nominal stage."""
        return self.placement is None or not any(replica in self.placement.moved for replica in self.replicas)

    def idle(self) -> list[Slot]:
        """Living slots of dropped replicas, and of stages without layers, ascending."""
        topology = self.topology
        moved = () if self.placement is None else self.placement.moved
        return [
            slot
            for replica in sorted({*self.dropped, *moved})
            for stage in range(topology.pp)
            if replica in self.dropped or stage not in self.stages(replica)
            for slot in topology.group(replica, stage)
            if slot not in self.lost
        ]

    def require_a_replica(self) -> None:
        """Raise unless at least one replica may train."""
        if not self.replicas:
            widest = max(
                min(self.topology.tp - len(self.pattern(replica, stage)) for stage in range(self.topology.pp))
                for replica in range(self.topology.dp)
            )
            needs, fix = f"min_tp_width is {self.min_tp_width}", "lower min_tp_width, bring slots back, or"
            if not self.topology.narrows:
                why = "context parallelism" if self.topology.cp > 1 else "experts"
                needs, fix = f"with {why} a replica needs all of them", "bring slots back, or"
            raise BelowMinimum(
                f"no replica is left: the best of {self.topology.dp} has a stage with {widest} of {self.topology.tp} "
                f"TP slots, and {needs}",
                fix=f"{fix} restart from a checkpoint",
            )
