"""Silent corruption: who holds other bits than the others, of what all replicas hold alike. PURE.

Everybody tells a digest of each tensor's part that it has. The parts of one *whole* add up to the digest of the tensor,
however it is cut, so replica digests of different layouts can be compared. With three replica digests or more the most
frequent number is taken for right; of two that differ nobody can say which is wrong. Inside of a whole that is wrong
those slots are to blame whose part differs from the same part of a right one; where that is cut otherwise, all of them
may be.

Nearly always all are alike. Digests can be added, over tensors as over parts, so this is seen from a few sums of each
slot, in place of hundreds of digests with their names; the sums of replica digests can be compared that have the same
values.

A whole with values that are not finite (NaN, infinity) is wrong where another one has finite values there, also of two.
Where no whole has finite values the training has diverged by itself, the same in all.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Set

from ntp_plugin.copies.runs import MODULUS

type RecordedEvent = Mapping[str, tuple[str, str, str, int]]
"""What one slot has: a tensor's values -> among which replica digests they are, where all have the same values; the
one of these that they are of; which part of it; and their digest."""

type Sums = Mapping[tuple[str, str], int]
"""What one slot has: among which replica digests, and which one -> the sum of its digests."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Odd:
    """Values that are not the same in all replica digests: the slots to blame, or all if it cannot be said which are
    right."""

    values: str
    slots: tuple[int, ...]
    certain: bool
    replica_digests: int
    finite: bool = True
    """Whether the values of the slots to blame are finite."""


def sums_of(told: RecordedEvent) -> Sums:
    """Of one slot."""
    sums: defaultdict[tuple[str, str], int] = defaultdict(int)
    for among, whole, _, number in told.values():
        sums[among, whole] = (sums[among, whole] + number) % MODULUS
    return dict(sums)


def are_alike(sums: Iterable[Sums]) -> bool:
    """Whether no values are odd, by what all slots have. It may say no where none are, if replica digests lack some."""
    replica_digests: defaultdict[tuple[str, str], int] = defaultdict(int)
    for theirs in sums:
        for whole, number in theirs.items():
            replica_digests[whole] = (replica_digests[whole] + number) % MODULUS
    totals: dict[str, int] = {}
    return all(totals.setdefault(among, number) == number for (among, _), number in replica_digests.items())


def odd_ones(told: Mapping[int, RecordedEvent], not_finite: Mapping[int, Collection[str]] | None = None) -> list[Odd]:
    """The values that differ, those first of which it is known who is wrong.

    Args:
        told: slot -> what it has told.
        not_finite: slot -> the values of which its part is not finite.
    """
    parts: defaultdict[str, defaultdict[str, dict[int, tuple[str, int]]]] = defaultdict(lambda: defaultdict(dict))
    for slot, theirs in told.items():
        for values, (_, whole, part, number) in theirs.items():
            parts[values][whole][slot] = part, number
    found = [
        odd
        for values, replica_digests in parts.items()
        if (
            odd := _judged(
                values, replica_digests, {slot for slot, those in (not_finite or {}).items() if values in those}
            )
        )
    ]
    return sorted(found, key=lambda odd: (odd.finite, not odd.certain))


def _judged(
    values: str, replica_digests: Mapping[str, Mapping[int, tuple[str, int]]], not_finite: Set[int]
) -> Odd | None:
    totals = {whole: sum(number for _, number in held.values()) % MODULUS for whole, held in replica_digests.items()}
    (most, count), *others = Counter(totals.values()).most_common()
    if not others:
        return None
    spoilt = [whole for whole, held in replica_digests.items() if not_finite & held.keys()]
    if 0 < len(spoilt) < len(replica_digests):
        slots = not_finite & {slot for held in replica_digests.values() for slot in held}
        return Odd(
            values=values, slots=tuple(sorted(slots)), certain=True, replica_digests=len(replica_digests), finite=False
        )
    if count <= len(replica_digests) / 2:
        slots = {slot for held in replica_digests.values() for slot in held}
        return Odd(values=values, slots=tuple(sorted(slots)), certain=False, replica_digests=len(replica_digests))
    right = {pair for whole, held in replica_digests.items() if totals[whole] == most for pair in held.values()}
    wrong = {
        slot
        for whole, held in replica_digests.items()
        if totals[whole] != most
        for slot, pair in held.items()
        if pair not in right
    }
    return Odd(values=values, slots=tuple(sorted(wrong)), certain=True, replica_digests=len(replica_digests))
