"""A version of the job's state, put together from copies, into whatever layout is wanted now.

All members tell each other which copies of the version they can read. Then each fetches what it needs by itself: it
knows where every element of every copy stands in its tensor, takes what its own copy has, then what others on its host
have, then what it must ask other hosts for, until nothing is missing. Nothing is taken from a copy whose digests are
not right, and such a copy is not asked again. A process that holds nothing of the version is no source.

Where no copy of a slot is there, or no sound one has what somebody lacks, a slot's copy is put together from a parity
and the other members' copies (`parity.py`) by whoever has the parity, and everybody has one source more. All choose
alike what is put together, since all have told each other what they found wrong or did not reach.

In the end the digests of what everybody has are added up, tensor by tensor, and compared with those that the copies
were made with. A whole that differs is named, and nobody trains on it.
"""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

type TellAll = Callable[[Any], list[Any]]
"""What one member says to all, and all have said: they come together."""
type Broken = tuple[int, CopyKey]
"""A copy that is not what was written: the host that has it, and where."""


class _OutOfReach(Exception):
    """No sound copy of a member is to be had."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A copy that some host has, and the process that reads it for others."""

    host: int
    place: CopyKey
    manifest: Manifest
    address: Address


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RestoredBytes:
    """How much came from where, in bytes: this slot's own copy, others on this host, other hosts."""

    version: Version
    own: int = 0
    here: int = 0
    elsewhere: int = 0
    broken: tuple[str, ...] = ()
    rebuilt: tuple[str, ...] = ()
    """What was put together from parities first."""


# ---------------------------------------------------------------- which version


def standable(told: Iterable[str]) -> list[Version]:
    """The versions of which all parts are somewhere, or can be put together, newest first, from what all members have
    `describe`d."""
    there: defaultdict[Version, set[int]] = defaultdict(set)
    groups: defaultdict[Version, list[list[int]]] = defaultdict(list)
    wanted: dict[Version, set[int]] = {}
    for text in told:
        for step, epoch, of, holders in json.loads(text or "[]"):
            version = Version(step=step, epoch=epoch)
            wanted[version] = set(holders)
            if isinstance(of, list):
                groups[version].append(of)
            else:
                there[version].add(of)
    whole = [
        version
        for version, holders in wanted.items()
        if all(
            any(is_rebuildable(slot, group, there[version]) for group in groups[version])
            for slot in holders - there[version]
        )
    ]
    return sorted(whole, key=lambda version: (version.step, version.epoch), reverse=True)


def describe(store: Store) -> str:
    """Which copies this host has, for a report: each with its slot, or of a parity those of its members."""
    return json.dumps(
        [
            [manifest.version.step, manifest.version.epoch, _slots_of(place, manifest), manifest.holders]
            for place, manifest in store.found()
        ]
    )


def _slots_of(place: CopyKey, manifest: Manifest) -> int | list[int]:
    return [member.slot for member in members_of(manifest)] if place.kind == PARITY else place.slot


# ---------------------------------------------------------------- putting it together


