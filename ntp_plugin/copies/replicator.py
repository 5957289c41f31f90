"""Makes copies of this slot's state beside the training: near into this host's memory, far into that of other hosts.

A far copy is a copy of its own or a part of a parity. A snapshot begins after a step. From there on a thread copies the
state, and the training may read it but must not change it: before the optimizer steps again it waits until all is
`taken`, which usually happened long before. Then the thread sends the copy to the hosts that keep it for this slot.
That may take longer than a step, and no other snapshot begins until it is over. The training never waits for another
host.

The vote on each step says whether all slots have finished, so all begin the next snapshot at the same step, and know of
the same version that it is `committed`: everybody's copies of it are where they belong. That version is not touched
until another one is committed.

Failures are reported, and the next version is another try. They cost safety, and never the training. If far copies do
not arrive for long, the newest version whose near copies are complete on all hosts is `kept`: it is not touched either
until there is another, so that a rank that dies while it takes a copy does not take its last one along. That takes room
for a third copy, while it lasts and if there is room. A copy that takes long is reported as well (`Lateness`), since a
loss costs more steps then. State that is not finite becomes no copy, since a digest would only prove that the rank had
it: it is written over the version that is given up for it, but never counts as a copy.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ntp_plugin.copies import digest
from ntp_plugin.copies.layout import CopyLayout, in_a_row, places
from ntp_plugin.copies.machine import NativeLibrary, machine
from ntp_plugin.copies.manifest import Manifest, Version, salt
from ntp_plugin.copies.parity import parity_place
from ntp_plugin.copies.slices import TensorSlice
from ntp_plugin.copies.store import FAR, NEAR, CopyKey, NoRoom, Store
from ntp_plugin.copies.wire import CHUNK, Address, Peer, PeerTrouble
from ntp_plugin.errors import NtpError
from ntp_plugin.telemetry import Copied


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A slice of a tensor where it lives: flat, entry by entry, and the numbers that go with it."""

    tensor_slice: TensorSlice
    values: Mapping[str, torch.Tensor]
    numbers: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state to copy."""

    version: Version
    holders: tuple[int, ...]
    parts: Sequence[Part]
    extras: Mapping[str, Any]


class StateNotFinite(NtpError):
    """The state has values that are not finite, and nobody would want it back."""


_POLLS = 0.05
"""The polling interval, as a fraction of the time after which a copy is late."""


@dataclasses.dataclass(kw_only=True)
class Lateness:
    """Decides whether to report a late copy: once for all copies that are late, until one is in time."""

    after_s: float
    was_reported: bool = False

    def is_news(self, seconds: float) -> bool:
        """Whether to report a copy that has been under way for this long."""
        if self.was_reported or seconds < self.after_s:
            return False
        self.was_reported = True
        return True

    def ended(self, seconds: float, *, ok: bool) -> None:
        """Record a copy that took this long. A copy that did not reach all its hosts says nothing of the next one."""
        if ok and seconds < self.after_s:
            self.was_reported = False


def _not_finite(snapshot: Snapshot) -> StateNotFinite:
    values = ((part, name, live) for part in snapshot.parts for name, live in part.values.items())
    named = next(f"{part.tensor_slice.tensor} ({name})" for part, name, live in values if not digest.are_finite([live]))
    return StateNotFinite(
        f"{named} is not finite after step {snapshot.version.step}: no copy is made",
        fix="look for the step that made it so; the copies before it are kept",
    )


def _layout(parts: Sequence[Part]) -> CopyLayout:
    return in_a_row(
        tuple((part.tensor_slice, tuple((name, live.dtype) for name, live in part.values.items())) for part in parts)
    )


def _copied(
    lives: Sequence[torch.Tensor], layout: CopyLayout, memory: torch.Tensor, salts: Sequence[str]
) -> list[int] | None:
    """Copy into memory, and return the digests of what is there; None if a value is not finite."""
    native = machine()
    if native is not None and all(live.is_cpu and live.is_contiguous() for live in lives):
        return _copied_by_native_code(native, lives, layout, memory, salts)
    asked = zip(lives, layout.values, salts, strict=True)
    several = [
        digest.Values(tensors=[live], runs=tensor_slice.runs, salts=[of_it])
        for live, (tensor_slice, *_), of_it in asked
    ]
    numbers = digest.digests_if_finite(several)
    if numbers is None:
        return None
    for live, (*_, offset) in zip(lives, layout.values, strict=True):
        target, chunk = memory[offset : offset + live.nbytes].view(live.dtype), max(1, CHUNK // live.element_size())
        for start in range(0, len(live), chunk):
            target[start : start + chunk].copy_(live.detach()[start : start + chunk], non_blocking=True)
    return [number for (number,) in numbers]


def _copied_by_native_code(
    native: NativeLibrary, lives: Sequence[torch.Tensor], layout: CopyLayout, memory: torch.Tensor, salts: Sequence[str]
) -> list[int] | None:
    """The same in native code: each page is copied right after its sum was made, and so read from memory once."""
    table, offsets = layout.table, layout.offsets
    sizes = [live.nbytes for live in lives]
    if sizes != layout.sizes.tolist():  # native code would read past the end
        raise ValueError(f"values of {sizes} bytes are laid out as {layout.sizes.tolist()}")
    found, at = table.nothing_found(), np.array([live.data_ptr() for live in lives], dtype=np.uint64)
    table.sums(native, at, found, to=offsets + np.uint64(memory.data_ptr()))
    if not table.finite(found).all() or not digest.are_finite([lives[number] for number in table.undecided]):
        return None
    numbers: list[int] = digest.salted(found[:, 0], table.keys, salts).tolist()
    return numbers


type Beside = Callable[[], contextlib.AbstractContextManager[None]]


def _beside(parts: Sequence[Part]) -> Beside | None:
    """A stream of its own for reading state on a GPU, after all work that is under way now; None on a CPU."""
    devices = {live.device for part in parts for live in part.values.values() if live.is_cuda}
    if not devices:
        return None
    (device,) = devices
    until = torch.cuda.current_stream(device).record_event()

    @contextlib.contextmanager
    def on_its_own_stream() -> Iterator[None]:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_event(until)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()

    return on_its_own_stream


class Replicator:
    """Makes the copies of one slot."""

    def __init__(
        self,
        store: Store,
        *,
        run: str,
        secret: str,
        slot: int,
        bytes_per_s: float | None = None,
        timeout_s: float = 10.0,
        trouble: Callable[[str], None],
        done: Callable[[Copied], None] = lambda _: None,
    ) -> None:
        self._store, self._run, self._secret, self._slot = store, run, secret, slot
        self._bytes_per_s, self._timeout_s = bytes_per_s, timeout_s
        self._trouble, self._done = trouble, done
        self._lateness = Lateness(after_s=timeout_s)  # a peer may take as long to answer as a copy may take in all
        self._peers: dict[Address, Peer] = {}
        self._far: tuple[Sequence[Address], Sequence[int]] = (), ()
        """The addresses that keep this slot's far copy; if that is a parity, also the slots that share it."""
        self._work: tuple[Snapshot, CopyKey, Beside | None] | None = None
        self._may_pin = True
        self._wake, self._taken, self._idle = threading.Event(), threading.Event(), threading.Event()
        self._taken.set()
        self._idle.set()
        self._closed, self._given_up = threading.Event(), threading.Event()
        self._under_way: tuple[Version, float] | None = None
        """The version that is being copied, and since when."""
        self._ok = self._near = True
        self._begun: CopyKey | None = None
        self._committed: CopyKey | None = None
        """The key of the newest version that all slots have finished: it is not touched."""
        self._kept: CopyKey | None = None
        """The key of a newer version whose near copies are complete on all hosts."""
        self._may_keep = True
        self._far_number = 0
        """The one of the two far places that is written to."""
        works = {"ntp-copies-sender": self._run_thread, "ntp-copies-clock": self._look_if_late}
        self._threads = [threading.Thread(target=work, name=name, daemon=True) for name, work in works.items()]
        for thread in self._threads:
            thread.start()

    # ------------------------------------------------ called by the training

    def send_to(self, far: Sequence[Address], *, members: Sequence[int] = ()) -> None:
        """Set the hosts that keep far copies, after a recovery; with `members`, as parts of the parity that these
        share."""
        self._far = far, members

    def begin(self, snapshot: Snapshot) -> None:
        """Begin to copy a snapshot, which nobody may change until it is `taken`."""
        self._idle.wait()  # a copy that was given up in a recovery may not have ended yet
        epoch = snapshot.version.epoch
        if self._begun is None or self._begun.epoch != epoch:
            self._kept, self._may_keep, self._far_number = None, True, 0
        untouched = {place.number for place in (self._committed, self._kept) if place and place.epoch == epoch}
        self._begun = CopyKey(kind=NEAR, slot=self._slot, epoch=epoch, number=min({0, 1, 2} - untouched))
        self._near = False
        self._given_up.clear()
        self._taken.clear()
        self._idle.clear()
        self._work = snapshot, self._begun, _beside(snapshot.parts)
        self._wake.set()

    def wait_until_taken(self) -> None:
        """Wait until the state may be changed."""
        self._taken.wait()

    def wait(self) -> None:
        """Wait until no copy is under way."""
        self._idle.wait()

    def wait_until_late(self) -> None:
        """The same, but no longer than until a copy is reported as late."""
        self._idle.wait(self._lateness.after_s)

    @property
    def through(self) -> bool:
        """Whether no copy is under way."""
        return self._idle.is_set()

    @property
    def near(self) -> bool:
        """Whether the newest copy is in this host's memory."""
        return self._near

    @property
    def ok(self) -> bool:
        """Whether the newest copy is on all hosts that should have it."""
        return self._ok

    def commit(self) -> None:
        """Commit the newest snapshot: everybody's copies of it are where they belong."""
        assert self._begun is not None, "a snapshot was begun"
        last, self._committed = self._committed, self._begun
        self._far_number = 1 - self._far_number
        if last is None or last.epoch < self._begun.epoch:
            self._store.forget_before(self._begun.epoch)
        if self._kept is not None or (last is not None and last.number > 1):
            self._kept = None
            third = max({0, 1, 2} - {self._committed.number})
            self._store.forget(dataclasses.replace(self._committed, number=third))

    def keep(self) -> None:
        """Keep the newest snapshot: everybody's near copies are complete, but somebody's far copy is not."""
        if self._may_keep:
            self._kept = self._begun

    def hold(self) -> None:
        """In a recovery, finish the near copy under way, and give up sending it."""
        self._taken.wait()
        self._given_up.set()
        for peer in list(self._peers.values()):
            peer.give_up()

    def close(self) -> None:
        """Stop the threads; the copies stay."""
        self.hold()
        self._idle.wait()
        self._closed.set()
        self._wake.set()
        for thread in self._threads:
            thread.join()
        for peer in self._peers.values():
            peer.close()

    # ------------------------------------------------ run by the thread

    def _run_thread(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            if self._closed.is_set():
                return
            assert self._work is not None, "it is woken with work"
            began = time.monotonic()
            self._under_way = self._work[0].version, began
            try:
                self._ok = self._copy(*self._work)
                self._lateness.ended(time.monotonic() - began, ok=self._ok)
            except Exception as error:  # on any error: the training must not wait for this thread for ever
                self._ok = False
                self._trouble(f"a copy was not made: {error!r}")
            finally:
                self._work = self._under_way = None
                self._taken.set()
                self._idle.set()

    def _look_if_late(self) -> None:
        """Report a late copy.

        This runs on a thread of its own, since the one that copies may be waiting for another host. It polls, because
        to start a thread with each copy would take as long as to copy a megabyte.
        """
        while not self._closed.wait(self._lateness.after_s * _POLLS):
            under_way = self._under_way
            if under_way is not None and self._lateness.is_news(time.monotonic() - under_way[1]):
                self._trouble(
                    f"{under_way[0]} is not copied after {self._lateness.after_s:g} s, by slot {self._slot} to"
                    f" {_addresses(self._far[0])}: copying goes on, and until it ends a loss costs the steps since the"
                    " copy before it (look at that host, or raise copies.lag_steps)"
                )

    def _copy(self, snapshot: Snapshot, place: CopyKey, beside: Beside | None) -> bool:
        began = time.monotonic()
        try:
            with beside() if beside is not None else contextlib.nullcontext():
                manifest, memory = self._take(snapshot, place, pinned=beside is not None)
            self._store.complete(place, manifest)
        except (NoRoom, StateNotFinite) as error:
            self._trouble(str(error))
            if isinstance(error, NoRoom) and self._kept is not None:
                self._kept, self._may_keep = None, False
            return False
        self._near = True
        taken_s = time.monotonic() - began
        self._taken.set()
        far, members = self._far
        for address in set(self._peers) - set(far):
            self._peers.pop(address).close()
        sent = [self._send(address, place, manifest, memory, members) for address in far]
        seconds = time.monotonic() - began
        self._done(
            Copied(step=snapshot.version.step, size=manifest.size, taken_s=taken_s, seconds=seconds, far=sum(sent))
        )
        return all(sent)

    def _take(self, snapshot: Snapshot, place: CopyKey, *, pinned: bool) -> tuple[Manifest, torch.Tensor]:
        """Copy a snapshot into memory. A copy from a GPU into pinned memory is complete when its stream is."""
        layout = _layout(snapshot.parts)
        size = places(layout.sizes.tolist())[1]
        memory = self._store.open(place, size)
        if pinned:
            self._pin(place)
        lives = [live for part in snapshot.parts for live in part.values.values()]
        salts = [salt(self._run, snapshot.version.step, tensor, name) for tensor, name in layout.named]
        digests = _copied(lives, layout, memory, salts)
        if digests is None:
            raise _not_finite(snapshot)
        manifest = Manifest(
            run=self._run,
            version=snapshot.version,
            slot=self._slot,
            holders=snapshot.holders,
            size=size,
            layout=layout,
            digests=tuple(digests),
            numbers=tuple(dict(part.numbers) for part in snapshot.parts),
            extras=snapshot.extras,
        )
        return manifest, memory

    def _pin(self, place: CopyKey) -> None:
        try:
            if self._may_pin:
                self._store.pin(place)
        except RuntimeError as error:
            self._may_pin = False
            self._trouble(f"copies are made through memory that is not pinned, which is slower: {error}")

    def _send(
        self, address: Address, place: CopyKey, manifest: Manifest, memory: torch.Tensor, members: Sequence[int]
    ) -> bool:
        if self._given_up.is_set():
            return False
        there = dataclasses.replace(place, kind=FAR, number=self._far_number)
        if address not in self._peers:
            self._peers[address] = Peer(address, run=self._run, secret=self._secret, timeout_s=self._timeout_s)
        try:
            found = self._peers[address].put(
                parity_place(there, members) if members else there,
                manifest,
                memory,
                pace=self._pace(time.monotonic()),
                members=members,
            )
        except PeerTrouble as error:
            self._trouble(f"{manifest.version} was not copied: {error}")
            return False
        if found:
            self._trouble(f"{manifest.version} was copied to {address[0]}, and {found[0]} arrived wrong")
        return not found

    def _pace(self, began: float) -> Callable[[int], None]:
        sent = 0

        def wait(size: int) -> None:
            nonlocal sent
            sent += size
            if self._bytes_per_s is not None:
                self._given_up.wait(max(0.0, began + sent / self._bytes_per_s - time.monotonic()))

        return wait


def _addresses(far: Sequence[Address]) -> str:
    return ", ".join(f"{host}:{port}" for host, port in far) or "its own host alone"
