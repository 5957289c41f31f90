"""One parity in place of a far copy of each of several slots: a g-th of the memory, for one loss among g.

What is it? Copies are files, byte after byte. Their parity is the XOR of the bytes of all members' near copies of one
version, as long as the longest of them. Bytes between values count as zeros, because no digest covers them. A parity is
itself a copy, of one tensor of words that belongs to nobody else, with a digest and a manifest like any other. That
manifest holds those of all members. So a process that finds a parity knows what must come out of it for each member.

How is it made? Each member sends its copy as it would send a far one, with the names of the members. The parity host
receives some slices at a time, verifies them, and only then folds them into the parity. It counts the slices of each
member that are in. So a connection that breaks in the middle of a slice leaves no trace, and of a copy that is sent
again only the missing slices are folded: none twice. The host needs memory for a chunk of each member at a time, and
for no copy.

A member can rely on the answer that its part arrived. Slices of one version are never given up for another try at the
same version, only for a newer one, which is begun when all slots have voted on the last. A sender of an older version
than others, or of other members' names, is refused, and so the version is not committed. When all slices of all members
are in, and not before, the manifest is written, and with it the bytes become a copy. There are two, used in turn, as of
all copies.

How is it used? If a member's copies are lost, the parity and the other members' copies are folded together again, slice
by slice and each verified, into a file of its own, `rebuilt-...`. It must have the digests of the lost member's own
manifest. If it has not, and all that was folded in was right, then the parity is wrong. A rebuilt copy is a source like
any other, for all members, until there are copies of a newer epoch.
"""

import dataclasses
import threading
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
import torch

from ntp_plugin.copies import digest
from ntp_plugin.copies.layout import CopyBatch, in_a_row, places
from ntp_plugin.copies.machine import machine
from ntp_plugin.copies.manifest import CopiedSlice, Manifest, Values, Version, salt, views
from ntp_plugin.copies.runs import MODULUS
from ntp_plugin.copies.slices import TensorSlice
from ntp_plugin.copies.store import PARITY, REBUILT, CopyKey, Store
from ntp_plugin.copies.verify import wrong_in
from ntp_plugin.errors import NtpError

TENSOR, ENTRY = "parity", "xor"
_MEMBERS = "members"


class Unwanted(NtpError):
    """What a member sent does not belong to the parity that the others make."""


class WrongParity(NtpError):
    """What comes out of a parity is not what went into it."""


def parity_place(place: CopyKey, members: Sequence[int]) -> CopyKey:
    """The key of the parity that this copy goes into: it is named after the first member."""
    return dataclasses.replace(place, kind=PARITY, slot=min(members))


def members_of(parity: Manifest) -> tuple[Manifest, ...]:
    """The manifests of the copies that went into a parity."""
    found = [Manifest.decode(text.encode()) for text in parity.extras[_MEMBERS]]
    assert None not in found, "the manifest that contains them has the right checksum"
    return tuple(one for one in found if one is not None)


# ---------------------------------------------------------------- the parity host


@dataclasses.dataclass(kw_only=True)
class _Staged:
    """A parity that is being made."""

    version: Version
    members: tuple[int, ...]
    manifests: dict[int, Manifest]
    folded: dict[int, int]
    """Member -> how many of its slices are in."""
    complete: bool = False

    @property
    def all_in(self) -> bool:
        return self.manifests.keys() == set(self.members) and all(
            self.folded[slot] == len(manifest.held) for slot, manifest in self.manifests.items()
        )


