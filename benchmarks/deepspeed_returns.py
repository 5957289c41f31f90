"""Kill and restart ranks again and again in one DeepSpeed job.

    python -m benchmarks.deepspeed_returns              50 cycles for each stage of ZeRO; 0 to 2 also with AutoTP
    SCALE=ci python -m benchmarks.deepspeed_returns     3 of ZeRO-1, and 3 with AutoTP

In each cycle a random slot is killed some time after a random step of all members, and a new process joins in it; the
others do not wait for it while it starts, but they do at the end. Members poll for admission with each vote here, since
many of these short steps fit into one polling interval: the next slot dies when all are present. One slot survives all
cycles. At the end weights, losses and norms are compared with a job without plugin and without faults, and the threads
and descriptors of the surviving slot with those after the first cycles.
"""

import dataclasses
import json
import os
import random
import sys
import time
from typing import Any

from benchmarks import evidence
from benchmarks.deepspeed_numerics import feature
from ntp_plugin.errors import NtpError
from ntp_plugin.membership import admission
from ntp_plugin.testing.leaks import held
from ntp_plugin.testing.ranks import Rank, Ranks
from tests.harness.played_ranks import Asking
from tests.harness.zero import job as zero
from tests.harness.zero.compare import differences, used_once, within
from tests.harness.zero.fault_points import FAULT_POINTS
from tests.harness.zero.job import Job, have_deepspeed_imported

SEED = 2510_00606
LIVES, STEPS_EACH, WARM_UP = 1, 8, 2
CYCLES, CYCLES_IN_CI = 50, 3
WITHIN_S = 0.05
PATIENCE_S = 60.0
SECOND_SLICES = Job(stage=3, frozen="3.weight", zero=json.dumps({"zero_hpz_partition_size": 2}))
"""Weights are gathered within a node while all ranks are there, and from all ranks while one is lost."""
KINDS = [*(Job(stage=stage, tp=tp) for tp in (1, 2) for stage in (0, 1, 2)), Job(stage=3), SECOND_SLICES]


@dataclasses.dataclass(frozen=True)
class Play(zero.Play):
    """A run that writes down its steps, and what it holds of the system whenever all are there."""

    def _play(self, rank: Rank) -> zero.Seen:
        from ntp_plugin.deepspeed.accumulation_window import AccumulationWindow  # noqa: PLC0415  (only ranks have DeepSpeed)

        setattr(admission, "_LOOK_S", 0.0)  # noqa: B010
        commit, epochs = AccumulationWindow._commit, set[int]()

        def committed(window: Any) -> None:
            commit(window)
            groups = window._rank.groups
            whole = len(groups.members) == len(rank.first.member_ids)
            if whole:
                rank.write([[_complete(window.step // STEPS_EACH), rank.slot]])
            if rank.slot == LIVES and whole and groups.epoch not in epochs:
                epochs.add(groups.epoch)
                rank.write([["held", *held(groups)]])

        setattr(AccumulationWindow, "_commit", committed)  # noqa: B010
        return super()._play(rank)


def _complete(number: int) -> str:
    """The row of a step of all members between two deaths. The first may be a step or two late: a joining rank is
    admitted with the next vote."""
    return f"whole after {number}"


def cycle(kind: Job, cycles: int) -> dict[str, Any]:
    """One job, and what came of it."""
    draw = random.Random(SEED + kind.stage + 10 * kind.tp)
    slots = [draw.choice([slot for slot in range(4) if slot != LIVES]) for _ in range(cycles)]
    job = dataclasses.replace(kind, steps=STEPS_EACH * (cycles + 1), epochs=1)
    awaited = {f"{slot}/{number}": STEPS_EACH * number for number, slot in enumerate(slots, start=1)}
    began = time.monotonic()
    with Ranks(4, Play(job, Asking(awaited=awaited, sooner=True)), fault_points=FAULT_POINTS) as ranks:
        for number, slot in enumerate(slots):
            ranks.wait_for_rows(4 * draw.randint(1, 5), _complete(number), PATIENCE_S)
            time.sleep(draw.uniform(0, WITHIN_S))
            ranks.kill(slot)
            ranks.wait_for_death(slot)
            ranks.start_again(slot)
        outcomes = ranks.wait(PATIENCE_S)
    found = differences({LIVES: outcomes[LIVES]}, ranks.rows, job)
    seen = [row[1:] for row in ranks.rows if row[0] == "held"][WARM_UP:]
    return {
        "feature": feature(job),
        "zero": kind.zero,
        "cycles": cycles,
        **found,
        "once": used_once(ranks.rows, job),
        "leaked": any(row[:2] != seen[0][:2] for row in seen),
        "seconds": time.monotonic() - began,
    }


def main(scale: str) -> int:
    """The rows, and whether they hold."""
    have_deepspeed_imported()
    rows: list[dict[str, Any]] = []
    fine = True
    kinds, cycles = (
        [*(Job(stage=stage, tp=tp) for tp in (1, 2) for stage in (0, 1, 2)), Job(stage=3), SECOND_SLICES],
        CYCLES,
    )
    if scale == "ci":
        kinds, cycles = [Job(stage=1), Job(tp=2)], CYCLES_IN_CI
    for kind in kinds:
        try:
            row = cycle(kind, cycles)
            fine &= within(row, "float64") and row["once"] and not row["leaked"]
        except (RuntimeError, TimeoutError, AssertionError, NtpError) as error:
            row, fine = {"feature": feature(kind), "cycles": cycles, "failed": str(error)[-300:]}, False
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    return evidence.show("deepspeed-returns", holds=fine, seed=SEED, rows=rows, scale=scale or "default")


if __name__ == "__main__":
    sys.exit(main(os.environ.get("SCALE", "")))
