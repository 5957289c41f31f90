"""Restores a version of the job's state from copies, in whatever layout is wanted now.

All members report which copies of the version they can read. Then each fetches what it needs by itself: it knows where
every element of every copy lies in its tensor. It takes elements from its own copy, then from others on its host, then
from other hosts, until nothing is missing. It takes nothing from a copy whose digests are wrong, and does not ask such
a copy again. A process that holds nothing of the version is no source.

If a slot has no copy, or no sound copy has what somebody lacks, the process that has a parity rebuilds the slot's copy
from it and the other members' copies (`parity.py`), and all members have one source more. All choose alike what to
rebuild, since all have reported which copies are wrong or out of reach.

In the end the digests of everybody's values are added up, tensor by tensor, and compared with those that the copies
were made with. A tensor that differs is named, and nobody trains on it.
"""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ntp_plugin.copies import digest
from ntp_plugin.copies.manifest import CopiedSlice, Manifest, Version, salt
from ntp_plugin.copies.parity import WrongParity, is_rebuildable, members_of, rebuild
from ntp_plugin.copies.replicator import Part
from ntp_plugin.copies.runs import MODULUS, Runs
from ntp_plugin.copies.slices import Common, TensorSlice, common, indices
from ntp_plugin.copies.store import NEAR, PARITY, REBUILT, CopyKey, NoRoom, Store
from ntp_plugin.copies.verify import wrong
from ntp_plugin.copies.wire import Address, Peer, PeerTrouble, WrongCopy, select
from ntp_plugin.errors import StateLost

type AllGather = Callable[[Any], list[Any]]
"""Gathers a value from each member, on all members; they call it together."""
type Broken = tuple[int, CopyKey]
"""A copy that is not what was written: its host, and its key."""


class _OutOfReach(Exception):
    """No sound copy of a member can be read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A copy that some host has, and the process that reads it for others."""

    host: int
    place: CopyKey
    manifest: Manifest
    address: Address


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RestoredBytes:
    """The bytes restored from this slot's own copy, from others on this host, and from other hosts."""

    version: Version
    own: int = 0
    here: int = 0
    elsewhere: int = 0
    broken: tuple[str, ...] = ()
    rebuilt: tuple[str, ...] = ()
    """The copies that were rebuilt from parities first."""


# ---------------------------------------------------------------- which version


def restorable(descriptions: Iterable[str]) -> list[Version]:
    """The versions that can be restored, newest first: all their parts have a copy somewhere, or can be rebuilt.

    Args:
        descriptions: What each member returned from `describe`.
    """
    there: defaultdict[Version, set[int]] = defaultdict(set)
    groups: defaultdict[Version, list[list[int]]] = defaultdict(list)
    wanted: dict[Version, set[int]] = {}
    for text in descriptions:
        for step, epoch, of, holders in json.loads(text or "[]"):
            version = Version(step=step, epoch=epoch)
            wanted[version] = set(holders)
            if isinstance(of, list):
                groups[version].append(of)
            else:
                there[version].add(of)
    complete = [
        version
        for version, holders in wanted.items()
        if all(
            any(is_rebuildable(slot, group, there[version]) for group in groups[version])
            for slot in holders - there[version]
        )
    ]
    return sorted(complete, key=lambda version: (version.step, version.epoch), reverse=True)


def describe(store: Store) -> str:
    """Describe this host's copies for a report: each with its slot, or for a parity with its members' slots."""
    return json.dumps(
        [
            [manifest.version.step, manifest.version.epoch, _slots_of(place, manifest), manifest.holders]
            for place, manifest in store.found()
        ]
    )


def _slots_of(place: CopyKey, manifest: Manifest) -> int | list[int]:
    return [member.slot for member in members_of(manifest)] if place.kind == PARITY else place.slot


# ---------------------------------------------------------------- restoring it


