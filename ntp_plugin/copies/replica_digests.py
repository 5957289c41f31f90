"""Finds the slots whose bits differ from those of other replicas, in state that all replicas share. PURE.

Each slot reports a digest of its part of every tensor. The digests of all parts of one *whole*, a complete instance of
a tensor, add up to the digest of the tensor, however it is cut. So instances in different layouts can be compared. Of
three instances or more the most frequent digest is taken for right; of two that differ nobody can say which is wrong.
Within a wrong instance the slots are to blame whose part differs from the same part of a right one; if that is cut
otherwise, any of them may be.

Nearly always all instances are the same. Digests can be added over tensors as over parts, so a few sums of each slot
show this, instead of hundreds of digests with their names. Sums can be compared for instances that have the same
values.

An instance with values that are not finite (NaN, infinity) is wrong if another one has finite values there, also of
two. If no instance has finite values, the training has diverged by itself, the same everywhere.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Set

from ntp_plugin.copies.runs import MODULUS

type SlotDigests = Mapping[str, tuple[str, str, str, int]]
"""The digests of one slot. A tensor's values -> their class, whose instances all have the same values; the instance
that they belong to; which part of it they are; and their digest."""

type Sums = Mapping[tuple[str, str], int]
"""The sums of one slot: class and instance -> the sum of its digests."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Odd:
    """Values that differ between instances: the slots to blame, or all slots if nobody can say which are right."""

    values: str
    slots: tuple[int, ...]
    certain: bool
    instances: int
    finite: bool = True
    """Whether the values of the slots to blame are finite."""


def sums_of(digests: SlotDigests) -> Sums:
    """Add up the digests of one slot."""
    sums: defaultdict[tuple[str, str], int] = defaultdict(int)
    for among, whole, _, number in digests.values():
        sums[among, whole] = (sums[among, whole] + number) % MODULUS
    return dict(sums)


def are_alike(sums: Iterable[Sums]) -> bool:
    """Whether no values are odd, by the sums of all slots.

    It may return False without odd values if some instances lack parts.
    """
    instances: defaultdict[tuple[str, str], int] = defaultdict(int)
    for theirs in sums:
        for whole, number in theirs.items():
            instances[whole] = (instances[whole] + number) % MODULUS
    totals: dict[str, int] = {}
    return all(totals.setdefault(among, number) == number for (among, _), number in instances.items())


def odd_ones(digests: Mapping[int, SlotDigests], not_finite: Mapping[int, Collection[str]] | None = None) -> list[Odd]:
    """Find the values that differ, those first whose wrong slots are known.

    Args:
        digests: The digests of each slot.
        not_finite: Slot -> the values of which its part is not finite.
    """
    parts: defaultdict[str, defaultdict[str, dict[int, tuple[str, int]]]] = defaultdict(lambda: defaultdict(dict))
    for slot, theirs in digests.items():
        for values, (_, whole, part, number) in theirs.items():
            parts[values][whole][slot] = part, number
    found = [
        odd
        for values, instances in parts.items()
        if (odd := _judged(values, instances, {slot for slot, those in (not_finite or {}).items() if values in those}))
    ]
    return sorted(found, key=lambda odd: (odd.finite, not odd.certain))


def _judged(values: str, instances: Mapping[str, Mapping[int, tuple[str, int]]], not_finite: Set[int]) -> Odd | None:
    totals = {whole: sum(number for _, number in held.values()) % MODULUS for whole, held in instances.items()}
    (most, count), *others = Counter(totals.values()).most_common()
    if not others:
        return None
    spoilt = [whole for whole, held in instances.items() if not_finite & held.keys()]
    if 0 < len(spoilt) < len(instances):
        slots = not_finite & {slot for held in instances.values() for slot in held}
        return Odd(values=values, slots=tuple(sorted(slots)), certain=True, instances=len(instances), finite=False)
    if count <= len(instances) / 2:
        slots = {slot for held in instances.values() for slot in held}
        return Odd(values=values, slots=tuple(sorted(slots)), certain=False, instances=len(instances))
    right = {pair for whole, held in instances.items() if totals[whole] == most for pair in held.values()}
    wrong = {
        slot
        for whole, held in instances.items()
        if totals[whole] != most
        for slot, pair in held.items()
        if pair not in right
    }
    return Odd(values=values, slots=tuple(sorted(wrong)), certain=True, instances=len(instances))
