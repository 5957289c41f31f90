"""Which slices of a slot's tensors go to which core of its group, and where they lie there. PURE.

The route over the cores is planned in units (`planning/core_route.py`). This module describes it in the tensors of one
slot. A core keeps a *part* of each tensor: the units that it reduces, in the same order in every replica, so that the
parts of core number c have the same shape everywhere and are summed one to one.

Slots are numbered by their place among the living slots of their group, which is their rank in its process group.
"""

import dataclasses
from collections.abc import Collection, Mapping

from ntp_plugin.planning import spans as sp
from ntp_plugin.planning.core_route import CoreRoute
from ntp_plugin.planning.shard_layout import lay_out
from ntp_plugin.planning.spans import Spans
from ntp_plugin.planning.topology import Pattern
from ntp_plugin.planning.units import StageUnits
from ntp_plugin.reduction.gradient_lanes import Slice
from ntp_plugin.resharding.cuts import local_ranges, local_shape

type Slices = tuple[Slice, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoreSlices:
    """What one slot sends and receives, by place: `out` in its own tensors, `into` in the parts that it reduces.

    What stays on the slot is at its own `place`. A slot that is no core has no parts.
    """

    place: int
    core: int | None
    parts: Mapping[str, tuple[int, ...]]
    places: Mapping[str, Spans]
    """The ranges of the parts in the full tensors, along the dims that these are cut by."""
    out: tuple[Slices, ...]
    into: tuple[Slices, ...]
    moving: frozenset[str]
    """Tensors with units that move in this group, between any of its slots."""

    def only(self, names: Collection[str]) -> "CoreSlices":
        """The same for these tensors alone."""
        return dataclasses.replace(
            self,
            parts={name: shape for name, shape in self.parts.items() if name in names},
            places={name: places for name, places in self.places.items() if name in names},
            out=tuple(tuple(part for part in slices if part.name in names) for slices in self.out),
            into=tuple(tuple(part for part in slices if part.name in names) for slices in self.into),
            moving=self.moving.intersection(names),
        )


def find_core_slices(route: CoreRoute, units: StageUnits, *, tp: int, pattern: Pattern, slot: int) -> CoreSlices:
    """The slices of one TP slot, in a group with this pattern."""
    assignment = route.assignment(pattern)
    living = [other for other in range(tp) if other not in pattern]
    held = {family.name: lay_out(family, tp, pattern).holdings[slot] for family in units.families}
    core = assignment.tp_slots.index(slot) if slot in assignment.tp_slots else None
    reduced = dict(route.cores[core]) if core is not None else {}
    stays = {family: sp.intersection(sp.union(held[family]), sp.union(mine)) for family, mine in reduced.items()}
    lent, lent_to_me = {slot: stays}, {slot: stays}
    for hop in assignment.hops:
        if hop.source == slot:
            lent.setdefault(hop.target, {})[hop.family] = hop.units
        if hop.target == slot:
            lent_to_me.setdefault(hop.source, {})[hop.family] = hop.units
    tensors = [tensor for tensor, _ in units.tensors if tensor.family]

    def slices(storage: Mapping[str, Spans], wanted: Mapping[str, Spans]) -> Slices:
        found = (
            (tensor, local_ranges(tensor, storage[tensor.family], wanted[tensor.family]))
            for tensor in tensors
            if tensor.family in wanted
        )
        return tuple(Slice(name=tensor.name, dim=tensor.dim, ranges=ranges) for tensor, ranges in found if ranges)

    return CoreSlices(
        place=living.index(slot),
        core=core,
        parts={
            tensor.name: local_shape(tensor, reduced[tensor.family]) for tensor in tensors if reduced.get(tensor.family)
        },
        places={
            tensor.name: tensor.local_index(reduced[tensor.family]) for tensor in tensors if reduced.get(tensor.family)
        },
        out=tuple(slices(held, lent.get(other, {})) for other in living),
        into=tuple(slices(reduced, lent_to_me.get(other, {})) for other in living),
        moving=frozenset(
            tensor.name for tensor in tensors if any(hop.family == tensor.family for hop in assignment.hops)
        ),
    )
