"""Run hundreds of trials and summarize them: `make show-corruption`."""

import contextlib
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from benchmarks import evidence
from benchmarks.corruption.injections import (
    DONOR,
    KINDS,
    PAGES,
    SWAPPED,
    Damage,
    Hit,
    Trial,
    injected,
)
from benchmarks.corruption.parities import PARITY_KINDS, parity_trial
from benchmarks.corruption.restores import (
    Foreseen,
    Got,
    Read,
    alive,
    foresee,
    is_clean,
    restored,
)
from benchmarks.corruption.state import (
    CUT,
    HOSTS,
    LOSSES,
    NEWER,
    OLDER,
    PAGED,
    Copy,
    Job,
    Layout,
    copies_of,
    dealt,
)
from ntp_plugin.copies import restore, wire
from ntp_plugin.copies.restore import Restoration
from ntp_plugin.copies.store import NEAR

EACH, CLEAN = 300, 2000
EACH_IN_CI, CLEAN_IN_CI = 20, 100
PER_JOB = 25
"""Restores; then another job with other values is made."""
ALL_COPIES_EVERY = 10
CONTROLS = ("swapped shards", "stale version", "wrong place") * 4
"""Of a negative control: kinds that change all values, so that whatever is read is wrong."""


def trial(job: Job, kind: str, chance: random.Random, *, all_copies: bool) -> Trial:
    """Lose slots, choose bytes that would be read, change them, restore."""
    wanted, target = _drawn(job, kind, chance, all_copies=all_copies)
    victims = alive(copies_of(target.copy.place.slot, NEWER), wanted) if all_copies else [target.copy]
    job.trouble.clear()
    if kind == DONOR and not all(got.is_clean for got in restored(job, NEWER, wanted)):
        return Trial(found=False, right_source=False, seen="the restore before was not clean")
    contents: dict[Copy, bytes] = {}
    for copy in victims:
        contents |= KINDS[kind](Hit(job=job, copy=copy, tensor=target.tensor, chance=chance))
    with injected(job, contents) as damage:
        foreseen = foresee(job, NEWER, wanted, damage.damaged, damage.lost)
        assert foreseen.broken >= {target.copy}, "it would be read"
        assert foreseen.lost or not all_copies, "no copy is left"
        gots = restored(job, NEWER, wanted)
        found = _is_found(foreseen, damage, gots, job.trouble)
        right = all(got.right and not got.refused and not got.raised for got in gots)
        if foreseen.lost:
            right = all(got.lost for got in gots) and is_clean(job, OLDER, wanted)
    seen = "" if found and right else f"{kind} in {victims}, {target}: {gots}; foreseen {foreseen}; {job.trouble}"
    refused = any(got.refused for got in gots)
    return Trial(found=found, right_source=right, refused=refused, seen=seen, tensor=target.tensor)


def _drawn(job: Job, kind: str, chance: random.Random, *, all_copies: bool) -> tuple[Layout, Read]:
    """The layout that all restore, and one item that a member would read for it. A donor's is read from another host.
    Replicated state is in every slot's copies, so that it stays when one is swapped with another, and when all of one
    slot's are hit. Otherwise the loss leaves two of them."""
    while True:
        wanted = _another_layout(chance)
        found = sorted(
            read
            for read in foresee(job, NEWER, wanted).reads
            if (read.tensor in CUT or not (all_copies or kind == SWAPPED))
            and (all_copies or len(alive(copies_of(read.copy.place.slot, NEWER), wanted)) > 1)
            and (kind != PAGES or read.tensor in PAGED)
            and (kind != DONOR or (read.copy.place.kind == NEAR and read.copy.host != HOSTS[read.reader]))
        )
        if found:
            return wanted, chance.choice(found)


def _another_layout(chance: random.Random) -> Layout:
    """Layout of the survivors of a loss."""
    lost = chance.choice(LOSSES)
    return dealt([slot for slot in range(len(HOSTS)) if slot not in lost], chance, evenly=False)


def _is_found(foreseen: Foreseen, damage: Damage, gots: Sequence[Got], trouble: Sequence[str]) -> bool:
    """Return whether all members name the broken copies, each is reported, and nobody reads a truncated file."""
    names = tuple(sorted(map(str, foreseen.broken)))
    is_reported = all(any(str(copy.place) in text for text in trouble) for copy in foreseen.broken)
    return is_reported and all(
        not got.raised and not got.sources & damage.lost and bool(got.lost) == foreseen.lost and got.named == names
        for got in gots
    )


# ---------------------------------------------------------------- rows


def jobs(count: int, chance: random.Random, *, parities: bool = False) -> Iterator[tuple[int, Job]]:
    """So many numbers, each with the job for it."""
    for first in range(0, count, PER_JOB):
        with Job(chance, parities=parities) as job:
            for number in range(first, min(first + PER_JOB, count)):
                yield number, job


def row(kind: str, count: int, chance: random.Random) -> dict[str, Any]:
    """All injections of a kind."""
    if kind in PARITY_KINDS:
        trials = [parity_trial(job, kind, chance) for _, job in jobs(count, chance, parities=True)]
    else:
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
    } | ({} if kind in PARITY_KINDS else {"of_several_pages": sum(one.tensor in PAGED for one in trials)})


def false_alarms(count: int, chance: random.Random) -> int:
    """Count false alarms of clean restores, of either version into any layout."""
    found = 0
    for _, job in jobs(count, chance):
        step, wanted = chance.choice((OLDER, NEWER)), _another_layout(chance)
        if not is_clean(job, step, wanted):
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
    rows = [row(kind, each, chance) for kind in (*KINDS, *PARITY_KINDS)]
    alarms = false_alarms(clean, chance)
    controls = negative_controls(chance)
    return evidence.show(
        "corruption",
        holds=all(one["injected"] == one["found"] == one["right_source"] for one in rows)
        and all(one.get("of_several_pages", 1) for one in rows)
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