class Restoration:
    """One attempt of all members to put a version together."""

    def __init__(
        self,
        version: Version,
        store: Store,
        *,
        slot: int,
        host: int,
        teller: bool,
        tell_all: TellAll,
        address: Address,
        peer: Callable[[Address], Peer],
        trouble: Callable[[str], None],
    ) -> None:
        """All come together. `teller` speaks for its host, and reads for others what is nobody's own."""
        self.version, self._store, self._slot, self._host = version, store, slot, host
        self._address, self._tell_all, self._peer, self._trouble = address, tell_all, peer, trouble
        self._broken: set[Broken] = set()
        """What was found to be so, by this one or, as far as they have told it, by others."""
        self._unreached: set[tuple[Address, Broken]] = set()
        self._unreached_by_some: set[Broken] = set()
        self._tried: set[tuple[Broken, int]] = set()
        self.sources: list[Source] = []
        self._parities: list[Source] = []
        self._share(self._mine(teller=teller))
        self._rebuild()

    def _share(self, copies: Sequence[tuple[CopyKey, Manifest]] = (), lacking: str | None = None) -> str | None:
        """Tell all of these copies, of what is wrong or out of reach, and of what is lacking, and hear of theirs; what
        somebody lacks."""
        mine = [(dataclasses.asdict(place), manifest.encode()) for place, manifest in copies]
        unreached = frozenset(copy for _, copy in self._unreached)
        said = self._tell_all((self._host, self._address, mine, frozenset(self._broken), unreached, lacking))
        for host, at, told, broken, missed, _ in said:
            self._broken |= broken
            self._unreached_by_some |= missed
            for place, text in told:
                source = Source(host=host, place=CopyKey(**place), manifest=_decoded(text), address=(at[0], at[1]))
                (self._parities if source.place.kind == PARITY else self.sources).append(source)
        self.sources.sort(key=self._rank)
        return next((theirs for *_, theirs in said if theirs is not None), None)

    def _mine(self, *, teller: bool) -> list[tuple[CopyKey, Manifest]]:
        for place, version in self._store.broken() if teller else ():
            if version not in (None, self.version):
                continue
            self._trouble(f"{place} is left aside: it is not whole, or not as it was written")
            self._broken.add((self._host, place))
        return [
            (place, manifest)
            for place, manifest in self._store.found()
            if manifest.version == self.version and (teller or (place.kind == NEAR and place.slot == self._slot))
        ]

    def _rank(self, source: Source) -> tuple[Any, ...]:
        """Own, then this host, then others; of these the next one round the ring."""
        own = source.host == self._host and source.place.kind == NEAR and source.place.slot == self._slot
        return not own, source.host != self._host, (source.place.slot - self._slot) % 1024, source.host, source.place

    def kinds(self) -> dict[str, CopiedSlice]:
        """Tensor -> what is kept for it, as anybody's copy has it; raises on all members alike where the copies of some
        slot have gone since they were described."""
        there = {source.manifest.slot for source in self.sources}
        wanted = self._holders()
        if not wanted or wanted - there:
            gone = ", ".join(map(str, sorted(wanted - there))) or "all slots"
            raise StateLost(
                f"the copies of {self.version} of {gone} are gone{self._trouble_told()}", way_out="an older version"
            )
        return {held.piece.tensor: held for source in self.sources for held in source.manifest.held}

    def extras(self) -> Mapping[str, Any]:
        """What was noted besides tensors; this slot's own, if it had any."""
        return self.sources[0].manifest.extras

    def _holders(self) -> set[int]:
        return {slot for source in (*self.sources, *self._parities) for slot in source.manifest.holders}

    def fill(self, parts: Sequence[Part]) -> RestoredBytes:
        """Have all values in these parts; raises on all members alike where something is nowhere."""
        amounts = {"own": 0, "here": 0, "elsewhere": 0}
        missing = [torch.ones(part.piece.size, dtype=torch.bool) for part in parts]
        while True:
            nowhere = self._fill(parts, missing, amounts)
            if nowhere is None:
                break
            if not self._rebuild():
                raise StateLost(
                    f"no sound copy of {self.version} has {nowhere}{self._trouble_told()}", way_out="an older version"
                )
        rebuilt = _named((source.host, source.place) for source in self.sources if source.place.kind == REBUILT)
        return RestoredBytes(
            version=self.version, broken=tuple(_named(self._broken)), rebuilt=tuple(rebuilt), **amounts
        )

    def _fill(self, parts: Sequence[Part], missing: Sequence[torch.Tensor], amounts: dict[str, int]) -> str | None:
        """With what is there; what somebody lacks then."""
        nowhere: str | None = None
        for part, of_it in zip(parts, missing, strict=True):
            left = self._fill_part(part, of_it, amounts) if of_it.any() else 0
            if left:
                nowhere = nowhere or f"{left} elements of {part.piece.tensor}"
        return self._share(lacking=nowhere)

    def _trouble_told(self) -> str:
        found = f"; not as they were written: {', '.join(_named(self._broken))}" if self._broken else ""
        if self._unreached_by_some:
            found += f"; not reached: {', '.join(_named(self._unreached_by_some))}"
        return found

    def _fill_part(self, part: Part, missing: torch.Tensor, amounts: dict[str, int]) -> int:
        """How many elements are nowhere."""
        for source in self.sources:
            for number, held in enumerate(source.manifest.held):
                if held.piece.tensor != part.piece.tensor or not missing.any():
                    continue
                wanted = _still(common(part.piece.runs, held.piece.runs), missing)
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
        """None where the copy is not what was written, or whoever has it does not answer."""
        runs = Runs(starts=wanted.theirs, lengths=wanted.lengths)
        try:
            if source.host == self._host:
                return self._read_here(source, held, runs)
            return self._peer(source.address).get(source.place, number, held, runs)
        except WrongCopy as error:
            self._trouble(f"{source.place} of {self.version} is left aside: {error}")
            self._broken.add((source.host, source.place))
        except PeerTrouble as error:
            self._trouble(f"{source.place} of {self.version} is left aside: {error}")
            self._unreached.add((source.address, (source.host, source.place)))
        return None

    def _is_aside(self, source: Source) -> bool:
        """A copy that is wrong is so whoever reads it; one that was not reached may be by another process."""
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
        """Put together what no sound copy has, each by the process that told of the parity; whether there was anything
        to be tried. All choose alike."""
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
        """Parities, each with the member whose copies are gone or wrong while those of all others are there."""
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
            return []  # which was told when it was tried
        except NoRoom as error:
            self._trouble(str(error))
            return []
        except (WrongParity, OSError, EOFError) as error:
            self._trouble(f"{parity.place} of {self.version} is left aside: {error}")
            self._broken.add((parity.host, parity.place))
            return []
        return [(place, lost)]

    def _read_whole(self, member: Manifest, number: int, held: CopiedSlice) -> Mapping[str, torch.Tensor]:
        """A piece of another member's copy, which has to be the one that went into the parity."""
        size = torch.tensor([held.piece.size])
        everything = Common(mine=torch.zeros_like(size), theirs=torch.zeros_like(size), lengths=size)
        for source in self.sources:
            if source.manifest == member and not self._is_aside(source):
                values = self._read(source, number, held, everything)
                if values is not None:
                    return values
        raise _OutOfReach(f"{held.piece.tensor} of slot {member.slot}")

    # ------------------------------------------------ in the end

    def verify(self, parts: Sequence[Part]) -> None:
        """Raise unless the replica digests of what everybody has now are those of the copies; all members together."""
        run = self.sources[0].manifest.run
        mine: dict[tuple[str, str, str], int] = {}
        for part in parts:
            salts = [salt(run, self.version.step, part.piece.tensor, name) for name in part.values]
            numbers = digest.digests(list(part.values.values()), part.piece.runs, salts=salts)
            for name, number in zip(part.values, numbers, strict=True):
                key = part.piece.tensor, name, part.piece.whole
                mine[key] = (mine.get(key, 0) + number) % MODULUS
        told: list[dict[tuple[str, str, str], int]] = self._tell_all(mine)
        now: defaultdict[tuple[str, str], dict[str, int]] = defaultdict(dict)
        for theirs in told:
            for (tensor, name, whole), number in theirs.items():
                replica_digests = now[tensor, name]
                replica_digests[whole] = (replica_digests.get(whole, 0) + number) % MODULUS
        before = _replica_digests(self.sources)
        for (tensor, name), replica_digests in now.items():
            then = before.get((tensor, name), {})
            if len({*replica_digests.values(), *then.values()}) > 1:
                raise StateLost(
                    f"{tensor} ({name}) of {self.version} is not what was copied: "
                    + ", ".join(f"now {whole or 'in all'} {number:016x}" for whole, number in replica_digests.items())
                    + "; "
                    + ", ".join(f"then {whole or 'in all'} {number:016x}" for whole, number in then.items()),
                    way_out="restart from the last checkpoint",
                )


def _replica_digests(sources: Iterable[Source]) -> dict[tuple[str, str], dict[str, int]]:
    """(tensor, entry) -> whole -> its digest, of those replica digests all of whose parts somebody has told."""
    parts: dict[tuple[str, str], dict[str, dict[tuple[int, int], tuple[int, TensorSlice]]]] = {}
    for source in sources:
        for number, held in enumerate(source.manifest.held):
            for entry in held.entries:
                of = parts.setdefault((held.piece.tensor, entry.name), {}).setdefault(held.piece.whole, {})
                of[source.manifest.slot, number] = entry.digest, held.piece
    found: dict[tuple[str, str], dict[str, int]] = {}
    for key, replica_digests in parts.items():
        for whole, told in replica_digests.items():
            pieces = [piece for _, piece in told.values()]
            if sum(piece.size for piece in pieces) == torch.Size(pieces[0].shape).numel():
                found.setdefault(key, {})[whole] = sum(number for number, _ in told.values()) % MODULUS
    return found


def _named(copies: Iterable[Broken]) -> list[str]:
    return sorted(f"{place} on host {host}" for host, place in copies)


def _still(found: Common, missing: torch.Tensor) -> Common:
    """What of that is missing yet."""
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
