"""Lose slots of jobs with experts, context parallelism and today's attention, at every fault point of a step.

    python -m benchmarks.experts            the evidence for `make show-experts`: 25 minutes on two cores
    ROWS=ep+bias,... python -m benchmarks.experts    some features
    ROWS=finished python -m benchmarks.experts       those that have run: none is started

Each job loses slots in one step and takes them back in a later one. A row is the largest relative difference over 20
steps, all ranks, all replicas and all expert groups, from stock Megatron in the same layout with nobody lost. Each
feature runs at two fault points, which go round. Each negative control has one planted fault, and must be detected.

Each finished row is a line in build/show/experts.jsonl, and the next call continues after it.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import evidence
from benchmarks.numerics import BOUNDS, SEED
from tests.harness.parity.experts import CONTROLS, FEATURES, differences, fault_points_of, lose, spoilt
from tests.harness.parity.job import Job

PARTS = Path("build/show/experts.jsonl")
FINISHED = "finished"
TIMES_THE_BOUND = 1e3
"""How much larger than the bound a control's difference has to be."""


def cases() -> Iterator[tuple[dict[str, Any], Job, tuple[int, ...]]]:
    """Yield what a row is about, its job, and the slots that it loses."""
    for number, (feature, (job, lost)) in enumerate(FEATURES.items()):
        reached = fault_points_of(job)
        for fault_point in (reached[(2 * number + more) % len(reached)] for more in range(2)):
            yield _about(job) | {"feature": feature, "moment": fault_point, "control": ""}, job, lost
    for control, (job, _) in CONTROLS.items():
        feature = "ep" if "--num-experts" in job.more else "cp" if job.cp > 1 else "gated delta nets"
        yield _about(job) | {"feature": feature, "moment": "backward", "control": control}, job, (1,)


def _about(job: Job) -> dict[str, Any]:
    return {"layout": f"TP{job.tp} PP{job.pp} CP{job.cp} DP{job.dp}", "dtype": job.dtype}


def row_of(about: dict[str, Any], job: Job, lost: tuple[int, ...]) -> dict[str, Any]:
    """Run one case."""
    control = about["control"]
    found = spoilt(control) if control else differences(lose(job, *lost, fault_point=about["moment"]), job)
    worst, bound = max(found.values()), BOUNDS["float64"]
    holds = worst > TIMES_THE_BOUND * bound if control else worst <= bound
    return about | found | {"holds": holds}


def main() -> int:
    """Run what has not run yet, and write the evidence."""
    only, sittings, rows = os.environ.get("ROWS", ""), evidence.Sittings(PARTS), list[dict[str, Any]]()
    for about, job, lost in cases():
        row = sittings.find(**about)
        wanted = row is not None if only == FINISHED else not only or about["feature"] in only.split(",")
        if not wanted:
            continue
        if row is None:
            row = row_of(about, job, lost)
            sittings.add(row)
        sys.stderr.write(f"{row}\n")
        rows.append(row)
    return evidence.show("experts", holds=bool(rows) and all(row["holds"] for row in rows), seed=SEED, rows=rows)


if __name__ == "__main__":
    sys.exit(main())
