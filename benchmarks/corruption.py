"""Copies that are not what was written, and who notices: what `make show-corruption` measures.

    python -m benchmarks.corruption             2,100 injections and 2,000 clean restores, some minutes
    SCALE=ci python -m benchmarks.corruption    the slice for CI: 140 and 100
    SEED=7 python -m benchmarks.corruption      another draw

Four slots on three hosts, as threads of one process, copy two versions of a small state with the code that real jobs
use: stores in shared memory, servers, replicators, one far copy of each part. Then some slots are lost, and the others
restore the second version into another layout, whose parts are uneven. Two slots share a host; with two hosts in all
each would have a copy of everything, and nothing would be read across. Of a slot that is lost with its host only the
far copy is left, of one that is lost alone its near copy is read by its neighbour.
The threads of a lost slot stay, and nobody asks them.

An injection changes the files as they lie in shared memory. Who reads what, and so which copies have to be named as
broken, is foreseen by a model of its own on sets of elements (`foresee`). What is injected is such that somebody would
read it. It is

    found           if all members name exactly the copies that the model names, and are told of each; a file that is
                    cut short must not be among the copies at all
    right source    if then all members have the bits of that version, from other copies

In a tenth of the trials all copies of a part are hit. There it is found if all members say that the version is lost and
name the copies, and the right source is the version before, whose bits they must have then.

A clean restore is a false alarm if anybody is told of trouble, a copy is named, anything raises or a bit differs. As
negative controls the digests are not compared where copies are read, and not in the end either: this has to be seen.
"""

import contextlib
import dataclasses
import itertools
import os
import queue
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch

from benchmarks import evidence
from ntp_plugin.copies import restore, wire
from ntp_plugin.copies.manifest import DTYPES, Entry, Held, Manifest, Version, view
from ntp_plugin.copies.pieces import Piece
from ntp_plugin.copies.replicator import Part, Replicator, Snapshot
from ntp_plugin.copies.restore import Restoration, TellAll
from ntp_plugin.copies.store import FAR, NEAR, Place, Store
from ntp_plugin.copies.wire import Address, Peer, Server
from ntp_plugin.errors import StateLost
from ntp_plugin.launch.run_folder import shared_memory
from ntp_plugin.telemetry import Copied

EACH, CLEAN = 300, 2000
EACH_IN_CI, CLEAN_IN_CI = 20, 100
PER_JOB = 25
"""Restores; then another job with other values is made."""
ALL_COPIES_EVERY = 10
CONTROLS = ("swapped shards", "stale version", "wrong place") * 4
"""Of a negative control: kinds that change all values, so that whatever is read is wrong."""
PATIENCE_S = 60.0

HOSTS = (0, 0, 1, 2)
"""Slot -> its host."""
KEEPERS = (2, 2, 3, 0)
"""Slot -> the slot whose process keeps its far copy, on the next host."""
LOSSES = ((), (0,), (1,), (2,), (3,), (0, 1))
RUN, SECRET, EPOCH = "corruption", "of this run", 1
OLDER, NEWER = 1, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """How it is cut: by units of a dim, anywhere in all of it made flat, or not at all."""

    name: str
    shape: tuple[int, ...]
    cut: Literal["units", "flat", "no"]
    dim: int = 0
    dtypes: tuple[str, str]
    """Of main weights and of a moment."""

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel()


ENTRIES = ("main", "exp_avg")
TENSORS = (
    Tensor(name="up", shape=(64, 24), cut="units", dtypes=("float32", "float32")),
    Tensor(name="down", shape=(4, 40, 6), cut="units", dim=1, dtypes=("bfloat16", "bfloat16")),
    Tensor(name="shards", shape=(52, 15), cut="flat", dtypes=("float64", "float64")),
    Tensor(name="norm", shape=(37,), cut="no", dtypes=("bfloat16", "float32")),
)
CUT = frozenset(tensor.name for tensor in TENSORS if tensor.cut != "no")

