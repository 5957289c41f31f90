"""Computes which slot of a group holds which units of a family.

A history-free function of (family, nominal TP, lost slots). The nominal layout is an even cut. After losses the
survivors keep their units and the orphans are dealt to them, within one unit of each other; kept units are a prefix of
the slot's local tensor. A contiguous family (vocabulary) is cut anew in order instead, because the framework finds a
row by comparing it with the slot's first and last.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

from ntp_plugin.planning import spans as sp
from ntp_plugin.planning.dealing import deal
from ntp_plugin.planning.spans import Span, Spans
from ntp_plugin.planning.topology import WHOLE, Pattern
from ntp_plugin.planning.units import Family, StageUnits


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamilyLayout:
    """The units of each TP slot in storage order; a lost slot has none."""

    family: Family
    pattern: Pattern
    holdings: tuple[Spans, ...]

    @functools.cached_property
    def widest(self) -> int:
        """The most units that a slot holds."""
        return max(sp.size(units) for units in self.holdings)

    @functools.cached_property
    def ideal(self) -> int:
        """The least size of the widest slot that so many survivors allow."""
        return -(-self.family.units // (len(self.holdings) - len(self.pattern)))

    @functools.cached_property
    def segments(self) -> tuple[tuple[int, int, int], ...]:
        """(start, stop, slot), ascending, every unit once."""
        return tuple(sorted((*span, slot) for slot, units in enumerate(self.holdings) for span in units))


@functools.lru_cache(maxsize=65_536)
def lay_out(family: Family, tp: int, pattern: Pattern = WHOLE) -> FamilyLayout:
    """The layout of a family in a group of nominal degree `tp` that lost the slots in `pattern`."""
    nominal = sp.even_cut(((0, family.units),), tp)
    survivors = [slot for slot in range(tp) if slot not in pattern]
    assert survivors, "a group without survivors has no layout"
    if not pattern:
        holdings = nominal
    elif family.is_experts:
        holdings = _of_one_number(family, tp, pattern)
    elif family.contiguous:
        cut = dict(zip(survivors, sp.even_cut(((0, family.units),), len(survivors)), strict=True))
        holdings = [cut.get(slot, ()) for slot in range(tp)]
    else:
        floor, larger = divmod(family.units, len(survivors))
        dealt = deal(nominal, room=dict.fromkeys(survivors, floor), extra=larger)
        assert not dealt.left, "the survivors have room for every unit"
        holdings = [sp.joined((*dealt.kept.get(slot, ()), *dealt.dealt.get(slot, ()))) for slot in range(tp)]
    return FamilyLayout(family=family, pattern=pattern, holdings=tuple(holdings))


def _of_one_number(family: Family, places: int, pattern: Pattern) -> list[Spans]:
    """Experts of all numbers are dealt together, so that no slot gets many more than others."""
    each = family.each
    together = lay_experts_out(places, each, pattern)
    return [
        sp.joined(
            (unit // each, unit // each + 1)
            for start, stop in units
            for unit in range(start, stop)
            if unit % each == family.number
        )
        for units in together.holdings
    ]


def lay_experts_out(places: int, each: int, pattern: Pattern) -> FamilyLayout:
    """The layout of all experts of a group together, in which a slot nominally has `each`."""
    return lay_out(Family(name="experts", units=places * each), places, pattern)


def place_elements(units: StageUnits, pattern: Pattern) -> list[int]:
    """Parameters of the routed experts in each living place of an expert group, ascending; empty without experts."""
    places = units.experts[0].units if units.experts else 0
    layouts = [lay_out(family, places, pattern) for family in units.experts]
    return [
        sum(sp.size(layout.holdings[place]) * units.elements_per_unit[layout.family.name] for layout in layouts)
        for place in range(places)
        if place not in pattern
    ]


def slot_elements(units: StageUnits, tp: int, pattern: Pattern) -> list[int]:
    """Parameters of each living slot of a group, without its routed experts, ascending by slot."""
    layouts = [lay_out(family, tp, pattern) for family in units.families]
    return [
        units.replicated_elements
        + sum(sp.size(layout.holdings[slot]) * units.elements_per_unit[layout.family.name] for layout in layouts)
        for slot in range(tp)
        if slot not in pattern
    ]


def overlay(layouts: Sequence[FamilyLayout]) -> Iterator[tuple[Span, tuple[int, ...]]]:
    """The units in runs that no layout cuts, each with its slot in every layout, ascending."""
    cuts = sorted({stop for layout in layouts for _, stop, _ in layout.segments} | {0})
    place = {cut: index for index, cut in enumerate(cuts)}
    slots: list[list[int]] = []
    for layout in layouts:
        slots.append([])
        for start, stop, slot in layout.segments:
            slots[-1] += [slot] * (place[stop] - place[start])
    return zip(itertools.pairwise(cuts), zip(*slots, strict=True), strict=True)
