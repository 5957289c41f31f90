"""What every member of a view writes for all to read, put together on the way: else N members would read N keys each,
and one store answer N x N questions.

Members stand in the order of the view. Up to `fan` of them read what each has written. Of more, the first of every
`fan` in turn puts the values of these together into one, the first of every `fan` of such values does the same with
them, until no more than `fan` are left, and those are what all read:

    KIND/E/SLOT             a member's own value
    KIND/E/LEVEL.INDEX      the values of `fan ** LEVEL` members, from the one at `INDEX * fan ** LEVEL` on

Nobody is awaited for this who is not awaited anyway: a member puts values together while it waits for all of them
itself, and what it waits for last rests on what it has put together. If it dies before, that makes another view, with
a tree of its own.

Pure: no clock, no store. Every key is written once, so what was read once need not be read again.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping

FAN = 8
"""As many as most hosts have ranks, which stand side by side in a view."""

type Read = Callable[[str], str | None]
"""The value of a key, or None while nobody has created it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Write:
    """Create the key with this value, unless somebody has created it before."""

    key: str
    value: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gathering:
    """One value of each member of an epoch."""

    kind: str
    epoch: int
    slots: tuple[int, ...]
    fan: int = FAN

    def __post_init__(self) -> None:
        assert self.fan > 1, "putting values together leaves fewer"

    def own_key(self, slot: int) -> str:
        """Where a member's own value stands."""
        return f"{self.kind}/{self.epoch}/{slot}"

    def gathers(self, slot: int) -> bool:
        """Whether others wait for what this member puts together."""
        return self._levels > 0 and self.slots.index(slot) % self.fan == 0

    def due(self, slot: int, read: Read) -> Write | None:
        """What this member has to put together next, where all of that is there."""
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
        """Whether all values are there, in the places where all read them."""
        return all(read(self._key(*node)) is not None for node in self._top())

    def values(self, read: Read) -> dict[int, str]:
        """Slot -> its value, as far as they are there."""
        return dict(self._together(self._top(), read))

    def late(self, read: Read) -> tuple[int, ...]:
        """The slots that hold all others up: they have not written their own value, or not put together what is due."""
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
        """How often values are put together."""
        levels = 0
        while self.fan ** (levels + 1) < len(self.slots):
            levels += 1
        return levels

    def _top(self) -> list[tuple[int, int]]:
        return [(self._levels, index) for index in range(-(-len(self.slots) // self.fan**self._levels))]

    def _parts(self, level: int, index: int) -> Iterator[tuple[int, int]]:
        """What a value is put together from."""
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
