"""Plans which ranks reduce which units together: the direct route.

A unit's *owner tuple* names its slot in each surviving replica. The units with the same tuple form a lane, whose ranks
are a process group: its gradients are summed over the replicas without any traffic inside a TP group. Lanes are planned
for each segment of the model: for each stage, unless layers have moved. In a segment without losses the lanes are the
TP slots, like the framework's own data-parallel groups.

Replicas with the same pattern have the same owners, so lanes are computed per pattern and only written down per
replica: the work grows with the number of different patterns in a segment, not with the number of replicas.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from ntp_plugin.planning import spans as sp
from ntp_plugin.planning.shard_layout import lay_out, overlay
from ntp_plugin.planning.spans import Spans
from ntp_plugin.planning.topology import WHOLE, Pattern, Slot, SurvivingReplicas
from ntp_plugin.planning.units import ModelUnits, StageUnits

type UnitsByFamily = tuple[tuple[str, Spans], ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """A set of units with one owner in each replica: TP slot `tp`, except in the replicas of the `detours`."""

    segment: int
    tp: int
    detours: tuple[tuple[int, int], ...]
    units: UnitsByFamily

    def members(self, surviving: SurvivingReplicas) -> list[Slot]:
        """One slot per surviving replica, ascending."""
        elsewhere = dict(self.detours)
        return [
            surviving.slot_of(replica, self.segment, elsewhere.get(replica, self.tp)) for replica in surviving.replicas
        ]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SegmentLanes:
    """All lanes of a segment in a fixed order; replicated parameters use one more lane, over all ranks that have it."""

    segment: int
    patterns: tuple[Pattern, ...]
    lanes: tuple[Lane, ...]
    owners: tuple[tuple[int, ...], ...]

    def lanes_of(self, pattern: Pattern) -> Mapping[int, list[int]]:
        """TP slot -> indices of its lanes, in a group with that pattern."""
        column = self.patterns.index(pattern)
        result: defaultdict[int, list[int]] = defaultdict(list)
        for index, owners in enumerate(self.owners):
            result[owners[column]].append(index)
        return result


def segment_patterns(surviving: SurvivingReplicas, segment: int) -> tuple[Pattern, ...]:
    """The patterns of the groups that have the segment in surviving replicas, the undamaged one first; never empty."""
    degraded = surviving.patterns_of_segment(segment)
    any_whole = sum(len(replicas) for replicas in degraded.values()) < len(surviving.replicas)
    return ((WHOLE,) if any_whole else ()) + tuple(degraded)


def plan_lanes(surviving: SurvivingReplicas, units: StageUnits, segment: int) -> SegmentLanes:
    """The lanes of one segment."""
    tp, patterns = surviving.topology.tp, segment_patterns(surviving, segment)
    degraded = surviving.patterns_of_segment(segment)
    found: defaultdict[tuple[int, ...], dict[str, list[sp.Span]]] = defaultdict(dict)
    for family in units.families:
        for span, owners in overlay([lay_out(family, tp, pattern) for pattern in patterns]):
            found[owners].setdefault(family.name, []).append(span)
    lanes = tuple(
        Lane(
            segment=segment,
            tp=owners[0],
            detours=_detours(owners, patterns, degraded),
            units=tuple((name, sp.joined(spans)) for name, spans in found[owners].items()),
        )
        for owners in sorted(found)
    )
    return SegmentLanes(segment=segment, patterns=patterns, lanes=lanes, owners=tuple(sorted(found)))


def plan_shared_lanes(
    surviving: SurvivingReplicas, units: ModelUnits, family: str
) -> list[tuple[tuple[Slot, ...], Spans]]:
    """Plan the lanes of a family whose values several segments share: one owner in each replica and segment.

    Members are listed segment by segment, each lane with the spans that all its members hold. A family of one segment
    has no such lanes.
    """
    found = [
        (segment, part)
        for segment, segment_units in enumerate(units.stages)
        for part in segment_units.families
        if part.name == family
    ]
    if len(found) < 2:
        return []
    groups = [(replica, segment, part) for segment, part in found for replica in surviving.replicas]
    lanes: defaultdict[tuple[Slot, ...], list[sp.Span]] = defaultdict(list)
    layouts = [
        lay_out(part, surviving.topology.tp, surviving.pattern_of_segment(replica, segment))
        for replica, segment, part in groups
    ]
    for span, owners in overlay(layouts):
        members = (surviving.slot_of(r, segment, tp) for (r, segment, _), tp in zip(groups, owners, strict=True))
        lanes[tuple(members)].append(span)
    return [(members, sp.joined(lanes[members])) for members in sorted(lanes)]


def _detours(
    owners: tuple[int, ...], patterns: Sequence[Pattern], degraded: Mapping[Pattern, tuple[int, ...]]
) -> tuple[tuple[int, int], ...]:
    return tuple(
        sorted(
            (replica, owner)
            for owner, pattern in zip(owners, patterns, strict=True)
            if owner != owners[0]
            for replica in degraded[pattern]
        )
    )


def busiest_lane_count(lanes: SegmentLanes) -> int:
    """The most lanes that one rank is a member of."""
    return max(
        max(Counter(owners[column] for owners in lanes.owners).values()) for column in range(len(lanes.patterns))
    )