type Layout = Mapping[int, Sequence[Piece]]
"""Slot -> what it has of each tensor."""


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Copy:
    """A file, told as `Restored.broken` tells it."""

    host: int
    place: Place

    def __str__(self) -> str:
        return f"{self.place} on host {self.host}"


def copies_of(slot: int, step: int) -> list[Copy]:
    """Near and far. The two versions of a layout are in the two places that a slot has."""
    place = Place(kind=NEAR, slot=slot, epoch=EPOCH, number=step - 1)
    far = dataclasses.replace(place, kind=FAR)
    return [Copy(host=HOSTS[slot], place=place), Copy(host=HOSTS[KEEPERS[slot]], place=far)]


# ---------------------------------------------------------------- layouts


def dealt(owners: Sequence[int], chance: random.Random, *, evenly: bool) -> Layout:
    """All tensors; `evenly`, so that all slots' copies have one size."""
    layout: dict[int, list[Piece]] = {owner: [] for owner in owners}
    for tensor in TENSORS:
        for owner, piece in zip(owners, _pieces(tensor, owners, chance, evenly=evenly), strict=True):
            layout[owner].append(piece)
    return layout


def _pieces(tensor: Tensor, owners: Sequence[int], chance: random.Random, *, evenly: bool) -> Iterator[Piece]:
    """Of units each owner has two runs, in any order; whoever has a replicated tensor has a whole of it."""
    length, parts = tensor.shape[tensor.dim], len(owners)
    alike = Piece(
        tensor=tensor.name, shape=tensor.shape, dim=tensor.dim, ranges=((0, length),), start=0, stop=tensor.size
    )
    if tensor.cut == "no":
        yield from (dataclasses.replace(alike, whole=f"t{owner}") for owner in owners)
    elif tensor.cut == "flat":
        for start, stop in _cuts(tensor.size, parts, chance, evenly=evenly):
            yield dataclasses.replace(alike, start=start, stop=stop)
    else:
        runs = _cuts(length, 2 * parts, chance, evenly=evenly)
        chance.shuffle(runs)
        for ranges in zip(runs[::2], runs[1::2], strict=True):
            units = sum(stop - start for start, stop in ranges)
            yield dataclasses.replace(alike, ranges=ranges, stop=units * (tensor.size // length))


def _cuts(size: int, parts: int, chance: random.Random, *, evenly: bool) -> list[tuple[int, int]]:
    inner = range(size // parts, size, size // parts) if evenly else sorted(chance.sample(range(1, size), parts - 1))
    return list(itertools.pairwise([0, *inner, size]))


def elements(piece: Piece) -> torch.Tensor:
    """Where its elements stand in the whole, made flat: found by cutting a tensor of all places."""
    places = torch.arange(torch.Size(piece.shape).numel()).view(piece.shape)
    ranges = [places.narrow(piece.dim, start, stop - start) for start, stop in piece.ranges]
    return torch.cat(ranges, piece.dim).reshape(-1)[piece.start : piece.stop]


# ---------------------------------------------------------------- a job


class Process:
    """What a rank has for copies."""

    def __init__(self, slot: int, folder: Path, told: Callable[[str], None]) -> None:
        self.store = Store(folder / f"host-{HOSTS[slot]}")
        self.server = Server(self.store, run=RUN, secret=SECRET, host="127.0.0.1", told=told)
        self.through: queue.Queue[Copied] = queue.Queue()
        self.replicator = Replicator(
            self.store, run=RUN, secret=SECRET, slot=slot, trouble=told, done=self.through.put, timeout_s=PATIENCE_S
        )
        self._peers: dict[Address, Peer] = {}

    def peer(self, address: Address) -> Peer:
        """One connection to each."""
        if address not in self._peers:
            self._peers[address] = Peer(address, run=RUN, secret=SECRET, timeout_s=PATIENCE_S)
        return self._peers[address]

    def close(self) -> None:
        """The copies stay."""
        self.replicator.close()
        for peer in self._peers.values():
            peer.close()
        self.server.close()
        self.store.close()


class Job:
    """Two versions of random values, copied by four slots; a context manager, which leaves nothing behind."""

    def __init__(self, chance: random.Random) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ntp-corruption-", dir=shared_memory())
        self.trouble: list[str] = []
        """What anybody was told."""
        self.layout = dealt(range(len(HOSTS)), chance, evenly=True)
        self.truth = {step: _random_values(chance) for step in (OLDER, NEWER)}
        self.has = {(slot, piece.tensor): _mask(piece) for slot, pieces in self.layout.items() for piece in pieces}
        """Which elements of a tensor a slot's copies have."""
        self.processes = [Process(slot, Path(self._folder.name), self.trouble.append) for slot in self.layout]
        self.threads = ThreadPoolExecutor(len(HOSTS))

    def __enter__(self) -> "Job":
        for slot, process in enumerate(self.processes):
            process.replicator.send_to([self.processes[KEEPERS[slot]].server.address])
        for step in self.truth:
            self._copy(step)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.close()
        self.threads.shutdown()
        self._folder.cleanup()

    def _copy(self, step: int) -> None:
        for slot, process in enumerate(self.processes):
            parts = [Part(piece=piece, values=self.right(piece, step), numbers={}) for piece in self.layout[slot]]
            version = Version(step=step, epoch=EPOCH)
            process.replicator.begin(Snapshot(version=version, holders=tuple(self.layout), parts=parts, extras={}))
        for process in self.processes:
            done = process.through.get(timeout=PATIENCE_S)
            assert done.far == 1, self.trouble
            process.replicator.commit()

    def right(self, piece: Piece, step: int) -> dict[str, torch.Tensor]:
        """What a piece has to be."""
        return {name: self.truth[step][piece.tensor, name][elements(piece)] for name in ENTRIES}

    def path(self, copy: Copy) -> Path:
        """Its bytes."""
        return Path(self._folder.name) / f"host-{copy.host}" / str(copy.place)

    def manifest(self, copy: Copy) -> Manifest:
        """Of a file that is whole."""
        manifest = self.processes[HOSTS.index(copy.host)].store.manifest(copy.place)
        assert manifest is not None, f"{copy} is whole"
        return manifest


def _random_values(chance: random.Random) -> dict[tuple[str, str], torch.Tensor]:
    generator = torch.Generator().manual_seed(chance.getrandbits(63))
    return {
        (tensor.name, entry): torch.randn(tensor.size, dtype=torch.float64, generator=generator).to(DTYPES[dtype])
        for tensor in TENSORS
        for entry, dtype in zip(ENTRIES, tensor.dtypes, strict=True)
    }


def _mask(piece: Piece) -> torch.Tensor:
    mask = torch.zeros(torch.Size(piece.shape).numel(), dtype=torch.bool)
    mask[elements(piece)] = True
    return mask


# ---------------------------------------------------------------- a restore


@dataclasses.dataclass(frozen=True, kw_only=True)
class Got:
    """What came of it for one member. `lost`: no sound copy; `refused`: the wholes differ; `raised`: anything else."""

    sources: frozenset[Copy] = frozenset()
    broken: tuple[str, ...] = ()
    right: bool = False
    lost: str = ""
    refused: str = ""
    raised: str = ""

    @property
    def is_clean(self) -> bool:
        return self.right and not (self.broken or self.lost or self.refused or self.raised)


class Meeting:
    """Of threads, each of which says something to all. Between that one works at a time: it is quicker so."""

    def __init__(self, members: Collection[int]) -> None:
        self._members, self._said = members, dict[int, Any]()
        self._barrier = threading.Barrier(len(members), timeout=PATIENCE_S)
        self.turn = threading.Lock()

    def seat(self, member: int) -> TellAll:
        """For one of them."""

        def tell_all(what: Any) -> list[Any]:
            self._said[member] = what
            self.turn.release()
            try:
                self._barrier.wait()
                told = [self._said[other] for other in self._members]
                self._barrier.wait()
            finally:
                self.turn.acquire()
            return told

        return tell_all

    def break_up(self) -> None:
        """Nobody waits for one who does not come."""
        self._barrier.abort()


def restored(job: Job, step: int, wanted: Layout) -> list[Got]:
    """All members put a version together; the other slots are lost."""
    meeting = Meeting(wanted)

    def one(slot: int) -> Got:
        with meeting.turn:
            return _restored_by(slot, job, step, wanted, meeting)

    return list(job.threads.map(one, wanted))


def _restored_by(slot: int, job: Job, step: int, wanted: Layout, meeting: Meeting) -> Got:
    process, host = job.processes[slot], HOSTS[slot]
    parts = [Part(piece=piece, values=_room(piece), numbers={}) for piece in wanted[slot]]
    found: dict[str, Any] = {}
    try:
        restoration = Restoration(
            Version(step=step, epoch=EPOCH),
            process.store,
            slot=slot,
            host=host,
            teller=slot == min(other for other in wanted if HOSTS[other] == host),
            tell_all=meeting.seat(slot),
            address=process.server.address,
            peer=process.peer,
            trouble=job.trouble.append,
        )
        found["sources"] = frozenset(Copy(host=source.host, place=source.place) for source in restoration.sources)
        try:
            found["broken"] = restoration.fill(parts).broken
        except StateLost as error:
            return Got(**found, lost=error.what)
        found["right"] = all(_is_right(job, step, part) for part in parts)
        try:
            restoration.verify(parts)
        except StateLost as error:
            return Got(**found, refused=error.what)
        return Got(**found)
    except Exception as error:  # it is counted, whatever it is
        meeting.break_up()
        return Got(**found, raised=repr(error))


def _room(piece: Piece) -> dict[str, torch.Tensor]:
    (tensor,) = (tensor for tensor in TENSORS if tensor.name == piece.tensor)
    pairs = zip(ENTRIES, tensor.dtypes, strict=True)
    return {entry: torch.full([piece.size], torch.nan, dtype=DTYPES[dtype]) for entry, dtype in pairs}


def _is_right(job: Job, step: int, part: Part) -> bool:
    """Bit for bit."""
    right = job.right(part.piece, step)
    return all(torch.equal(part.values[name].view(torch.uint8), right[name].view(torch.uint8)) for name in right)


# ---------------------------------------------------------------- what has to come of it


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Read:
    """A member takes something of a tensor from a copy."""

    reader: int
    copy: Copy
    tensor: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Foreseen:
    """Of a restore; `lost` where something is nowhere."""

    reads: frozenset[Read]
    broken: frozenset[Copy]
    lost: bool


def foresee(
    job: Job, step: int, wanted: Layout, damaged: Collection[tuple[Copy, str]] = (), gone: Collection[Copy] = ()
) -> Foreseen:
    """Each member goes through the copies in its order, and leaves aside those that it found `damaged` in a tensor."""
    reads, broken, lost = set[Read](), set[Copy](), False
    for member, pieces in wanted.items():
        aside = set(gone)
        for piece in pieces:
            left = _mask(piece)
            for copy in _in_order(member, step, wanted):
                has = job.has[copy.place.slot, piece.tensor]
                if copy in aside or not (left & has).any():
                    continue
                reads.add(Read(reader=member, copy=copy, tensor=piece.tensor))
                if (copy, piece.tensor) in damaged:
                    aside.add(copy)
                else:
                    left &= ~has
            lost |= bool(left.any())
        broken |= aside
    return Foreseen(reads=frozenset(reads), broken=frozenset(broken), lost=lost)


def _in_order(member: int, step: int, members: Collection[int]) -> list[Copy]:
    """Its own, those on its host, then others: of each, first the next slot round the ring."""
    home, own = HOSTS[member], copies_of(member, step)[0]
    found = _alive([copy for slot in range(len(HOSTS)) for copy in copies_of(slot, step)], members)
    return sorted(
        found, key=lambda copy: (copy != own, copy.host != home, (copy.place.slot - member) % len(HOSTS), copy)
    )


def _alive(copies: Sequence[Copy], members: Collection[int]) -> list[Copy]:
    """Those on hosts that are still there."""
    hosts = {HOSTS[slot] for slot in members}
    return [copy for copy in copies if copy.host in hosts]


# ---------------------------------------------------------------- injections


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hit:
    """Where something is to be injected: what the copy has of a tensor is to be wrong then."""

    job: Job
    copy: Copy
    tensor: str
    chance: random.Random

    def edited(self, change: Callable[[torch.Tensor, random.Random], None]) -> dict[Copy, bytes]:
        """The bytes with the values of one entry changed."""
        content, held = self.content(), self.held()
        change(self.values(content, held, self.chance.choice(held.entries)), self.chance)
        return {self.copy: bytes(content)}

    def content(self) -> bytearray:
        return bytearray(self.job.path(self.copy).read_bytes())

    def held(self) -> Held:
        (held,) = (held for held in self.job.manifest(self.copy).held if held.piece.tensor == self.tensor)
        return held

    def values(self, content: bytearray, held: Held, entry: Entry) -> torch.Tensor:
        """Which show those bytes."""
        return view(torch.frombuffer(content, dtype=torch.uint8), held, entry)


def flip(hit: Hit) -> dict[Copy, bytes]:
    """One bit."""

    def change(values: torch.Tensor, chance: random.Random) -> None:
        values.view(torch.uint8)[chance.randrange(values.nbytes)] ^= 1 << chance.randrange(8)

    return hit.edited(change)


def swap(hit: Hit) -> dict[Copy, bytes]:
    """All of it with another slot's copy of that size, or two entries of a tensor."""
    content, (one, two) = hit.content(), hit.held().entries
    if one.dtype == two.dtype and hit.chance.random() < 0.5:
        first, second = (hit.values(content, hit.held(), entry) for entry in (one, two))
        mine = first.clone()
        first.copy_(second)
        second.copy_(mine)
        return {hit.copy: bytes(content)}
    place = hit.copy.place
    slot = hit.chance.choice([slot for slot in range(len(HOSTS)) if slot != place.slot])
    (other,) = (copy for copy in copies_of(slot, place.number + 1) if copy.place.kind == place.kind)
    theirs = hit.job.path(other).read_bytes()
    assert len(theirs) == len(content), "slots have equally much"
    return {hit.copy: theirs, other: bytes(content)}


def stale(hit: Hit) -> dict[Copy, bytes]:
    """The version before."""
    before = dataclasses.replace(hit.copy, place=dataclasses.replace(hit.copy.place, number=OLDER - 1))
    return {hit.copy: hit.job.path(before).read_bytes()}


def shift(hit: Hit) -> dict[Copy, bytes]:
    """By one element, to either side."""

    def change(values: torch.Tensor, chance: random.Random) -> None:
        values.copy_(values.roll(chance.choice((-1, 1))))

    return hit.edited(change)


def truncate(hit: Hit) -> dict[Copy, bytes]:
    """To any smaller size, nothing at all included."""
    content = hit.content()
    return {hit.copy: bytes(content[: hit.chance.randrange(len(content))])}


def burst(hit: Hit) -> dict[Copy, bytes]:
    """NaN for a run of values."""

    def change(values: torch.Tensor, chance: random.Random) -> None:
        start = chance.randrange(len(values))
        values[start : chance.randint(start + 1, len(values))] = torch.nan

    return hit.edited(change)


SWAPPED, DONOR = "swapped shards", "donor corrupt after digest"
KINDS: Mapping[str, Callable[[Hit], dict[Copy, bytes]]] = {
    "bit flip": flip,
    SWAPPED: swap,
    "stale version": stale,
    "wrong place": shift,
    "truncated file": truncate,
    "NaN burst": burst,
    DONOR: flip,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Damage:
    """What is not as it was written, by comparing bytes: in which tensors of which copies, and which are too short."""

    damaged: frozenset[tuple[Copy, str]]
    gone: frozenset[Copy]


@contextlib.contextmanager
def injected(job: Job, contents: Mapping[Copy, bytes]) -> Iterator[Damage]:
    """These bytes are in the files, which stay the same ones; in the end they are as they were."""
    before = {copy: job.path(copy).read_bytes() for copy in contents}
    damage = _damage(job, before, contents)
    for copy, content in contents.items():
        _write(job.path(copy), content)
    try:
        yield damage
    finally:
        for copy, content in before.items():
            _write(job.path(copy), content)


def _damage(job: Job, before: Mapping[Copy, bytes], after: Mapping[Copy, bytes]) -> Damage:
    damaged, gone = set[tuple[Copy, str]](), set[Copy]()
    for copy, content in after.items():
        if len(content) < len(before[copy]):
            gone.add(copy)
            continue
        for held in job.manifest(copy).held:
            spans = [slice(entry.offset, entry.offset + held.bytes_of(entry)) for entry in held.entries]
            if any(content[span] != before[copy][span] for span in spans):
                damaged.add((copy, held.piece.tensor))
    return Damage(damaged=frozenset(damaged), gone=frozenset(gone))


def _write(path: Path, content: bytes) -> None:
    """In place: whoever has the file mapped sees it."""
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()


# ---------------------------------------------------------------- trials


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One injection; `seen` says what was seen where that is not what should be."""

    found: bool
    right_source: bool
    refused: bool = False
    """By the comparison of the wholes in the end."""
    seen: str = ""


def trial(job: Job, kind: str, chance: random.Random, *, all_copies: bool) -> Trial:
    """Lose somebody, choose what would be read, change it, restore."""
    wanted, target = _drawn(job, kind, chance, all_copies=all_copies)
    victims = _alive(copies_of(target.copy.place.slot, NEWER), wanted) if all_copies else [target.copy]
    job.trouble.clear()
    if kind == DONOR and not all(got.is_clean for got in restored(job, NEWER, wanted)):
        return Trial(found=False, right_source=False, seen="the restore before was not clean")
    contents: dict[Copy, bytes] = {}
    for copy in victims:
        contents |= KINDS[kind](Hit(job=job, copy=copy, tensor=target.tensor, chance=chance))
    with injected(job, contents) as damage:
        foreseen = foresee(job, NEWER, wanted, damage.damaged, damage.gone)
        assert foreseen.broken >= {target.copy}, "it would be read"
        assert foreseen.lost or not all_copies, "no copy is left"
        gots = restored(job, NEWER, wanted)
        found = _is_found(foreseen, damage, gots, job.trouble)
        right = all(got.right and not got.refused and not got.raised for got in gots)
        if foreseen.lost:
            right = all(got.lost for got in gots) and _is_clean(job, OLDER, wanted)
    seen = "" if found and right else f"{kind} in {victims}, {target}: {gots}; foreseen {foreseen}; {job.trouble}"
    return Trial(found=found, right_source=right, refused=any(got.refused for got in gots), seen=seen)


def _drawn(job: Job, kind: str, chance: random.Random, *, all_copies: bool) -> tuple[Layout, Read]:
    """What all are to have, and one thing that somebody would read for that.

    A donor's is read from another host. What is replicated is in every slot's copies, so that it stays when one is
    swapped with another, and when all of one slot's are hit. Unless they are, two of them are left by the loss.
    """
    while True:
        wanted = _another_layout(chance)
        found = sorted(
            read
            for read in foresee(job, NEWER, wanted).reads
            if (read.tensor in CUT or not (all_copies or kind == SWAPPED))
            and (all_copies or len(_alive(copies_of(read.copy.place.slot, NEWER), wanted)) > 1)
            and (kind != DONOR or (read.copy.place.kind == NEAR and read.copy.host != HOSTS[read.reader]))
        )
        if found:
            return wanted, chance.choice(found)


def _another_layout(chance: random.Random) -> Layout:
    """Of those who are left when somebody is lost."""
    lost = chance.choice(LOSSES)
    return dealt([slot for slot in range(len(HOSTS)) if slot not in lost], chance, evenly=False)


def _is_found(foreseen: Foreseen, damage: Damage, gots: Sequence[Got], trouble: Sequence[str]) -> bool:
    """Whether all members name what has to be named, somebody was told of each, and nobody reads what is cut short."""
    names = tuple(sorted(map(str, foreseen.broken)))
    told = all(any(str(copy.place) in text for text in trouble) for copy in foreseen.broken)
    return told and all(
        not got.raised
        and not got.sources & damage.gone
        and bool(got.lost) == foreseen.lost
        and (_named(got.lost) if got.lost else got.broken) == names
        for got in gots
    )


def _named(lost: str) -> tuple[str, ...]:
    """In the words of what is lost."""
    _, _, names = lost.partition("; not as they were written: ")
    return tuple(names.split(", ")) if names else ()


def _is_clean(job: Job, step: int, wanted: Layout) -> bool:
    """Whether nobody finds anything."""
    job.trouble.clear()
    return all(got.is_clean for got in restored(job, step, wanted)) and not job.trouble


# ---------------------------------------------------------------- rows


def jobs(count: int, chance: random.Random) -> Iterator[tuple[int, Job]]:
    """So many numbers, each with the job for it."""
    for first in range(0, count, PER_JOB):
        with Job(chance) as job:
            for number in range(first, min(first + PER_JOB, count)):
                yield number, job


def row(kind: str, count: int, chance: random.Random) -> dict[str, Any]:
    """All injections of a kind."""
    trials = [
        trial(job, kind, chance, all_copies=number % ALL_COPIES_EVERY == 0) for number, job in jobs(count, chance)
    ]
    for one in trials:
        if one.seen:
            print(f"not as it should be: {one.seen}", file=sys.stderr)
    return {
        "kind": kind,
        "injected": len(trials),
        "found": sum(one.found for one in trials),
        "right_source": sum(one.right_source for one in trials),
    }


def false_alarms(count: int, chance: random.Random) -> int:
    """Of clean restores, of either version into any layout."""
    found = 0
    for _, job in jobs(count, chance):
        step, wanted = chance.choice((OLDER, NEWER)), _another_layout(chance)
        if not _is_clean(job, step, wanted):
            print(f"a false alarm: step {step} as {wanted}: {job.trouble}", file=sys.stderr)
            found += 1
    return found


def negative_controls(chance: random.Random) -> list[dict[str, Any]]:
    """The same trials without what they are for."""
    unread: list[Any] = [mock.patch.object(module, "wrong", lambda *_: []) for module in (restore, wire)]
    unverified: Any = mock.patch.object(Restoration, "verify", lambda *_: None)
    found = []
    for name, patches in [("digests not compared", unread), ("nor in the end", [*unread, unverified])]:
        with contextlib.ExitStack() as stack, Job(chance) as job:
            for patch in patches:
                stack.enter_context(patch)
            trials = [trial(job, kind, chance, all_copies=False) for kind in CONTROLS]
        found.append(
            {
                "name": name,
                "injected": len(trials),
                "found": sum(one.found for one in trials),
                "right_source": sum(one.right_source for one in trials),
                "refused_in_the_end": sum(one.refused for one in trials),
                "noticed": not any(one.found or one.right_source for one in trials),
            }
        )
    return found


def main(scale: str, seed: int) -> int:
    """All of it is drawn from one seed."""
    began, chance = time.monotonic(), random.Random(seed)
    torch.set_num_threads(1)
    each, clean = (EACH_IN_CI, CLEAN_IN_CI) if scale == "ci" else (EACH, CLEAN)
    rows = [row(kind, each, chance) for kind in KINDS]
    alarms = false_alarms(clean, chance)
    controls = negative_controls(chance)
    return evidence.show(
        "corruption",
        holds=all(one["injected"] == one["found"] == one["right_source"] for one in rows)
        and not alarms
        and all(one["noticed"] for one in controls),
        seed=seed,
        rows=rows,
        injected=sum(one["injected"] for one in rows),
        found=sum(one["found"] for one in rows),
        false_alarms=alarms,
        clean_restores=clean,
        seconds=round(time.monotonic() - began, 1),
        negative_controls=controls,
        scale=scale or "default",
    )


if __name__ == "__main__":
    sys.exit(main(os.environ.get("SCALE", ""), int(os.environ.get("SEED", "0"))))
