"""Lose slots of jobs with layers of experts, feature by feature, at every fault point of a step.

    python -m benchmarks.experts            the evidence for `make show-experts`: half an hour on two cores
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
from tests.harness.parity.experts import BIASED, FEATURES, OF_ALL, differences, job_of, lose
from tests.harness.parity.job import Job

PARTS = Path("build/show/experts.jsonl")
FINISHED = "finished"
FAULT_POINTS = ("forward", "dispatch", "combine", "backward", "reduce", "reduced", "vote", "apply", "applied")
CONTROLS = {
    "experts_swapped": job_of(OF_ALL),
    "padding_adds_to_the_loss": job_of(OF_ALL),
    "padding_weighs_as_others": job_of(OF_ALL),
    "experts_weigh_by_groups": job_of(OF_ALL),
    "bias_stays_after_a_recovery": job_of(router=f"{BIASED} --moe-router-bias-update-rate 0.1"),
}
"""Planted faults (`parity/spoilt_experts.py`), and the jobs that must detect them."""
TIMES_THE_BOUND = 1e3
"""How much larger than the bound a control's difference has to be."""


def cases() -> Iterator[tuple[dict[str, Any], Job, tuple[int, ...]]]:
    """Yield what a row is about, its job, and the slots that it loses."""
    for number, (feature, (job, lost)) in enumerate(FEATURES.items()):
        for fault_point in (FAULT_POINTS[(2 * number + more) % len(FAULT_POINTS)] for more in range(2)):
            yield _about(job) | {"feature": feature, "moment": fault_point, "control": ""}, job, lost
    for control, job in CONTROLS.items():
        yield _about(job) | {"feature": "ep", "moment": "backward", "control": control}, job, (1,)


def _about(job: Job) -> dict[str, Any]:
    return {"layout": f"TP{job.tp} PP{job.pp} CP{job.cp} DP{job.dp}", "dtype": job.dtype}


def row_of(about: dict[str, Any], job: Job, lost: tuple[int, ...]) -> dict[str, Any]:
    """Run one case."""
    if about["control"]:
        job = Job(**{**vars(job), "spoil": about["control"]})
    found = differences(lose(job, *lost, fault_point=about["moment"], back=not about["control"]), job)
    worst, bound = max(found.values()), BOUNDS["float64"]
    holds = worst > TIMES_THE_BOUND * bound if about["control"] else worst <= bound
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
