"""A small state, copied in two versions by four slots on three hosts with the code that real jobs use."""

import dataclasses
import itertools
import queue
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import torch

from ntp_plugin.copies.layout import DTYPES
from ntp_plugin.copies.manifest import Manifest, Version
from ntp_plugin.copies.replicator import Part, Replicator, Snapshot
from ntp_plugin.copies.slices import TensorSlice
from ntp_plugin.copies.store import FAR, NEAR, CopyKey, Store
from ntp_plugin.copies.wire import Address, Peer, Server
from ntp_plugin.launch.run_folder import shared_memory
from ntp_plugin.telemetry import Copied

PATIENCE_S = 60.0

HOSTS = (0, 0, 1, 2)
"""Slot -> its host."""
FAR_HOLDERS = (2, 2, 3, 0)
"""Slot -> the slot whose process keeps its far copy, on the next host."""
PARITY_HOSTS: Mapping[int, tuple[int, tuple[int, ...]]] = {0: (3, (0, 2)), 1: (2, ()), 2: (3, (0, 2)), 3: (0, ())}
"""The same where slots share parities: slot -> who keeps what is far of its, and which slots share it."""
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
    """Entries: main weights and a moment."""

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel()


ENTRIES = ("main", "exp_avg")
TENSORS = (
    Tensor(name="up", shape=(64, 1400), cut="units", dtypes=("float32", "float32")),
    Tensor(name="down", shape=(104, 40, 6), cut="units", dim=1, dtypes=("bfloat16", "bfloat16")),
    Tensor(name="shards", shape=(52, 15), cut="flat", dtypes=("float64", "float64")),
    Tensor(name="norm", shape=(37,), cut="no", dtypes=("bfloat16", "float32")),
)
CUT = frozenset(tensor.name for tensor in TENSORS if tensor.cut != "no")
PAGED = frozenset({"up", "down"})
"""Of more than three pages of a digest: every slot's part has the same places in several of them."""

type Layout = Mapping[int, Sequence[TensorSlice]]
"""Slot -> what it has of each tensor."""


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Copy:
    """A file, named as `Restored.broken` names it."""

    host: int
    place: CopyKey

    def __str__(self) -> str:
        return f"{self.place} on host {self.host}"


def copies_of(slot: int, step: int) -> list[Copy]:
    """Near and far. The two versions of a layout are in the two places that a slot has."""
    place = CopyKey(kind=NEAR, slot=slot, epoch=EPOCH, number=step - 1)
    far = dataclasses.replace(place, kind=FAR)
    return [Copy(host=HOSTS[slot], place=place), Copy(host=HOSTS[FAR_HOLDERS[slot]], place=far)]


# ---------------------------------------------------------------- layouts


def dealt(owners: Sequence[int], chance: random.Random, *, evenly: bool) -> Layout:
    """All tensors; `evenly`, so that all slots' copies have one size."""
    layout: dict[int, list[TensorSlice]] = {owner: [] for owner in owners}
    for tensor in TENSORS:
        for owner, tensor_slice in zip(owners, _slices_of(tensor, owners, chance, evenly=evenly), strict=True):
            layout[owner].append(tensor_slice)
    return layout


def _slices_of(tensor: Tensor, owners: Sequence[int], chance: random.Random, *, evenly: bool) -> Iterator[TensorSlice]:
    """Each owner has two runs of units, in any order, or a full replicated tensor."""
    length, parts = tensor.shape[tensor.dim], len(owners)
    alike = TensorSlice(
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


def elements(tensor_slice: TensorSlice) -> torch.Tensor:
    """Places of its elements in the flat full tensor, found by cutting a tensor of all places."""
    places = torch.arange(torch.Size(tensor_slice.shape).numel()).view(tensor_slice.shape)
    ranges = [places.narrow(tensor_slice.dim, start, stop - start) for start, stop in tensor_slice.ranges]
    return torch.cat(ranges, tensor_slice.dim).reshape(-1)[tensor_slice.start : tensor_slice.stop]


# ---------------------------------------------------------------- a job


class Process:
    """The store, server and replicator of a rank."""

    def __init__(self, slot: int, folder: Path, report: Callable[[str], None]) -> None:
        self.store = Store(folder / f"host-{HOSTS[slot]}")
        self.server = Server(self.store, run=RUN, secret=SECRET, host="127.0.0.1", report=report)
        self.through: queue.Queue[Copied] = queue.Queue()
        self.replicator = Replicator(
            self.store, run=RUN, secret=SECRET, slot=slot, trouble=report, done=self.through.put, timeout_s=PATIENCE_S
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

    def __init__(self, chance: random.Random, *, parities: bool = False) -> None:
        self._parity_hosts = (
            PARITY_HOSTS if parities else {slot: (parity_host, ()) for slot, parity_host in enumerate(FAR_HOLDERS)}
        )
        self._folder = tempfile.TemporaryDirectory(prefix="corruption-of-copies-", dir=shared_memory())
        self.trouble: list[str] = []
        """All reported trouble."""
        self.layout = dealt(range(len(HOSTS)), chance, evenly=True)
        self.truth = {step: _random_values(chance) for step in (OLDER, NEWER)}
        self.has = {
            (slot, tensor_slice.tensor): mask(tensor_slice)
            for slot, slices in self.layout.items()
            for tensor_slice in slices
        }
        """Which elements of a tensor a slot's copies have."""
        self.processes = [Process(slot, Path(self._folder.name), self.trouble.append) for slot in self.layout]
        self.threads = ThreadPoolExecutor(len(HOSTS))

    def __enter__(self) -> "Job":
        for slot, process in enumerate(self.processes):
            parity_host, members = self._parity_hosts[slot]
            process.replicator.send_to([self.processes[parity_host].server.address], members=members)
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
            parts = [
                Part(tensor_slice=tensor_slice, values=self.right(tensor_slice, step), numbers={})
                for tensor_slice in self.layout[slot]
            ]
            version = Version(step=step, epoch=EPOCH)
            process.replicator.begin(Snapshot(version=version, holders=tuple(self.layout), parts=parts, extras={}))
        for process in self.processes:
            done = process.through.get(timeout=PATIENCE_S)
            assert done.far == 1, self.trouble
            process.replicator.commit()

    def right(self, tensor_slice: TensorSlice, step: int) -> dict[str, torch.Tensor]:
        """The expected values of a slice."""
        return {name: self.truth[step][tensor_slice.tensor, name][elements(tensor_slice)] for name in ENTRIES}

    def path(self, copy: Copy) -> Path:
        """Its bytes."""
        return Path(self._folder.name) / f"host-{copy.host}" / str(copy.place)

    def manifest(self, copy: Copy) -> Manifest:
        """Size of a complete file."""
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


def mask(tensor_slice: TensorSlice) -> torch.Tensor:
    mask = torch.zeros(torch.Size(tensor_slice.shape).numel(), dtype=torch.bool)
    mask[elements(tensor_slice)] = True
    return mask
