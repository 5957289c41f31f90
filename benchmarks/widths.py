"""Measure how far stock DeepSpeed's weights differ between two widths: the basis of bounds for long float32 jobs.

    python -m benchmarks.widths

Each DeepSpeed job of the soak, and that of the longest recipe, runs undisturbed, at its length there, and once more on
two ranks that are not cut, with as many samples in a step. Nothing of it is degraded; only the order of sums differs,
in float32.
"""

import dataclasses
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import evidence
from benchmarks.recipes import RECIPES, recipes_of
from benchmarks.soak import CASES, EACH, recipe_of
from ntp_plugin.chaos.campaign import run_undisturbed
from ntp_plugin.chaos.history import History
from ntp_plugin.chaos.recipe import JobSpec
from ntp_plugin.chaos.verdict import differences

_CONFIG = "--deepspeed_config="


def two_ranks(job: JobSpec, folder: Path) -> JobSpec:
    """The same training by two replicas of one slot."""
    (name,) = (word.removeprefix(_CONFIG) for word in job.run if word.startswith(_CONFIG))
    config = json.loads(Path(name).read_text())
    replicas = 4 // config.pop("tensor_parallel", {}).get("autotp_size", 1)
    each = config["gradient_accumulation_steps"] * replicas // 2
    config |= {
        "gradient_accumulation_steps": each,
        "train_batch_size": 2 * each * config["train_micro_batch_size_per_gpu"],
    }
    path = folder / "two_ranks.json"
    path.write_text(json.dumps(config))
    run = tuple(word.replace(name, str(path)).replace("per-node=4", "per-node=2") for word in job.run)
    return dataclasses.replace(job, run=run)


def whole(history: History) -> list[float]:
    """All weights of the first replica, in sums."""
    weighed = {slot: one for slot, one in history.weighed.items() if slot.startswith("r0.")}
    parts = [*(one.cut for one in weighed.values()), weighed["r0.s0.t0"].alike]
    return [math.fsum(sums) for sums in zip(*parts, strict=True)]


def measured(name: str, job: JobSpec) -> dict[str, Any]:
    """One job at two widths."""
    folder = Path(tempfile.mkdtemp(prefix="ntp-widths-"))
    job = dataclasses.replace(job, environment=(*job.environment, "PAUSE_S=0"), spares=0)
    nominal = run_undisturbed(job, folder / "nominal").history
    two = run_undisturbed(two_ranks(job, folder), folder / "two").history
    mine, theirs = whole(nominal), whole(two)
    weights = math.dist(mine, theirs) / math.hypot(*mine)
    return {
        "job": name,
        "steps": len(nominal.commits),
        "losses": max(differences(two, nominal).values()),
        "weights": weights,
        "four_times": 4 * weights,
        "bound": job.weights_bound,
    }


def main() -> int:
    """Bounds must be at most four times as large."""
    jobs = {f"soak of {case.job}": recipe_of(case, case.pairs(), most=EACH, seed=0).job for case in CASES}
    jobs["storm"] = dict(recipes_of(RECIPES / "storm.toml"))["deepspeed"].job
    rows = [measured(name, job) for name, job in jobs.items() if job.weights_bound is not None]
    holds = all(row["bound"] <= row["four_times"] for row in rows)
    return evidence.show("widths", holds=holds, seed=0, rows=rows)


if __name__ == "__main__":
    sys.exit(main())
