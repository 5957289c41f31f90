"""Run every chaos recipe on both frameworks: what `make show-recipes` measures.

    python -m benchmarks.recipes           all recipes, each on a job of either framework: most of an hour
    python -m benchmarks.recipes NAME...   some of them

A finished recipe is a line in build/show/recipes.jsonl, and the next call continues after it; remove the file to get
all rows from one tree. Recipes of one job are compared with one undisturbed run of it.

A recipe names a Megatron job; `COUNTERPARTS` has the similar DeepSpeed job. `OWN` lists the recipes that only fit the
Megatron job, and why.
"""

import dataclasses
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import evidence
from ntp_plugin.chaos.campaign import Campaign, quietly, run_campaign
from ntp_plugin.chaos.recipe import JobSpec, Recipe, read_recipe

RECIPES = Path(__file__).parents[1] / "recipes/chaos"
ROWS = Path("build/show/recipes.jsonl")
_STEPS, _SHORT, _LONG = "--train-iters=", 300, 7.4e-6
"""The weights of a longer job in float32 may differ by no more than four times what DeepSpeed's own do between two
widths after as many steps: 1.87e-6 after 1,024 (`make show-widths`). Its losses by no more than any other's."""
COUNTERPARTS = {
    "jobs/megatron.toml": ("jobs/deepspeed-tp.toml", 64),
    "jobs/megatron-sharded.toml": ("jobs/deepspeed-tp-sharded.toml", 64),
    "jobs/megatron-hosts.toml": ("jobs/deepspeed-hosts.toml", 32),
}
"""And how many steps an epoch of it has."""
OWN = {
    "corrupt-weight": "it sets a flag of Megatron's; corrupt-weight-deepspeed sets a key of the configuration",
    "disk-full-in-checkpoint": "its ranks go on; of DeepSpeed's one ends, in disk-full-in-checkpoint-deepspeed",
    "megatron-demo": "it is eight ranks of Megatron's for make demo",
}


def recipes_of(path: Path) -> Iterator[tuple[str, Recipe]]:
    """One for each framework that it can be played on; one alone if its job is like no other one."""
    own = read_recipe(path)
    framework = "deepspeed" if any("deepspeed" in word for word in (own.job.like, *own.job.run)) else "megatron"
    yield framework, own
    if framework == "deepspeed" or not own.job.like or path.stem in OWN:
        return
    like, steps_of_an_epoch = COUNTERPARTS[own.job.like]
    other = read_recipe(path, job=RECIPES / like)
    steps = max(int(word.removeprefix(_STEPS)) for word in own.job.run if word.startswith(_STEPS))
    run = (*other.job.run, f"--epochs={math.ceil(steps / steps_of_an_epoch)}")
    weights_bound = _LONG if steps > _SHORT else None
    job = dataclasses.replace(other.job, run=run, weights_bound=weights_bound)
    yield "deepspeed", dataclasses.replace(other, job=job)


class ReferenceRuns:
    """Undisturbed runs, one for each job."""

    def __init__(self) -> None:
        self._folders: dict[tuple[object, ...], Path] = {}

    def of(self, job: JobSpec) -> Path | None:
        """Return the folder of a run with this command."""
        return self._folders.get(_command_of(job))

    def keep(self, job: JobSpec, campaign: Campaign) -> None:
        """For the next recipe."""
        if campaign.reference is not None:
            self._folders[_command_of(job)] = campaign.reference.folder


def _command_of(job: JobSpec) -> tuple[object, ...]:
    return job.run, job.environment, job.hosts


def row_of(framework: str, recipe: Recipe, campaign: Campaign, seconds: float) -> dict[str, Any]:
    """The stored row."""
    verdict = campaign.verdict
    recovered = [outcome.recovered_s for outcome in verdict.outcomes if outcome.recovered_s is not None]
    wrong = [f"{check.what}: {check.found}" for check in verdict.checks if not check.holds]
    wrong += [f"{outcome.name}: {outcome.problem}" for outcome in verdict.outcomes if outcome.problem]
    return {
        "recipe": recipe.name,
        "framework": framework,
        "strikes": sum(outcome.injected_at > 0 for outcome in verdict.outcomes),
        "recovered_s": round(max(recovered), 3) if recovered else None,
        "took_s": round(seconds),
        "wrong": "; ".join(wrong),
        "commit": evidence.commit(),
    }


def main(names: Sequence[str]) -> int:
    """All of them must hold."""
    paths = [path for path in sorted(RECIPES.glob("*.toml")) if not names or path.stem in names]
    kept, references, rows = evidence.Sittings(ROWS), ReferenceRuns(), list[dict[str, Any]]()
    folder = Path(tempfile.mkdtemp(prefix="ntp-recipes-"))
    for framework, recipe in (played for path in paths for played in recipes_of(path)):
        row = kept.find(recipe=recipe.name, framework=framework)
        if row is None:
            began, place = time.monotonic(), folder / f"{recipe.name}-{framework}"
            campaign = run_campaign(recipe, place, look=quietly, reference=references.of(recipe.job))
            references.keep(recipe.job, campaign)
            row = row_of(framework, recipe, campaign, time.monotonic() - began)
            kept.add(row)
            print(f"{framework}, {recipe.name}: {row['wrong'] or 'ok'}", flush=True)
        rows.append(row)
    holds = bool(rows) and not any(row["wrong"] for row in rows)
    print(f"the records of all runs are in {folder}")
    return evidence.show("recipes", holds=holds, seed=0, rows=rows, only_megatron=OWN)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
