"""Kill and restart ranks again and again in one live Megatron job: what `make show-returns` measures.

    python -m benchmarks.returns              100 cycles at 4 ranks, about ten minutes
    SCALE=ci python -m benchmarks.returns     the slice for CI: 3 cycles

In each cycle a random slot is killed at a random time, its replica continues narrower, and a new process joins in the
slot; the others do not wait for it while it starts, but they do at the end. Members poll for admission with each vote
here: with steps this short they would otherwise wait for the next one before admitting it. The next slot dies when all
have been members for a step. One slot survives all cycles. Three things are measured:

    the stop    between two steps, the second of which is the first with the new process: it is admitted, gets its
                state, and the nominal layout is restored. It includes an ordinary step; `step_s` is its length.
    leaks       threads and descriptors of the members when all are present, which must be the same in each cycle after
                the first ones, and the memory of the surviving slot.
    the result  losses, norms and weights against a job without plugin and without faults, on the same samples.
"""

import dataclasses
import itertools
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import evidence
from ntp_plugin.errors import NtpError
from ntp_plugin.membership import admission
from ntp_plugin.recovery.fault_points import FAULT_POINTS
from ntp_plugin.testing.leaks import held
from ntp_plugin.testing.ranks import Rank, Ranks
from tests.harness.parity import live
from tests.harness.parity.job import Job, have_megatron_imported, largest_differences, run
from tests.harness.parity.layouts import BASE, MODELS, uniform
from tests.harness.played_ranks import Asking

SEED = 2510_00606
RANKS, LIVES = 4, 1
BATCH, STEPS_EACH, LAST_STEPS = 2, 8, 4
CYCLES, CYCLES_IN_CI = 100, 3
WARM_UP = 5
"""Cycles after which nothing may grow any more."""
PATIENCE_S = 60.0
WRONG = 1e-9
"""In float64, after hundreds of steps of Adam; one step with another batch is a million times more."""
MEGABYTES_PER_CYCLE = 0.5

_WITHIN_S = 0.2


@dataclasses.dataclass(frozen=True)
class Play(live.Play):
    """A live run that records its steps, and its system resources whenever all members are present."""

    def _play(self, rank: Rank) -> live.Lived:
        setattr(admission, "_LOOK_S", 0.0)  # noqa: B010
        _record_steps(rank)
        return super()._play(rank)


def _record_steps(rank: Rank) -> None:
    from ntp_plugin.megatron.live import start  # noqa: PLC0415  (only ranks know Megatron)

    begin = start.MegatronJob.__init__

    def recording_init(job: Any, *args: Any) -> None:
        begin(job, *args)
        vote, epochs = job.loop.vote, set[int]()

        def voted(*arguments: Any) -> Any:
            result = vote(*arguments)
            groups = job.rank.groups
            rank.write([[_step(job.loop.done), rank.slot, job.loop.done, time.monotonic(), len(groups.members)]])
            if len(groups.members) == RANKS and groups.epoch not in epochs:
                if rank.slot == LIVES:
                    rank.write([[_complete_again(len(epochs))]])
                epochs.add(groups.epoch)
                rank.write([["held", rank.slot, rank.member_id.incarnation, *held(groups)]])
            return result

        job.loop.vote = voted

    setattr(start.MegatronJob, "__init__", recording_init)  # noqa: B010


def _step(number: int) -> str:
    return f"step {number}"


def _complete_again(times: int) -> str:
    return f"all are there, {times} times again"


# ---------------------------------------------------------------- one job


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cycles:
    """Results of the cycles."""

    rows: Sequence[Sequence[Any]]
    killed_at: Sequence[float]
    wrong: str = ""
    hung: str = ""


