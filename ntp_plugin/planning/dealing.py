"""Deals out what lost holders held. The one rule: survivors keep, orphans are dealt.

Holders form a ring: the slots of a group, or the replicas of a lane. Each holds some numbers: units, optimizer
elements, samples. Each survivor keeps what it holds, as far as it has room. The rest is cut into even runs, one for
each of the other places in the ring from the next one on. A run whose place is lost or full moves on round the ring
until it finds room.

So a single loss spreads evenly and in runs as long as possible; a second loss leaves nearly all of the first deal in
place, whatever the order of the two; and the result depends on the lost holders only, so that every survivor computes
it alone.
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
    """Deal what the lost holders (those without room) held, and what exceeds the room of others.

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
    placed = [
        (place, table.place_at(place, run))
        for holder, orphaned in orphans
        for place, run in _around(holder, orphaned, len(held))
    ]
    left = [table.place_after(place, rest, len(held)) for place, rest in placed]
    return Deal(
        kept=kept,
        dealt={holder: sp.union(*runs) for holder, runs in table.dealt.items()},
        left=sp.union(*left),
    )


class _Table:
    """The remaining room while dealing, and what each holder was dealt."""

    def __init__(self, room: Mapping[int, int], extra: int) -> None:
        self.dealt: dict[int, list[Spans]] = {holder: [] for holder in room}
        self._room = dict(room)
        self._extra = extra
        self._stretched: set[int] = set()
        self._total = sum(room.values()) + extra

    def admit(self, holder: int, wanted: int) -> int:
        """Return how many of `wanted` the holder takes, and take that from its room."""
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

    def place_at(self, place: int, run: Spans) -> Spans:
        """Deal the run to the holder at a place; return the part without room there."""
        taken, rest = sp.split_at(run, self.admit(place, sp.size(run)))
        if taken:
            self.dealt[place].append(taken)
        return rest

    def place_after(self, place: int, run: Spans, ring: int) -> Spans:
        """Deal the run to the holders after a place, as each has room; return the part without room anywhere."""
        for step in range(1, ring):
            if not run or not self._total:
                break
            run = self.place_at((place + step) % ring, run)
        return run


def _around(holder: int, orphaned: Spans, ring: int) -> Iterator[tuple[int, Spans]]:
    """Cut what `holder` had into even runs, each with its place, from the next one on round the ring."""
    others = min(ring - 1, sp.size(orphaned))
    runs = sp.even_cut(orphaned, others) if others else [orphaned]
    for index, run in enumerate(runs):
        yield (holder + 1 + index) % ring, run
