"""Inject faults of all kinds at all fault points into all slots: what `make show-soak` measures.

    python -m benchmarks.soak              60 faults in each of five jobs: 45 minutes
    SCALE=full python -m benchmarks.soak   200 in each: more than two hours
    SCALE=pairs python -m benchmarks.soak  each kind at each fault point once, in some job that has it: 40 minutes
    SCALE=ci python -m benchmarks.soak     4 in each of two jobs

Except for the last, each finished campaign is a line in build/show/soak.jsonl (build/show/soak-pairs.jsonl), and the
next call continues after it: a sitting may end at any time. Remove the file to get a soak of one tree.

The jobs are those of recipes/chaos/jobs: Megatron with its state complete, in shards, and in two stages with
checkpoints and evaluations; DeepSpeed data parallel with ZeRO, and cut by AutoTP; four ranks each. A campaign is one
job that takes `EACH` faults, drawn from a seed (it is printed, and `ntp chaos` draws the same ones from it); the next
fault comes when the one before is over, whether or not the lost ranks are back. It draws from the pairs of a kind and a
fault point that earlier campaigns of its job have had least often. All campaigns of a job are compared with one
undisturbed run of it.

A fault is `hung` if the others did not continue, and `wrong` if it belongs to a campaign whose losses, samples, steps
or last weights differ from those of the undisturbed run: which fault caused this is not known.
"""

import dataclasses
import itertools
import math
import os
import random
import shutil
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import evidence
from ntp_plugin.chaos import weights
from ntp_plugin.chaos.campaign import Campaign, CampaignRun, quietly, run_campaign
from ntp_plugin.chaos.recipe import RandomSpec, Recipe, read_recipe
from ntp_plugin.chaos.verdict import FaultOutcome, differences

RECIPES = Path(__file__).parents[1] / "recipes/chaos"
PARTS = Path("build/show")
SEED, EACH = 20261122, 40
AT_A_FAULT_POINT = ("kill", "stop", "segfault", "hang", "lock", "exception", "memory", "exit", "clock")
AT_ANY, ANY = ("sigkill", "sigstop", "pause"), "any"
OF_BOTH = ("forward", "backward", "vote", "apply", "applied", "report", "plan", "regroup", "resume", "resumed")


type Pair = tuple[str, str]
"""A kind and a fault point."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One job, and the moments that it has."""

    job: str
    framework: str
    fault_points: tuple[str, ...]
    length: str
    """A word behind those of the job, for so many units that a campaign has room."""
    unit: int = 1
    """Steps."""
    weights_bound: float | None = None
    """Relative; without one that of the losses."""

    def pairs(self) -> tuple[Pair, ...]:
        """All that can break in it."""
        inside = ((what, fault_point) for fault_point in self.fault_points for what in AT_A_FAULT_POINT)
        return (*inside, *((what, ANY) for what in AT_ANY))