def cycles_of(count: int, chance: random.Random) -> Cycles:
    """One job, with so many deaths and returns."""
    have_megatron_imported()
    victims = [chance.choice([slot for slot in range(RANKS) if slot != LIVES]) for _ in range(count)]
    awaited = {f"{slot}/{number}": number * STEPS_EACH - 1 for number, slot in enumerate(victims, start=1)}
    asking = Asking(awaited=awaited, sooner=True)
    more = f"--train-iters {count * STEPS_EACH + LAST_STEPS}"
    job = Job(model=MODELS[BASE], tp=RANKS // 2, dp=2, batch=BATCH, enabled=True, more=more)
    ranks, killed_at, wrong, hung = Ranks(RANKS, Play(job, asking), fault_points=FAULT_POINTS), list[float](), "", ""
    try:
        with ranks:
            for number, slot in enumerate(victims):
                ranks.wait_for_rows(1, _step(number * STEPS_EACH + 2), timeout_s=PATIENCE_S)
                ranks.wait_for_rows(1, _complete_again(number), timeout_s=PATIENCE_S)
                time.sleep(chance.uniform(0, _WITHIN_S))
                killed_at.append(ranks.kill(slot))
                ranks.wait_for_death(slot)
                ranks.start_again(slot)
            lived = ranks.wait(PATIENCE_S + LAST_STEPS)
        assert len(lived) == RANKS, f"{len(lived)} ranks came to the end"
        wrong = _what_is_wrong(lived, more)
    except (AssertionError, NtpError, RuntimeError, TimeoutError) as caught:
        hung = f"after {len(killed_at)} deaths: {type(caught).__name__}: {caught}"
    return Cycles(rows=ranks.rows, killed_at=killed_at, wrong=wrong, hung=hung)


def _what_is_wrong(lived: Mapping[int, live.Lived], more: str) -> str:
    reference = run(uniform(BASE, batch=BATCH, more=more))
    worst = largest_differences(live.as_if_always_there(lived), reference)
    return "" if max(worst.values()) <= WRONG else f"different from the reference run: {worst}"


# ---------------------------------------------------------------- what it took


def stops(rows: Sequence[Sequence[Any]]) -> tuple[list[float], list[float]]:
    """Times of the surviving slot: from the last step before a return to the first after it; and ordinary steps."""
    mine = sorted(tuple(row[2:]) for row in rows if row[0].startswith("step ") and row[1] == LIVES)
    returned, ordinary = [], []
    for (_, since, before), (_, until, after) in itertools.pairwise(mine):
        if after > before:
            returned.append(until - since)
        elif after == before == RANKS:
            ordinary.append(until - since)
    return returned, ordinary


def recoveries(rows: Sequence[Sequence[Any]], killed_at: Sequence[float]) -> list[float]:
    """Seconds from each kill to the first step with fewer members, on the surviving slot."""
    degraded = sorted(row[3] for row in rows if row[0].startswith("step ") and row[1] == LIVES and row[4] < RANKS)
    return [next((at for at in degraded if at > killed), math.inf) - killed for killed in killed_at]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Holdings:
    """How far apart what was held is, once it should not change any more."""

    threads: int
    descriptors: int
    megabytes_per_cycle: float


def holdings(rows: Sequence[Sequence[Any]]) -> Holdings:
    """Resources of the surviving slot, after the first cycles."""
    mine = [row[3:] for row in rows if row[0] == "held" and row[1] == LIVES][WARM_UP:]
    if len(mine) < 2:
        return Holdings(threads=0, descriptors=0, megabytes_per_cycle=0.0)
    threads, descriptors, memory = zip(*mine, strict=True)
    return Holdings(
        threads=max(threads) - min(threads),
        descriptors=max(descriptors) - min(descriptors),
        megabytes_per_cycle=(memory[-1] - memory[0]) / (len(mine) - 1) / 1e6,
    )


def main(scale: str) -> int:
    """The slice for CI says nothing of times, nor of leaks."""
    count = int(os.environ.get("CYCLES", CYCLES_IN_CI if scale == "ci" else CYCLES))
    found = cycles_of(count, random.Random(SEED))
    for what in filter(None, (found.wrong, found.hung)):
        print(what, file=sys.stderr)
    returned, ordinary = stops(found.rows)
    recovered, grown = recoveries(found.rows, found.killed_at), holdings(found.rows)
    row = {
        "framework": "megatron",
        "ranks": RANKS,
        "cycles": len(returned),
        "wrong": int(bool(found.wrong)),
        "hung": int(bool(found.hung)),
        "recovered_p50_s": statistics.median(recovered),
        "returned_p50_s": statistics.median(returned or [math.inf]),
        "returned_max_s": max(returned, default=math.inf),
        "step_s": statistics.median(ordinary),
        "threads_apart": grown.threads,
        "descriptors_apart": grown.descriptors,
        "megabytes_per_cycle": grown.megabytes_per_cycle,
    }
    flat = grown.threads == grown.descriptors == 0 and grown.megabytes_per_cycle <= MEGABYTES_PER_CYCLE
    holds = len(returned) == count and not (found.wrong or found.hung) and flat
    return evidence.show("returns", holds=holds, seed=SEED, rows=[row], scale=scale or "default")


if __name__ == "__main__":
    sys.exit(main(os.environ.get("SCALE", "")))
