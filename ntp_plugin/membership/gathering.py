"""Aggregates the values that all members of a view write for all to read. Without it N members would read N keys each,
and one store answer N x N requests.

Members are ordered as in the view. Up to `fan` members read each other's values directly. With more, the first of each
`fan` members combines their values into one, the first of each `fan` of such values combines these, and so on until no
more than `fan` are left; those are what all read:

    KIND/E/SLOT             a member's own value
    KIND/E/LEVEL.INDEX      the values of `fan ** LEVEL` members, from the one at `INDEX * fan ** LEVEL` on

This adds no member to wait for: a member combines values while it waits for all of them itself, and what it waits for
last depends on what it has combined. If it dies before that, its loss makes another view, with its own tree.

Pure: no clock, no store. Every key is written once, so a value that was read need not be read again.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping

FAN = 8
"""As many as most hosts have ranks; the ranks of a host are neighbours in a view."""

type Read = Callable[[str], str | None]
"""Returns the value of a key, or None while it does not exist."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Write:
    """A key to create with this value, unless it exists."""

    key: str
    value: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gathering:
    """The aggregation of one value per member of an epoch."""

    kind: str
    epoch: int
    slots: tuple[int, ...]
    fan: int = FAN

    def __post_init__(self) -> None:
        assert self.fan > 1, "combining values must leave fewer"

    def own_key(self, slot: int) -> str:
        """Key of a member's own value."""
        return f"{self.kind}/{self.epoch}/{slot}"

    def gathers(self, slot: int) -> bool:
        """Return True if others wait for values that this member combines."""
        return self._levels > 0 and self.slots.index(slot) % self.fan == 0

    def due(self, slot: int, read: Read) -> Write | None:
        """Return the next combined value that this member has to write, if all its parts exist."""
        place = self.slots.index(slot)
        for level in range(1, self._levels + 1):
            index, beside = divmod(place, self.fan**level)
            if beside:
                return None
            if read(self._key(level, index)) is None:
                parts = list(self._parts(level, index))
                if any(read(self._key(*part)) is None for part in parts):
                    return None
                return Write(key=self._key(level, index), value=json.dumps(self._together(parts, read)))
        return None

    def complete(self, read: Read) -> bool:
        """Return True if all values that every member reads exist."""
        return all(read(self._key(*node)) is not None for node in self._top())

    def values(self, read: Read) -> dict[int, str]:
        """Slot -> its value, for the values that exist."""
        return dict(self._together(self._top(), read))

    def late(self, read: Read) -> tuple[int, ...]:
        """The slots that delay all others: their own value, or a combined value that is due, is missing."""
        return tuple(sorted({self._writer(*node) for top in self._top() for node in self._missing(top, read)}))

    def _missing(self, node: tuple[int, int], read: Read) -> list[tuple[int, int]]:
        if read(self._key(*node)) is not None:
            return []
        return [found for part in self._parts(*node) for found in self._missing(part, read)] or [node]

    def _writer(self, level: int, index: int) -> int:
        first: int = index * self.fan**level
        return self.slots[first]

    @functools.cached_property
    def _levels(self) -> int:
        """Number of levels of combined values."""
        levels = 0
        while self.fan ** (levels + 1) < len(self.slots):
            levels += 1
        return levels

    def _top(self) -> list[tuple[int, int]]:
        return [(self._levels, index) for index in range(-(-len(self.slots) // self.fan**self._levels))]

    def _parts(self, level: int, index: int) -> Iterator[tuple[int, int]]:
        """The nodes that a value is combined from."""
        if level:
            below = -(-len(self.slots) // self.fan ** (level - 1))
            for part in range(index * self.fan, min((index + 1) * self.fan, below)):
                yield level - 1, part

    def _key(self, level: int, index: int) -> str:
        return f"{self.kind}/{self.epoch}/{level}.{index}" if level else self.own_key(self.slots[index])

    def _together(self, nodes: list[tuple[int, int]], read: Read) -> Mapping[int, str]:
        found: dict[int, str] = {}
        for level, index in nodes:
            text = read(self._key(level, index))
            if text is not None:
                found.update(_decoded(text) if level else {self.slots[index]: text})
        return found


def _decoded(text: str) -> dict[int, str]:
    return {int(slot): value for slot, value in json.loads(text).items()}
