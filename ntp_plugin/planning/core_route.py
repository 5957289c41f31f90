"""Plans the other route of gradients, over core slots inside each scale-up domain (the NTP paper's).

Every replica names as many *core* slots as its narrowest sibling has slots. The units are sharded over the cores as
that sibling holds them, and core number c of one replica reduces with core number c of all others, one to one. A slot
that holds a unit of another core sends its gradient there inside the domain and receives the sum. So there are few
process groups, each with much to do, at the price of two transfers through the domain.
"""

import dataclasses
from collections import defaultdict

from ntp_plugin.planning import spans as sp
from ntp_plugin.planning.lanes import segment_patterns
from ntp_plugin.planning.shard_layout import lay_out, overlay
from ntp_plugin.planning.spans import Spans
from ntp_plugin.planning.topology import Pattern, Slot, SurvivingReplicas
from ntp_plugin.planning.units import StageUnits


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hop:
    """Units whose gradients go from `source` to the core `target` before the reduction, and back after it."""

    source: int
    target: int
    family: str
    units: Spans


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CoreAssignment:
    """The cores of the groups of one pattern (`tp_slots[c]` is the TP slot of core c), and the units that hop to
    them."""

    pattern: Pattern
    tp_slots: tuple[int, ...]
    hops: tuple[Hop, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CoreRoute:
    """The via_core route of one segment; `cores[c]` lists the units that core `c` reduces, by family."""

    segment: int
    reference: Pattern
    cores: tuple[tuple[tuple[str, Spans], ...], ...]
    assignments: tuple[CoreAssignment, ...]

    def assignment(self, pattern: Pattern) -> CoreAssignment:
        """The assignment of the groups with this pattern."""
        return next(assignment for assignment in self.assignments if assignment.pattern == pattern)

    def members(self, core: int, surviving: SurvivingReplicas) -> list[Slot]:
        """The slots that are core number `core`, one per surviving replica, ascending."""
        tp_slots = {
            replica: self.assignment(surviving.pattern_of_segment(replica, self.segment)).tp_slots
            for replica in surviving.replicas
        }
        return [surviving.slot_of(replica, self.segment, tp_slots[replica][core]) for replica in surviving.replicas]


def plan_core_route(surviving: SurvivingReplicas, units: StageUnits, segment: int) -> CoreRoute:
    """Plan cores that hold units as the narrowest group with the segment does; of several patterns the first."""
    tp, patterns = surviving.topology.tp, segment_patterns(surviving, segment)
    reference = min(patterns, key=lambda pattern: (-len(pattern), pattern))
    home = [slot for slot in range(tp) if slot not in reference]
    layouts = {family.name: lay_out(family, tp, reference) for family in units.families}
    return CoreRoute(
        segment=segment,
        reference=reference,
        cores=tuple(tuple((name, layout.holdings[slot]) for name, layout in layouts.items()) for slot in home),
        assignments=tuple(_assign_cores(pattern, reference, home, units, tp) for pattern in patterns),
    )


def _assign_cores(pattern: Pattern, reference: Pattern, home: list[int], units: StageUnits, tp: int) -> CoreAssignment:
    """A core keeps its slot number where that slot lives; the others take the free living slots in order."""
    free = [slot for slot in range(tp) if slot not in pattern and slot not in home]
    tp_slots = tuple(slot if slot not in pattern else free.pop(0) for slot in home)
    slot_of_core = dict(zip(home, tp_slots, strict=True))
    moving: defaultdict[tuple[int, int, str], list[sp.Span]] = defaultdict(list)
    for family in units.families:
        for span, (holder, core) in overlay([lay_out(family, tp, pattern), lay_out(family, tp, reference)]):
            if holder != slot_of_core[core]:
                moving[holder, slot_of_core[core], family.name].append(span)
    hops = tuple(
        Hop(source=source, target=target, family=family, units=sp.joined(spans))
        for (source, target, family), spans in sorted(moving.items())
    )
    return CoreAssignment(pattern=pattern, tp_slots=tp_slots, hops=hops)
