"""The one rule: survivors keep, orphans are dealt.

Holders stand in a ring: the slots of a group, the replicas of a lane. Each holds some numbers: units, optimizer
elements, samples. Each survivor keeps what it holds, as far as its room goes. What is left without a holder is cut
into even runs, one for each of the other places in the ring from the next one on, and a run that finds its place
lost or full recoveries on round the ring until it finds room.

So a single loss spreads evenly and in runs as long as possible; a second loss leaves nearly all of the first deal
in place, whatever the order of the two; and nothing but who is lost decides, so that every survivor computes the
same answer alone.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from ntp_plugin.planning import spans as sp
from ntp_plugin.planning.spans import Spans


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Deal:
    """What each survivor kept and was dealt (both ascending), and what found no room."""

    kept: Mapping[int, Spans]
    dealt: Mapping[int, Spans]
    left: Spans


def deal(held: Sequence[Spans], *, room: Mapping[int, int], extra: int = 0) -> Deal:
    """Deal what the holders that have no room of their own (the lost) held, and what exceeds the room of others.

    `held[h]` is what holder `h` has nominally; `room[h]` is the most that survivor `h` may end with, and `extra` of
    the survivors may end with one more than that.
    """
    table = _Table(room, extra)
    kept: dict[int, Spans] = {}
    orphans: list[tuple[int, Spans]] = []
    for holder, spans in enumerate(held):
        kept_spans, orphaned = sp.split_at(spans, table.admit(holder, sp.size(spans)))
        if holder in room:
            kept[holder] = kept_spans
        if orphaned:
            orphans.append((holder, orphaned))
    walking = [
        (place, table.tp_slot(place, run))
        for holder, orphaned in orphans
        for place, run in _around(holder, orphaned, len(held))
    ]
    left = [table.recovery(place, run, len(held)) for place, run in walking]
    return Deal(
        kept=kept,
        dealt={holder: sp.union(*runs) for holder, runs in table.dealt.items()},
        left=sp.union(*left),
    )


class _Table:
    """The room that is left, counted down while dealing, and what each holder was dealt."""

    def __init__(self, room: Mapping[int, int], extra: int) -> None:
        self.dealt: dict[int, list[Spans]] = {holder: [] for holder in room}
        self._room = dict(room)
        self._extra = extra
        self._stretched: set[int] = set()
        self._total = sum(room.values()) + extra

    def admit(self, holder: int, wanted: int) -> int:
        """How many of `wanted` the holder takes; its room shrinks by as many."""
        if holder not in self._room:
            return 0
        taken = min(wanted, self._room[holder])
        self._room[holder] -= taken
        if taken < wanted and self._extra and holder not in self._stretched:
            self._stretched.add(holder)
            self._extra -= 1
            taken += 1
        self._total -= taken
        return taken

    def tp_slot(self, place: int, run: Spans) -> Spans:
        """Deal the run to the holder at a place; returns what found no room there."""
        seated, rest = sp.split_at(run, self.admit(place, sp.size(run)))
        if seated:
            self.dealt[place].append(seated)
        return rest

    def recovery(self, place: int, run: Spans, ring: int) -> Spans:
        """Deal the run to the holders after a place, as each has room; returns what found none anywhere."""
        for step in range(1, ring):
            if not run or not self._total:
                break
            run = self.tp_slot((place + step) % ring, run)
        return run


def _around(holder: int, orphaned: Spans, ring: int) -> Iterator[tuple[int, Spans]]:
    """Even runs of what `holder` had, each with its place, from the next one on round the ring."""
    others = min(ring - 1, sp.size(orphaned))
    runs = sp.even_cut(orphaned, others) if others else [orphaned]
    for index, run in enumerate(runs):
        yield (holder + 1 + index) % ring, run
