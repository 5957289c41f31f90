"""Trials in which slots 0 and 2, on two hosts, share a parity on a third host in place of far copies.

One of the two is lost with its host, and the parity or the other's near copy is changed. All members must report the
version as lost and name what was changed, and the right source is the version before. Or nobody is lost, and the near
copy of one of the two is changed: all must name it, and its contents come from the parity.
"""

import dataclasses
import random
from collections.abc import Callable, Mapping

from benchmarks.corruption.injections import Hit, Trial, flip, injected
from benchmarks.corruption.restores import is_clean, restored
from benchmarks.corruption.state import CUT, HOSTS, NEWER, OLDER, PARITY_HOSTS, Copy, Job, copies_of, dealt
from ntp_plugin.copies.store import PARITY, REBUILT

PARITY_HOST, MEMBERS = PARITY_HOSTS[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """`member` comes from the parity, because it is lost or because its near copy is wrong."""

    job: Job
    member: int
    chance: random.Random

    @property
    def parity(self) -> Copy:
        near, _ = copies_of(MEMBERS[0], NEWER)
        return Copy(host=HOSTS[PARITY_HOST], place=dataclasses.replace(near.place, kind=PARITY))

    def near(self, slot: int) -> Copy:
        return copies_of(slot, NEWER)[0]

    def content(self) -> bytearray:
        """The place of the parity."""
        return bytearray(self.job.path(self.parity).read_bytes())


def flip_parity(case: Case) -> dict[Copy, bytes]:
    """One bit, where the member has a value."""
    content = case.content()
    held = case.chance.choice(case.job.manifest(case.near(case.member)).held)
    entry = case.chance.choice(held.entries)
    content[entry.offset + case.chance.randrange(held.bytes_of(entry))] ^= 1 << case.chance.randrange(8)
    return {case.parity: bytes(content)}


def stale_parity(case: Case) -> dict[Copy, bytes]:
    """The version before."""
    before = dataclasses.replace(case.parity, place=dataclasses.replace(case.parity.place, number=OLDER - 1))
    return {case.parity: case.job.path(before).read_bytes()}


def truncate_parity(case: Case) -> dict[Copy, bytes]:
    """To any smaller size, nothing at all included."""
    content = case.content()
    return {case.parity: bytes(content[: case.chance.randrange(len(content))])}


def flip_other(case: Case) -> dict[Copy, bytes]:
    """One bit of what goes with the parity."""
    (other,) = set(MEMBERS) - {case.member}
    return _flipped(case, other)


def flip_member(case: Case) -> dict[Copy, bytes]:
    """Flip one bit of a near copy while nobody is lost."""
    return _flipped(case, case.member)


def _flipped(case: Case, slot: int) -> dict[Copy, bytes]:
    tensor = case.chance.choice(sorted(CUT))
    return flip(Hit(job=case.job, copy=case.near(slot), tensor=tensor, chance=case.chance))


NOBODY_LOST = "bit flip in a near copy with a parity"
PARITY_KINDS: Mapping[str, Callable[[Case], dict[Copy, bytes]]] = {
    "bit flip in a parity": flip_parity,
    "stale parity": stale_parity,
    "truncated parity": truncate_parity,
    "bit flip in a survivor's copy": flip_other,
    NOBODY_LOST: flip_member,
}


def parity_trial(job: Job, kind: str, chance: random.Random) -> Trial:
    """Lose a host, or nobody, change a copy, restore."""
    case = Case(job=job, member=chance.choice(MEMBERS), chance=chance)
    lost_host = None if kind == NOBODY_LOST else HOSTS[case.member]
    wanted = dealt([slot for slot, host in enumerate(HOSTS) if host != lost_host], chance, evenly=False)
    contents = PARITY_KINDS[kind](case)
    (target,) = contents
    job.trouble.clear()
    try:
        with injected(job, contents):
            gots = restored(job, NEWER, wanted)
        found = any(str(target.place) in text for text in job.trouble) and all(
            not got.raised and got.named == (str(target),) and bool(got.lost) == (kind != NOBODY_LOST) for got in gots
        )
        if kind == NOBODY_LOST:
            right = all(got.right and not got.refused for got in gots)
        else:
            right = all(got.lost for got in gots) and is_clean(job, OLDER, wanted)
    finally:
        _forget_what_was_rebuilt(job)
    seen = "" if found and right else f"{kind} in {target}: {gots}; {job.trouble}"
    return Trial(found=found, right_source=right, seen=seen)


def _forget_what_was_rebuilt(job: Job) -> None:
    for process in job.processes:
        for place, _ in list(process.store.found()):
            if place.kind == REBUILT:
                process.store.forget(place)
