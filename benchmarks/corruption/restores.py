"""Restore a version with all members, and predict the result with a model on sets of elements."""

import dataclasses
import threading
from collections.abc import Collection, Sequence
from typing import Any

import torch

from benchmarks.corruption.state import ENTRIES, EPOCH, HOSTS, PATIENCE_S, TENSORS, Copy, Job, Layout, copies_of, mask
from ntp_plugin.copies.layout import DTYPES
from ntp_plugin.copies.manifest import Version
from ntp_plugin.copies.replicator import Part
from ntp_plugin.copies.restore import AllGather, Restoration
from ntp_plugin.copies.slices import TensorSlice
from ntp_plugin.errors import StateLost


@dataclasses.dataclass(frozen=True, kw_only=True)
class Got:
    """The result for one member. `lost`: no sound copy; `refused`: the replica digests differ; `raised`: any other
    error."""

    sources: frozenset[Copy] = frozenset()
    broken: tuple[str, ...] = ()
    right: bool = False
    lost: str = ""
    refused: str = ""
    raised: str = ""

    @property
    def named(self) -> tuple[str, ...]:
        """The copies that are not as they were written, of a version that is lost in the words of that."""
        if not self.lost:
            return self.broken
        _, _, names = self.lost.partition("; not as they were written: ")
        return tuple(names.split(", ")) if names else ()

    @property
    def is_clean(self) -> bool:
        return self.right and not (self.broken or self.lost or self.refused or self.raised)


class Meeting:
    """An all-gather among threads. Between two calls one thread works at a time, which is faster."""

    def __init__(self, members: Collection[int]) -> None:
        self._members, self._messages = members, dict[int, Any]()
        self._barrier = threading.Barrier(len(members), timeout=PATIENCE_S)
        self.turn = threading.Lock()

    def member_id(self, member: int) -> AllGather:
        """For one of them."""

        def all_gather(what: Any) -> list[Any]:
            self._messages[member] = what
            self.turn.release()
            try:
                self._barrier.wait()
                gathered = [self._messages[other] for other in self._members]
                self._barrier.wait()
            finally:
                self.turn.acquire()
            return gathered

        return all_gather

    def break_up(self) -> None:
        """Release all who wait for a member that will not come."""
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
    parts = [Part(tensor_slice=tensor_slice, values=_room(tensor_slice), numbers={}) for tensor_slice in wanted[slot]]
    found: dict[str, Any] = {}
    try:
        restoration = Restoration(
            Version(step=step, epoch=EPOCH),
            process.store,
            slot=slot,
            host=host,
            is_host_leader=slot == min(other for other in wanted if HOSTS[other] == host),
            all_gather=meeting.member_id(slot),
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


def is_clean(job: Job, step: int, wanted: Layout) -> bool:
    """Return whether no member reports anything."""
    job.trouble.clear()
    return all(got.is_clean for got in restored(job, step, wanted)) and not job.trouble


def _room(tensor_slice: TensorSlice) -> dict[str, torch.Tensor]:
    (tensor,) = (tensor for tensor in TENSORS if tensor.name == tensor_slice.tensor)
    pairs = zip(ENTRIES, tensor.dtypes, strict=True)
    return {entry: torch.full([tensor_slice.size], torch.nan, dtype=DTYPES[dtype]) for entry, dtype in pairs}


def _is_right(job: Job, step: int, part: Part) -> bool:
    """Bit for bit."""
    right = job.right(part.tensor_slice, step)
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
    """The prediction for a restore; `lost` if a part has no copy."""

    reads: frozenset[Read]
    broken: frozenset[Copy]
    lost: bool


def foresee(
    job: Job, step: int, wanted: Layout, damaged: Collection[tuple[Copy, str]] = (), lost_copies: Collection[Copy] = ()
) -> Foreseen:
    """Each member goes through the copies in its order, and leaves aside those that it found `damaged` in a tensor."""
    reads, broken, lost = set[Read](), set[Copy](), False
    for member, slices in wanted.items():
        aside = set(lost_copies)
        for tensor_slice in slices:
            left = mask(tensor_slice)
            for copy in _in_order(member, step, wanted):
                has = job.has[copy.place.slot, tensor_slice.tensor]
                if copy in aside or not (left & has).any():
                    continue
                reads.add(Read(reader=member, copy=copy, tensor=tensor_slice.tensor))
                if (copy, tensor_slice.tensor) in damaged:
                    aside.add(copy)
                else:
                    left &= ~has
            lost |= bool(left.any())
        broken |= aside
    return Foreseen(reads=frozenset(reads), broken=frozenset(broken), lost=lost)


def _in_order(member: int, step: int, members: Collection[int]) -> list[Copy]:
    """Its own, those on its host, then others: of each, first the next slot round the ring."""
    home, own = HOSTS[member], copies_of(member, step)[0]
    found = alive([copy for slot in range(len(HOSTS)) for copy in copies_of(slot, step)], members)
    return sorted(
        found, key=lambda copy: (copy != own, copy.host != home, (copy.place.slot - member) % len(HOSTS), copy)
    )


def alive(copies: Sequence[Copy], members: Collection[int]) -> list[Copy]:
    """Copies on hosts that are still there."""
    hosts = {HOSTS[slot] for slot in members}
    return [copy for copy in copies if copy.host in hosts]