class Restoration:
    """One attempt of all members to restore a version."""

    def __init__(
        self,
        version: Version,
        store: Store,
        *,
        slot: int,
        host: int,
        is_host_leader: bool,
        all_gather: AllGather,
        address: Address,
        peer: Callable[[Address], Peer],
        trouble: Callable[[str], None],
    ) -> None:
        """All members make one together; the host leader also reads its host's other copies for all."""
        self.version, self._store, self._slot, self._host = version, store, slot, host
        self._address, self._all_gather, self._peer, self._trouble = address, all_gather, peer, trouble
        self._broken: set[Broken] = set()
        """The broken copies that this process, or others that have reported them, found."""
        self._unreached: set[tuple[Address, Broken]] = set()
        self._unreached_by_some: set[Broken] = set()
        self._tried: set[tuple[Broken, int]] = set()
        self.sources: list[Source] = []
        self._parities: list[Source] = []
        self._share(self._mine(is_host_leader=is_host_leader))
        self._rebuild()

    def _share(self, copies: Sequence[tuple[CopyKey, Manifest]] = (), lacking: str | None = None) -> str | None:
        """Exchange with all members these copies, the wrong and unreachable ones, and what is lacking.

        Returns:
            What some member lacks; None if nobody lacks anything.
        """
        mine = [(dataclasses.asdict(place), manifest.encode()) for place, manifest in copies]
        unreached = frozenset(copy for _, copy in self._unreached)
        reports = self._all_gather((self._host, self._address, mine, frozenset(self._broken), unreached, lacking))
        for host, at, copies_there, broken, missed, _ in reports:
            self._broken |= broken
            self._unreached_by_some |= missed
            for place, text in copies_there:
                source = Source(host=host, place=CopyKey(**place), manifest=_decoded(text), address=(at[0], at[1]))
                (self._parities if source.place.kind == PARITY else self.sources).append(source)
        self.sources.sort(key=self._rank)
        return next((theirs for *_, theirs in reports if theirs is not None), None)

    def _mine(self, *, is_host_leader: bool) -> list[tuple[CopyKey, Manifest]]:
        for place, version in self._store.broken() if is_host_leader else ():
            if version not in (None, self.version):
                continue
            self._trouble(f"{place} is not used: it is incomplete, or not as it was written")
            self._broken.add((self._host, place))
        return [
            (place, manifest)
            for place, manifest in self._store.found()
            if manifest.version == self.version
            and (is_host_leader or (place.kind == NEAR and place.slot == self._slot))
        ]

    def _rank(self, source: Source) -> tuple[Any, ...]:
        """The order of sources: the own copy, this host's, then others, of these the next slot round the ring first."""
        own = source.host == self._host and source.place.kind == NEAR and source.place.slot == self._slot
        return not own, source.host != self._host, (source.place.slot - self._slot) % 1024, source.host, source.place

    def kinds(self) -> dict[str, CopiedSlice]:
        """Tensor -> what its copies keep for it.

        Raises:
            StateLost: Copies of some slot were lost after the report; all members raise it alike.
        """
        there = {source.manifest.slot for source in self.sources}
        wanted = self._holders()
        if not wanted or wanted - there:
            lost = ", ".join(map(str, sorted(wanted - there))) or "all slots"
            raise StateLost(
                f"the copies of {self.version} of {lost} are lost{self._reported_trouble()}", fix="an older version"
            )
        return {held.tensor_slice.tensor: held for source in self.sources for held in source.manifest.held}

    def extras(self, alike: Collection[int] = ()) -> Mapping[str, Any]:
        """What was noted besides tensors: this slot's own, if it had any, else that of one of the slots `alike`."""
        of_those = (source for source in self.sources if source.manifest.slot in alike)
        return next(of_those, self.sources[0]).manifest.extras

    def _holders(self) -> set[int]:
        return {slot for source in (*self.sources, *self._parities) for slot in source.manifest.holders}

    def fill(self, parts: Sequence[Part]) -> RestoredBytes:
        """Fill all values of these parts.

        Raises:
            StateLost: Some values are in no sound copy; all members raise it alike.
        """
        amounts = {"own": 0, "here": 0, "elsewhere": 0}
        missing = [torch.ones(part.tensor_slice.size, dtype=torch.bool) for part in parts]
        while True:
            nowhere = self._fill(parts, missing, amounts)
            if nowhere is None:
                break
            if not self._rebuild():
                raise StateLost(
                    f"no sound copy of {self.version} has {nowhere}{self._reported_trouble()}",
                    fix="an older version",
                )
        rebuilt = _named((source.host, source.place) for source in self.sources if source.place.kind == REBUILT)
        return RestoredBytes(
            version=self.version, broken=tuple(_named(self._broken)), rebuilt=tuple(rebuilt), **amounts
        )

    def _fill(self, parts: Sequence[Part], missing: Sequence[torch.Tensor], amounts: dict[str, int]) -> str | None:
        """Fill from the sources so far, and return what some member still lacks."""
        nowhere: str | None = None
        for part, of_it in zip(parts, missing, strict=True):
            left = self._fill_part(part, of_it, amounts) if of_it.any() else 0
            if left:
                nowhere = nowhere or f"{left} elements of {part.tensor_slice.tensor}"
        return self._share(lacking=nowhere)

    def _reported_trouble(self) -> str:
        found = f"; not as they were written: {', '.join(_named(self._broken))}" if self._broken else ""
        if self._unreached_by_some:
            found += f"; not reached: {', '.join(_named(self._unreached_by_some))}"
        return found

    def _fill_part(self, part: Part, missing: torch.Tensor, amounts: dict[str, int]) -> int:
        """Fill one part, and return how many elements no source has."""
        for source in self.sources:
            for number, held in enumerate(source.manifest.held):
                if held.tensor_slice.tensor != part.tensor_slice.tensor or not missing.any():
                    continue
                wanted = _still(common(part.tensor_slice.runs, held.tensor_slice.runs), missing)
                if not wanted.size or self._is_aside(source):
                    continue
                values = self._read(source, number, held, wanted)
                if values is None:
                    continue
                mine = indices(wanted.mine, wanted.lengths)
                for name, live in part.values.items():
                    live[mine.to(live.device)] = values[name].to(live.device)
                missing[mine] = False
                amounts[self._kind(source)] += sum(found.nbytes for found in values.values())
        return int(missing.sum())

    def _kind(self, source: Source) -> str:
        if source.host != self._host:
            return "elsewhere"
        return "own" if (source.place.kind, source.place.slot) == (NEAR, self._slot) else "here"

    def _read(self, source: Source, number: int, held: CopiedSlice, wanted: Common) -> dict[str, torch.Tensor] | None:
        """Read elements of a slice; None if the copy is not what was written, or its process does not answer."""
        runs = Runs(starts=wanted.theirs, lengths=wanted.lengths)
        try:
            if source.host == self._host:
                return self._read_here(source, held, runs)
            return self._peer(source.address).get(source.place, number, held, runs)
        except WrongCopy as error:
            self._trouble(f"{source.place} of {self.version} is not used: {error}")
            self._broken.add((source.host, source.place))
        except PeerTrouble as error:
            self._trouble(f"{source.place} of {self.version} is not used: {error}")
            self._unreached.add((source.address, (source.host, source.place)))
        return None

    def _is_aside(self, source: Source) -> bool:
        """Whether not to read a copy. A wrong one is wrong for all; an unreachable one may be in reach of another
        process."""
        copy = source.host, source.place
        return copy in self._broken or (source.address, copy) in self._unreached

    def _read_here(self, source: Source, held: CopiedSlice, runs: Runs) -> dict[str, torch.Tensor]:
        try:
            values = self._store.read(source.place, held)
        except (OSError, EOFError) as error:
            raise WrongCopy(f"it cannot be read: {error}") from error
        found = wrong(source.manifest, held, values)
        if found:
            raise WrongCopy(f"{found[0]} in it is not as it was written")
        return select(values, starts=runs.starts, lengths=runs.lengths)

    # ------------------------------------------------ from parities

    def _rebuild(self) -> bool:
        """Rebuild the copies that have no sound source, each in the process that reported the parity; all choose alike.

        Returns:
            Whether there was anything to try.
        """
        chosen = list(self._rebuildable())
        if not chosen:
            return False
        made = []
        for parity, lost in chosen:
            self._tried.add(((parity.host, parity.place), lost.slot))
            if parity.address == self._address:
                made += self._rebuilt(parity, lost)
        self._share(made)
        return True

    def _rebuildable(self) -> Iterator[tuple[Source, Manifest]]:
        """Yield each parity with a member whose copies are lost or wrong, if those of all other members are there."""
        aside = self._broken | self._unreached_by_some
        there = {source.manifest.slot for source in self.sources if (source.host, source.place) not in aside}
        for parity in self._parities:
            members, copy = members_of(parity.manifest), (parity.host, parity.place)
            slots = [member.slot for member in members]
            for member in members if copy not in aside else ():
                if member.slot in there or (copy, member.slot) in self._tried:
                    continue
                if is_rebuildable(member.slot, slots, there):
                    yield parity, member

    def _rebuilt(self, parity: Source, lost: Manifest) -> list[tuple[CopyKey, Manifest]]:
        try:
            place = rebuild(self._store, parity.place, parity.manifest, lost, self._read_whole)
        except _OutOfReach:
            return []  # reported when it was tried
        except NoRoom as error:
            self._trouble(str(error))
            return []
        except (WrongParity, OSError, EOFError) as error:
            self._trouble(f"{parity.place} of {self.version} is not used: {error}")
            self._broken.add((parity.host, parity.place))
            return []
        return [(place, lost)]

    def _read_whole(self, member: Manifest, number: int, held: CopiedSlice) -> Mapping[str, torch.Tensor]:
        """Read a slice of another member's copy, which must be the one that went into the parity."""
        size = torch.tensor([held.tensor_slice.size])
        everything = Common(mine=torch.zeros_like(size), theirs=torch.zeros_like(size), lengths=size)
        for source in self.sources:
            if source.manifest == member and not self._is_aside(source):
                values = self._read(source, number, held, everything)
                if values is not None:
                    return values
        raise _OutOfReach(f"{held.tensor_slice.tensor} of slot {member.slot}")

    # ------------------------------------------------ verifying

    def verify(self, parts: Sequence[Part]) -> None:
        """Compare the digests of everybody's values with those of the copies; all members call this together.

        Raises:
            StateLost: They differ.
        """
        run = self.sources[0].manifest.run
        mine: dict[tuple[str, str, str], int] = {}
        for part in parts:
            salts = [salt(run, self.version.step, part.tensor_slice.tensor, name) for name in part.values]
            numbers = digest.digests(list(part.values.values()), part.tensor_slice.runs, salts=salts)
            for name, number in zip(part.values, numbers, strict=True):
                key = part.tensor_slice.tensor, name, part.tensor_slice.whole
                mine[key] = (mine.get(key, 0) + number) % MODULUS
        gathered: list[dict[tuple[str, str, str], int]] = self._all_gather(mine)
        now: defaultdict[tuple[str, str], dict[str, int]] = defaultdict(dict)
        for theirs in gathered:
            for (tensor, name, whole), number in theirs.items():
                instances = now[tensor, name]
                instances[whole] = (instances.get(whole, 0) + number) % MODULUS
        before = _replica_digests(self.sources)
        for (tensor, name), instances in now.items():
            then = before.get((tensor, name), {})
            if len({*instances.values(), *then.values()}) > 1:
                raise StateLost(
                    f"{tensor} ({name}) of {self.version} is not what was copied: "
                    + ", ".join(f"now {whole or 'in all'} {number:016x}" for whole, number in instances.items())
                    + "; "
                    + ", ".join(f"then {whole or 'in all'} {number:016x}" for whole, number in then.items()),
                    fix="restart from the last checkpoint",
                )