MEGATRON = (*OF_BOTH, "step", "reduce", "reduced", "between", "moved", "built", "made")
DEEPSPEED = (*OF_BOTH, "accumulated", "reduce", "stepped")
IN_FLOAT32 = 2.4e-6
"""No more than four times what DeepSpeed's own weights differ by between two widths after as many steps, which is
6.3e-7 and 8.7e-7 (`make show-widths`)."""
CASES = (
    Case(job="megatron", framework="megatron", fault_points=MEGATRON, length="--train-iters={}"),
    Case(
        job="deepspeed",
        framework="deepspeed",
        fault_points=(*DEEPSPEED, "gather"),
        length="--epochs={}",
        unit=32,
        weights_bound=IN_FLOAT32,
    ),
    Case(job="megatron-sharded", framework="megatron", fault_points=(*MEGATRON, "gather"), length="--train-iters={}"),
    Case(
        job="megatron-stages",
        framework="megatron",
        fault_points=(*MEGATRON, "exchange", "save", "written"),
        length="--train-iters={}",
    ),
    Case(
        job="deepspeed-tp",
        framework="deepspeed",
        fault_points=DEEPSPEED,
        length="--epochs={}",
        unit=64,
        weights_bound=IN_FLOAT32,
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """The faults of a job."""

    pairs: tuple[Pair, ...]
    faults: int | None = None
    """So many; or until each of the pairs has been met."""

    def left(self, found: Sequence["CampaignPart"]) -> int:
        """Faults that are not injected yet."""
        if self.faults is not None:
            return max(0, self.faults - _injected_in(found))
        return len({*self.pairs} - met(found).keys())

    def next(self, found: Sequence["CampaignPart"], count: int, seed: int) -> list[Pair]:
        """So many of those that were met least; what comes at any instant comes as often as a kind at all moments."""
        order, times = list(self.pairs), met(found)
        random.Random(seed).shuffle(order)
        fault_points = {fault_point for _, fault_point in self.pairs if fault_point != ANY}
        chosen = list[Pair]()
        for _ in range(count):
            chosen.append(min(order, key=lambda pair: times[pair] / (len(fault_points) if pair[1] == ANY else 1)))
            times[chosen[-1]] += 1
        return chosen


def recipe_of(case: Case, pairs: Sequence[Pair], *, most: int, seed: int) -> Recipe:
    """One of several equally long campaigns, none with more than `most` faults."""
    steps = 100 + 12 * most
    base = read_recipe(RECIPES / "storm.toml", job=RECIPES / f"jobs/{case.job}.toml")
    job = dataclasses.replace(
        base.job,
        run=(*base.job.run, case.length.format(math.ceil(steps / case.unit))),
        environment=(*base.job.environment, "PAUSE_S=0"),
        spares=0,
        respawns=2 * len(pairs),
        fork=True,
        thresholds="hung_s=4",
        weights_bound=case.weights_bound if most >= EACH else None,  # it is that of so long a run
        patience_s=1200.0,
    )
    words = tuple(what if fault_point == ANY else f"{what} at {fault_point}" for what, fault_point in pairs)
    drawn = RandomSpec(count=len(pairs), seed=seed, pairs=words, every_steps=3, whole_within_steps=12, seconds=0.1)
    return Recipe(name=f"soak-{case.job}-{seed}", job=job, faults=(), random=drawn)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """An injected fault."""

    what: str
    slot: str
    fault_point: str
    recovered_s: float | None
    hung: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class CampaignPart:
    """The stored result of a campaign."""

    job: str
    seed: int
    commit: str
    """Of the tree that it ran on."""
    wrong: bool
    losses_apart: float
    weights_apart: float
    """From the undisturbed run's, relative to these: the largest of all losses, and what it ended with."""
    efficiency: float
    broken_per_s: float
    calm_per_s: float
    """Micro-batches, of it and of the undisturbed run."""
    faults: tuple[Fault, ...]


def shares(scale: str) -> dict[str, Share]:
    """Shares by job. If each pair is wanted once, a fault point goes to one of the jobs that have it."""
    if scale != "pairs":
        faults, cases = {"ci": (4, CASES[:2]), "full": (200, CASES), "": (60, CASES)}[scale]
        return {case.job: Share(pairs=case.pairs(), faults=faults) for case in cases}
    owners = {
        fault_point: [case for case in CASES if fault_point in case.fault_points]
        for case in CASES
        for fault_point in case.fault_points
    }
    given: dict[str, list[str]] = {case.job: [] for case in CASES}
    for fault_point in sorted(owners, key=lambda fault_point: (len(owners[fault_point]), fault_point)):
        min((given[case.job] for case in owners[fault_point]), key=len).append(fault_point)
    given[CASES[0].job].append(ANY)
    return {case.job: Share(pairs=tuple(pair for pair in case.pairs() if pair[1] in given[case.job])) for case in CASES}


def soak(case: Case, share: Share, folder: Path, kept: evidence.Sittings) -> list[CampaignPart]:
    """Run campaigns, beside the kept ones, until all faults of the share are injected or one adds nothing new."""
    found, reference, most = [_read_part(part) for part in kept.all(job=case.job)], None, min(EACH, share.left(()))
    left = share.left(found)
    while left:
        seed = next(seed for seed in itertools.count(SEED) if seed not in {part.seed for part in found})
        recipe = recipe_of(case, share.next(found, min(most, left), seed), most=most, seed=seed)
        campaign = run_campaign(recipe, folder / recipe.name, look=quietly, reference=reference)
        assert campaign.reference is not None, "all of them are compared"
        reference, part = campaign.reference.folder, part_of(case, seed, campaign)
        kept.add(dataclasses.asdict(part))
        print(_line(campaign), flush=True)
        found.append(part)
        before, left = left, share.left(found)
        if left == before:
            break
    return found


def _injected_in(parts: Iterable[CampaignPart]) -> int:
    return sum(len(part.faults) for part in parts)


def met(parts: Iterable[CampaignPart]) -> Counter[Pair]:
    """How often each pair was."""
    return Counter((fault.what, fault.fault_point) for part in parts for fault in part.faults)


def part_of(case: Case, seed: int, campaign: Campaign) -> CampaignPart:
    """The stored result of a campaign."""
    assert campaign.reference is not None, "all of them are compared"
    return CampaignPart(
        job=case.job,
        seed=seed,
        commit=evidence.commit(),
        wrong=not all(check.holds for check in campaign.verdict.checks),
        losses_apart=max(differences(campaign.broken.history, campaign.reference.history).values(), default=math.inf),
        weights_apart=max(
            weights.apart(campaign.broken.history, campaign.reference.history).values(), default=math.inf
        ),
        efficiency=campaign.verdict.efficiency,
        broken_per_s=_micro_batches_per_s(campaign.broken),
        calm_per_s=_micro_batches_per_s(campaign.reference),
        faults=tuple(
            Fault(
                what=outcome.what,
                slot=outcome.slot,
                fault_point=outcome.fault_point or "any",
                recovered_s=outcome.recovered_s,
                hung=bool(outcome.problem) or campaign.broken.end.hung,
            )
            for outcome in _injected(campaign)
        ),
    )


def _read_part(read: dict[str, Any]) -> CampaignPart:
    return CampaignPart(**{**read, "faults": tuple(Fault(**fault) for fault in read["faults"])})


def rows_of(case: Case, parts: Sequence[CampaignPart]) -> list[dict[str, Any]]:
    """Rows by kind and fault point."""
    by_kind: dict[tuple[str, str], list[tuple[CampaignPart, Fault]]] = defaultdict(list)
    for part in parts:
        for fault in part.faults:
            by_kind[fault.what, fault.fault_point].append((part, fault))
    rows = []
    for (what, fault_point), found in sorted(by_kind.items()):
        seconds = [fault.recovered_s for _, fault in found if fault.recovered_s is not None]
        rows.append(
            {
                "framework": case.framework,
                "job": case.job,
                "fault": what,
                "moment": fault_point,
                "faults": len(found),
                "wrong": sum(part.wrong for part, _ in found),
                "hung": sum(fault.hung for _, fault in found),
                "recovered_p50_s": round(statistics.median(seconds), 3) if seconds else None,
            }
        )
    return rows


def _injected(campaign: Campaign) -> list[FaultOutcome]:
    return [outcome for outcome in campaign.verdict.outcomes if outcome.injected_at]


def _line(campaign: Campaign) -> str:
    injected, steps = _injected(campaign), len(campaign.broken.history.commits)
    bad = [f"{check.what}: {check.found}" for check in campaign.verdict.checks if not check.holds]
    hung = [f"{one.name} ({one.what} {one.slot} {one.fault_point}): {one.problem}" for one in injected if one.problem]
    return f"{campaign.recipe.name}: {len(injected)} faults in {steps} steps: {'; '.join((*bad, *hung)) or 'ok'}"


def _micro_batches_per_s(run: CampaignRun) -> float:
    history = run.history
    steps = sorted(history.commits)
    if not steps:
        return 0.0
    passed = history.committed_at(steps[-1]) - history.began_at
    return sum(sum(history.layout_of(step)[1]) for step in steps) / passed


def main(scale: str) -> int:
    """Every campaign must hold, and every requested fault must have been injected."""
    kept = evidence.Sittings(
        None if scale == "ci" else Path(f"build/show/soak{'-pairs' if scale == 'pairs' else ''}.jsonl")
    )
    rows: list[dict[str, Any]] = []
    efficiency, speed, apart, injected, sittings, left = {}, {}, {}, {}, [], {}
    every, folder = list[CampaignPart](), Path(tempfile.mkdtemp(prefix="ntp-soak-"))
    of_job = shares(scale)
    for case in (case for case in CASES if case.job in of_job):
        parts = soak(case, of_job[case.job], folder, kept)
        every += parts
        left[case.job] = of_job[case.job].left(parts)
        rows += rows_of(case, parts)
        efficiency[case.job] = round(statistics.mean(part.efficiency for part in parts), 4)
        speed[case.job] = {
            "broken": round(statistics.mean(part.broken_per_s for part in parts), 2),
            "undisturbed": round(statistics.mean(part.calm_per_s for part in parts), 2),
        }
        apart[case.job] = {
            "losses": max(part.losses_apart for part in parts),
            "weights": max(part.weights_apart for part in parts),
        }
        injected[case.job] = dict(sorted(Counter(fault.slot for part in parts for fault in part.faults).items()))
        sittings += [{"job": part.job, "seed": part.seed, "commit": part.commit} for part in parts]
    pairs = {pair for share in of_job.values() for pair in share.pairs}
    total = sum(row["faults"] for row in rows)
    holds = not any(left.values()) and not any(row["wrong"] or row["hung"] for row in rows)
    if holds:
        shutil.rmtree(folder)
    else:
        print(f"the records of all campaigns are in {folder}")
    return evidence.show(
        "soak",
        holds=holds,
        seed=SEED,
        rows=rows,
        faults=total,
        left=left,
        pairs={"of": len(pairs), "met": len(pairs & met(every).keys())},
        commit_efficiency=efficiency,
        micro_batches_per_s=speed,
        apart=apart,
        slots=injected,
        pieces=sittings,
        scale=scale or "default",
    )


if __name__ == "__main__":
    sys.exit(main(os.environ.get("SCALE", "")))