class ParityStore:
    """The parities that this process keeps for slots of other hosts."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._staged: dict[CopyKey, _Staged] = {}
        self._lock = threading.Lock()

    def take(
        self,
        place: CopyKey,
        members: tuple[int, ...],
        manifest: Manifest,
        batches: Iterable[tuple[CopyBatch, torch.Tensor]],
    ) -> list[str]:
        """Receive a member's copy and fold it in; returns which of its values arrived wrong.

        Slices with such values are not folded in.
        """
        with self._lock:
            staged = self._begun(place, members, manifest)
        for batch, memory in batches:
            found = wrong_in(memory, manifest, first=batch.first, until=batch.until, since=batch.begin)
            if found:
                return found
            with self._lock:
                self._fold_once(place, staged, manifest, batch, memory)
        with self._lock:
            if staged.all_in and not staged.complete:
                self._complete(place, staged)
        return []

    def _begun(self, place: CopyKey, members: tuple[int, ...], manifest: Manifest) -> _Staged:
        size = _whole_words(manifest.size)
        staged = self._staged.get(place)
        if staged is None or staged.version.step < manifest.version.step:
            staged = self._begin(place, members, manifest.version, size)
        _refuse_others(staged, members, manifest)
        memory = self._store.written(place)
        if memory is None:
            raise Unwanted(f"{place} was given up, since there are copies of a newer epoch")
        if len(memory) < size:
            self._store.grow(place, size)
        staged.manifests[manifest.slot] = manifest
        staged.folded.setdefault(manifest.slot, 0)
        return staged

    def _begin(self, place: CopyKey, members: tuple[int, ...], version: Version, size: int) -> _Staged:
        self._staged = {of: staged for of, staged in self._staged.items() if of.epoch >= place.epoch}
        before = self._store.written(place)
        self._staged.pop(place, None)  # if there is no room, the earlier version is lost as well
        self._store.open(place, max(size, 0 if before is None else len(before))).zero_()
        staged = _Staged(version=version, members=members, manifests={}, folded={})
        self._staged[place] = staged
        return staged

    def _fold_once(
        self, place: CopyKey, staged: _Staged, manifest: Manifest, batch: CopyBatch, came: torch.Tensor
    ) -> None:
        """Fold in slices, except those that came before, over a connection that broke."""
        memory = self._store.written(place)
        if self._staged.get(place) is not staged or memory is None:
            raise Unwanted(f"{manifest.version} of slot {manifest.slot} came while a newer version was begun")
        folded = staged.folded[manifest.slot]
        assert batch.first <= folded, "slices come in their order"
        if folded < batch.until:
            fold_batch(memory, manifest, dataclasses.replace(batch, first=folded), came)
            staged.folded[manifest.slot] = batch.until

    def _complete(self, place: CopyKey, staged: _Staged) -> None:
        memory = self._store.written(place)
        assert memory is not None, "it was just written"
        self._store.complete(place, _manifest(place, memory, [staged.manifests[slot] for slot in staged.members]))
        staged.complete = True


def _refuse_others(staged: _Staged, members: tuple[int, ...], manifest: Manifest) -> None:
    slot, version = manifest.slot, manifest.version
    if version != staged.version:
        raise Unwanted(f"slot {slot} sent {version}, and others of {members} have sent {staged.version}")
    if members != staged.members or slot not in members:
        raise Unwanted(f"slot {slot} names {members} as members of its parity, and the others {staged.members}")
    if staged.manifests.get(slot, manifest) != manifest:
        raise Unwanted(f"slot {slot} sent {version} before, with another state")


def _manifest(place: CopyKey, memory: torch.Tensor, members: Sequence[Manifest]) -> Manifest:
    """The manifest of a complete parity."""
    first = members[0]
    words = memory.view(torch.int32)
    tensor_slice = TensorSlice(
        tensor=TENSOR, shape=(len(words),), dim=0, ranges=((0, len(words)),), start=0, stop=len(words), whole=str(place)
    )
    return Manifest(
        run=first.run,
        version=first.version,
        slot=place.slot,
        holders=first.holders,
        size=len(memory),
        layout=in_a_row(((tensor_slice, ((ENTRY, torch.int32),)),)),
        digests=(digest.digest(words, tensor_slice.runs, salt=salt(first.run, first.version.step, TENSOR, ENTRY)),),
        numbers=({},),
        extras={_MEMBERS: [manifest.encode().decode() for manifest in members]},
    )


def _whole_words(size: int) -> int:
    return max(4, places([size])[1])


# ---------------------------------------------------------------- folding and rebuilding


def fold(memory: torch.Tensor, held: CopiedSlice, values: Values) -> None:
    """Fold a slice of a copy into bytes that may be shorter than the copy; folded a second time it is out again."""
    for entry in held.entries:
        if 0 <= entry.offset < len(memory):
            came = values[entry.name].reshape(-1).view(torch.uint8)
            target = memory[entry.offset : entry.offset + len(came)]
            target.bitwise_xor_(came[: len(target)])


def fold_batch(memory: torch.Tensor, manifest: Manifest, batch: CopyBatch, came: torch.Tensor) -> None:
    """Fold several slices, from the bytes that came."""
    native, layout = machine(), manifest.layout
    if native is None:
        for held in manifest.held[batch.first : batch.until]:
            fold(memory, held, views(came, held, batch.begin))
        return
    values = slice(layout.begins[batch.first], layout.begins[batch.until])
    offsets, sizes = layout.offsets[values], layout.sizes[values]
    assert layout.end <= len(memory), "it has grown"
    at, source = np.uint64(memory.data_ptr()), np.uint64((came.data_ptr() - batch.begin) % MODULUS)
    native.fold(np.stack((offsets + at, offsets + source, sizes), axis=1))


def rebuild(
    store: Store, place: CopyKey, parity: Manifest, lost: Manifest, read: Callable[[Manifest, int, CopiedSlice], Values]
) -> CopyKey:
    """Put a member's copy together beside the parity; `read` returns verified slices of the other members' copies."""
    target = dataclasses.replace(place, kind=REBUILT, slot=lost.slot)
    memory = store.open(target, lost.size)
    try:
        store.read_into(place, memory)
        for other in members_of(parity):
            for number, held in enumerate(other.held if other.slot != lost.slot else ()):
                if held.entries and held.entries[0].offset < lost.size:
                    fold(memory, held, read(other, number, held))
        found = wrong_in(memory, lost)
        if found:
            raise WrongParity(f"{found[0]} of slot {lost.slot} comes out of it wrong")
        store.complete(target, lost)
    except BaseException:
        store.forget(target)
        raise
    return target


def is_rebuildable(slot: int, members: Iterable[int], there: Collection[int]) -> bool:
    """Whether a parity of these members can restore a slot, given the slots whose copies are there."""
    return slot in members and all(other in there for other in members if other != slot)