def _replica_digests(sources: Iterable[Source]) -> dict[tuple[str, str], dict[str, int]]:
    """(tensor, entry) -> instance of the tensor -> its digest, for instances with copies of all their parts."""
    parts: dict[tuple[str, str], dict[str, dict[tuple[int, int], tuple[int, TensorSlice]]]] = {}
    for source in sources:
        for number, held in enumerate(source.manifest.held):
            for entry in held.entries:
                of = parts.setdefault((held.tensor_slice.tensor, entry.name), {}).setdefault(
                    held.tensor_slice.whole, {}
                )
                of[source.manifest.slot, number] = entry.digest, held.tensor_slice
    found: dict[tuple[str, str], dict[str, int]] = {}
    for key, instances in parts.items():
        for whole, digests in instances.items():
            tensor_slices = [tensor_slice for _, tensor_slice in digests.values()]
            if sum(tensor_slice.size for tensor_slice in tensor_slices) == torch.Size(tensor_slices[0].shape).numel():
                found.setdefault(key, {})[whole] = sum(number for number, _ in digests.values()) % MODULUS
    return found


def _named(copies: Iterable[Broken]) -> list[str]:
    return sorted(f"{place} on host {host}" for host, place in copies)


def _still(found: Common, missing: torch.Tensor) -> Common:
    """The part of that which is still missing."""
    if missing.all():
        return found
    mine = indices(found.mine, found.lengths)
    left = missing[mine]
    if left.all():
        return found
    theirs = indices(found.theirs, found.lengths)
    ones = torch.ones(int(left.sum()), dtype=torch.int64)
    return Common(mine=mine[left], theirs=theirs[left], lengths=ones)


def _decoded(text: bytes) -> Manifest:
    manifest = Manifest.decode(text)
    assert manifest is not None, "it was decoded before it was sent"
    return manifest
