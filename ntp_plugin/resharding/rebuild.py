"""One tensor on one slot: builds its new part beside the old one, and compares digests of both with the other slots.

Kept units are copied, the others come from their holders; so does every optimizer entry that has the tensor's shape.
Tensors that do not move are digested as well, because everything is compared before anybody trains.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch

from ntp_plugin.copies import digest
from ntp_plugin.copies.runs import MODULUS, runs_of
from ntp_plugin.errors import StateLost
from ntp_plugin.groups.exchange import Parcel
from ntp_plugin.planning import spans as sp
from ntp_plugin.planning.spans import Spans
from ntp_plugin.planning.units import Tensor
from ntp_plugin.resharding.cuts import Recut, global_ranges, local_ranges, local_shape

WEIGHT, MAIN = "weight", "main"
"""The entries for the parameter itself and for the copy of it that the optimizer steps, beside those of the
optimizer."""

type Entries = dict[str, torch.Tensor]
type Survey = Mapping[str, tuple[int, int]]
"""Entry -> digests of this member's part of the tensor, before and after."""
type Sums = tuple[int, int]
"""Sums of such digests over several tensors, before and after."""
type HolderSets = Sequence[Sequence[int]]
"""Holder sets: each is the slots that together hold every unit of a tensor once."""
type Options = list[dict[str, object]]
"""The options of an optimizer's parameter groups."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SharedEntries:
    """What goes with a tensor and is the same wherever it is held."""

    dtypes: Mapping[str, torch.dtype]
    """The dtypes of the entries that are cut."""
    numbers: Mapping[str, object]
    """The numbers that its optimizer keeps."""


def _take(tensor: Tensor, part: torch.Tensor, held: Spans, wanted: Spans) -> torch.Tensor:
    ranges = [part.narrow(tensor.dim, start, stop - start) for start, stop in local_ranges(tensor, held, wanted)]
    return torch.cat(ranges, tensor.dim)


def _put(tensor: Tensor, part: torch.Tensor, held: Spans, wanted: Spans, values: torch.Tensor) -> None:
    start = 0
    for first, last in local_ranges(tensor, held, wanted):
        part.narrow(tensor.dim, first, last - first).copy_(values.narrow(tensor.dim, start, last - first))
        start += last - first


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rebuilding:
    """A tensor whose new part is being built: what is sent and received for every entry, in the order of `dtypes`."""

    recut: Recut
    entries: Entries
    dtypes: Mapping[str, torch.dtype]
    parcels: list[Parcel]
    arriving: list[tuple[str, Spans, Parcel]]

    @classmethod
    def begin(cls, recut: Recut, entries: Entries, dtypes: Mapping[str, torch.dtype]) -> "Rebuilding":
        """Make the parcels to exchange; the old parts stay as they are."""
        tensor = recut.tensor
        parcels, arriving = [], []
        for name, dtype in dtypes.items():
            for transfer in recut.outgoing:
                values = _take(tensor, entries[name], recut.before, transfer.units)
                parcels.append(Parcel(peer=transfer.peer, tensor=values, arriving=False))
            for transfer in recut.incoming:
                like = torch.empty(local_shape(tensor, transfer.units), dtype=dtype, device="meta")
                parcels.append(Parcel(peer=transfer.peer, tensor=like, arriving=True))
                arriving.append((name, transfer.units, parcels[-1]))
        return cls(recut=recut, entries=entries, dtypes=dtypes, parcels=parcels, arriving=arriving)

    def end(self) -> Entries:
        """Build the new part of every entry, after the exchange."""
        recut, tensor, device = self.recut, self.recut.tensor, self.entries[WEIGHT].device
        if recut.before == recut.after and not self.arriving:
            return {name: self.entries[name] for name in self.dtypes if name in self.entries}
        shape = local_shape(tensor, recut.after)
        built = {name: torch.empty(shape, dtype=dtype, device=device) for name, dtype in self.dtypes.items()}
        kept = sp.intersection(sp.union(recut.before), sp.union(recut.after))
        for name, new in built.items() if kept else ():
            _put(tensor, new, recut.after, kept, _take(tensor, self.entries[name], recut.before, kept))
        for name, units, parcel in self.arriving:
            _put(tensor, built[name], recut.after, units, parcel.tensor)
        return built


def survey(recut: Recut, before: Entries, after: Entries, *, step: int) -> Survey:
    """Digest this member's old and new part, to compare with the others before anybody switches."""
    new = _digests(recut.tensor, after, recut.after, step)
    had = {name: before[name] for name in after if name in before}
    stays = all(had.get(name) is values for name, values in after.items())
    old = new if stays else _digests(recut.tensor, had, recut.before, step)
    return {name: (old.get(name, 0), number) for name, number in new.items()}


def _digests(tensor: Tensor, entries: Entries, held: Spans, step: int) -> dict[str, int]:
    if not held:
        return dict.fromkeys(entries, 0)
    salts = [f"{tensor.name} {name} {step}" for name in entries]
    runs = runs_of(tensor.shape, tensor.dim, global_ranges(tensor, held))
    return dict(zip(entries, digest.digests(list(entries.values()), runs, salts=salts), strict=True))


def summed(surveys: Iterable[Survey]) -> Sums:
    """Add up digests. Each is salted with its tensor and entry, so a difference in any of them shows in the sum."""
    before = after = 0
    for found in surveys:
        before += sum(had for had, _ in found.values())
        after += sum(has for _, has in found.values())
    return before % MODULUS, after % MODULUS


def are_alike(sums: Mapping[int, Sums], *, holders_before: HolderSets, holders_after: HolderSets) -> bool:
    """Whether `compare` would find no difference in any tensor that these holder sets hold."""
    return len({number for of in _totals(sums, holders_before, holders_after) for number in of}) <= 1


def compare(
    tensor: Tensor,
    surveys: Mapping[int, Survey],
    *,
    holders_before: HolderSets,
    holders_after: HolderSets,
) -> None:
    """Raise unless all digests of a tensor are equal: those of every holder set, before the move and after.

    A holder set is the slots of a replica or, for a replicated tensor, each slot by itself. Before the move only sets
    count whose slots have all survived.
    """
    for entry in next(iter(surveys.values())):
        of_entry = {slot: found[entry] for slot, found in surveys.items()}
        before, after = _totals(of_entry, holders_before, holders_after)
        if len({*before, *after}) > 1:
            found = [("before", *pair) for pair in zip(holders_before, before, strict=True)]
            found += [("after", *pair) for pair in zip(holders_after, after, strict=True)]
            digests = [
                f"{time} in slots {', '.join(map(str, holders))} {number:016x}" for time, holders, number in found
            ]
            raise StateLost(
                f"{tensor.name} ({entry}) is not the same wherever it is held: {'; '.join(digests)}",
                fix="restart from the last checkpoint",
            )


def _totals(sums: Mapping[int, Sums], before: HolderSets, after: HolderSets) -> tuple[list[int], list[int]]:
    return (
        [sum(sums[slot][0] for slot in holders) % MODULUS for holders in before],
        [sum(sums[slot][1] for slot in holders) % MODULUS for holders in after],
    )


def compare_kept(tensor: Tensor, kept: Mapping[int, str], *, step: int) -> None:
    """Raise unless all members keep the same with a tensor."""
    first = next(iter(kept))
    for slot, theirs in kept.items():
        if theirs != kept[first]:
            raise StateLost(
                f"the optimizers in slots {first} and {slot} keep different things for {tensor.name} at step {step}: "
                f"{kept[first]} and {theirs}",
                fix="restart from the last checkpoint",
            )
