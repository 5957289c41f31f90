"""Compare the simulator with known results: the NTP paper's figures, integer effects, the chooser against every fixed
policy, and the live protocol under random schedules.

    python -m benchmarks.simulator         the evidence for `make show-simulator`; SCALE=ci for CI's slice

A row holds if our figure is within 15 % of the paper's or below the paper's bound, or if it differs and
docs/simulator.md explains it line by line (`explained`); such rows must stay where the page says that they are.
"""

import os
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import choosing, evidence
from ntp_plugin.config import schema
from ntp_plugin.config.files import read_file
from ntp_plugin.config.sections import BatchPolicy
from ntp_plugin.planning.batch_split import NominalBatch, ReplicaPace, split_batch
from ntp_plugin.simulator.policies import policy_of
from ntp_plugin.simulator.protocol.rules import PLANTED
from ntp_plugin.simulator.protocol.search import Searched, search
from ntp_plugin.simulator.scenario import Scenario, Simulation
from ntp_plugin.simulator.snapshot import losses, spares_needed
from ntp_plugin.simulator.timeline import follow

CI = os.environ.get("SCALE") == "ci"
SEED = 2504_06095
WITHIN = 0.15
RECIPES = Path(__file__).parent.parent / "recipes/simulate"
DRAWS = 20 if CI else 100
RUNS = 5 if CI else 20
SCENARIOS = 40 if CI else 200
FIRST_SCENARIO = 2_000
"""The chooser was made with those below 200 in view, so that these are not."""
SEEDS = 20_000 if CI else 100_000
LIMIT_S = 60.0
WORKERS = 4

PAPER = {"dp-drop": ("~12 %", 0.12), "ntp": ("< 3 %", 0.03), "ntp-pw": ("< 1 %", 0.01)}
PAPER_SPARES = {"dp-drop": 90, "ntp": 16, "ntp-pw": 0}
WHOLE_HEADS = {"ntp": (0.025, 0.04), "ntp-pw": (0.012, 0.025)}
"""docs/simulator.md explains that full attention heads cost more than the paper's even division."""
WHOLE_HEADS_SPARES = {"ntp": (20, 28), "ntp-pw": (12, 20)}
RUN_LENGTH_SPARES = {"dp-drop": (65, 95)}
"""And that the most domains that are degraded at once depend on how long one looks; 30 days are our assumption."""


def scenario(recipe: str, **changed: Any) -> Scenario:
    options = read_file(RECIPES / f"{recipe}.toml")
    for name, value in changed.items():
        options[name] = {**options.get(name, {}), **value} if isinstance(value, dict) else value
    return Scenario(asked=schema.read(Simulation, options, where=""))


def row(case: str, policy: str, paper: str, ours: str, *, holds: bool, explained: bool = False) -> dict[str, Any]:
    return {"case": case, "policy": policy, "paper": paper, "ours": ours, "explained": explained, "holds": holds}


# ---------------------------------------------------------------- the paper's figures


def paper_losses() -> Iterator[dict[str, Any]]:
    for even in (True, False):
        asked = scenario("paper-480b", even=even)
        policies = [policy_of(name) for name in PAPER]
        rows, _ = losses(asked.fleet, policies, mode="shrink", failed=[0.004], draws=DRAWS, seed=SEED, blast=1)
        case = "0.4 % failed, throughput lost" + (" (even division)" if even else " (whole heads)")
        for found in rows:
            text, figure = PAPER[found.policy]
            near = abs(found.mean / figure - 1) <= WITHIN
            bounds = None if even else WHOLE_HEADS.get(found.policy)
            holds = near if text.startswith("~") else found.mean < figure
            if bounds:
                holds = bounds[0] < found.mean < bounds[1]
            ours = f"{found.mean:.2%} (worst of {DRAWS}: {found.worst:.2%})"
            yield row(case, found.policy, text, ours, holds=holds, explained=bounds is not None)


def paper_spares() -> Iterator[dict[str, Any]]:
    for even in (True, False):
        asked = scenario("paper-480b", even=even)
        runs = [asked.faults(SEED + run) for run in range(RUNS)]
        case = "spare domains for a whole batch" + (" (even division)" if even else " (whole heads)")
        for name, figure in PAPER_SPARES.items():
            needed = [spares_needed(asked.fleet, policy_of(name), faults, horizon_s=asked.horizon_s) for faults in runs]
            mean = statistics.fmean(needed)
            bounds = (RUN_LENGTH_SPARES | ({} if even else WHOLE_HEADS_SPARES)).get(name)
            holds = bounds[0] < mean < bounds[1] if bounds else abs(mean - figure) <= WITHIN * figure
            ours = f"{mean:.1f} ({min(needed)} to {max(needed)} in {RUNS} runs)"
            yield row(case, name, str(figure), ours, holds=holds, explained=bounds is not None)


def availability() -> dict[str, Any]:
    asked = scenario("availability-tp64")
    _, whole = losses(
        asked.fleet, [policy_of("dp-drop")], mode="shrink", failed=[0.001], draws=DRAWS, seed=SEED, blast=1
    )
    ours = whole[0].mean
    return row(
        "GPUs in whole groups, TP64, 0.1 % failed", "dp-drop", "94 %", f"{ours:.1%}", holds=abs(ours / 0.94 - 1) < 0.02
    )


# ---------------------------------------------------------------- integers


def integers() -> Iterator[dict[str, Any]]:
    """One replica of 64 at TP7 of 8, by the planner's own split."""

    def lost(per_replica: int, mode: str, *, equal: bool = False) -> float:
        nominal = NominalBatch(replicas=64, per_replica=per_replica, micro_batch=1, stages=1, healthy_ns=7_000)
        paces = dict.fromkeys(range(64), ReplicaPace(ns=7_000)) | {0: ReplicaPace(ns=8_000)}
        if equal:
            return 1 - 7_000 / 8_000
        split = split_batch(paces, nominal, BatchPolicy(mode=mode, epsilon=2 / nominal.total))
        return 1 - split.nominal_ns / split.step_ns

    cases = [
        ("TP8 -> 7, 16 micro-batches, equal split", "equal", 0.125, lost(16, "strict", equal=True)),
        ("TP8 -> 7, 16 micro-batches", "strict", 0.059, lost(16, "strict")),
        ("TP8 -> 7, 64 micro-batches", "strict", 0.015, lost(64, "strict")),
        ("TP8 -> 7, 2 of 1,024 micro-batches left out", "trim", 0.0, lost(16, "trim")),
    ]
    for case, policy, figure, ours in cases:
        yield row(case, policy, f"{figure:.1%}", f"{ours:.2%}", holds=abs(ours - figure) <= WITHIN * figure)


# ---------------------------------------------------------------- the chooser, at scale and against all


def at_scale() -> tuple[dict[str, Any], float]:
    """131,072 GPUs for 30 days with the chooser, in processor time; events must be linear in faults."""
    counts, seconds = [], 0.0
    for factor in (1.0, 0.5):
        asked = scenario(
            "h100-chooser", parallel={"dp": 4096}, batch={"global_batch": 65536}, failures={"factor": factor}
        )
        start = time.process_time()
        faults = asked.faults()
        course = follow(asked.setting(faults), policy_of("chooser"), faults)
        seconds = seconds or time.process_time() - start
        counts.append((course.losses, course.events, course.goodput))
    linear = all(events <= 2 * faults + 8 for faults, events, _ in counts)
    ours = f"{seconds:.1f} s; " + ", ".join(f"{events:,} events of {faults:,} faults" for faults, events, _ in counts)
    case = "131,072 GPUs, 30 days, Llama 3's rate"
    return row(case, "chooser", "< 60 s", ours, holds=linear and seconds < LIMIT_S), seconds


def against_all(pool: ProcessPoolExecutor) -> tuple[dict[str, Any], dict[str, float]]:
    seeds = range(FIRST_SCENARIO, FIRST_SCENARIO + SCENARIOS)
    compared = list(pool.map(choosing.compare, seeds, chunksize=4))
    best = sum(one.regret == 0 for one in compared) / len(compared)
    worst = max(one.regret for one in compared)
    record = {"scenarios": SCENARIOS, "first_scenario": FIRST_SCENARIO, "best_share": best, "worst_regret": worst}
    ours = f"best in {best:.1%} of {SCENARIOS}, elsewhere at most {worst:.2%} worse"
    case = "goodput against the best fixed policy"
    return row(case, "chooser", ">= 95 %, < 2 %", ours, holds=best >= 0.95 and worst < 0.02), record


# ---------------------------------------------------------------- schedules


def schedules(pool: ProcessPoolExecutor) -> tuple[dict[str, Any], dict[str, Any]]:
    parts = [range(first, first + SEEDS // 100) for first in range(0, SEEDS, SEEDS // 100)]
    start = time.perf_counter()
    searched: list[Searched] = list(pool.map(search, parts))
    seconds = time.perf_counter() - start
    found = [str(part.found) for part in searched if part.found is not None]
    planted = {name: search(range(2_000), name).found for name in PLANTED}
    record = {
        "schedules": sum(part.seeds for part in searched),
        "schedule_faults": sum(part.faults for part in searched),
        "schedule_epochs": sum(part.epochs for part in searched),
        "schedules_s": round(seconds, 1),
        "laws_broken": found,
        "planted_found_at_seed": {name: None if bug is None else bug.seed for name, bug in planted.items()},
    }
    holds = not found and all(bug is not None for bug in planted.values())
    caught = sum(bug is not None for bug in planted.values())
    ours = f"{record['schedules']:,} schedules, {len(found)} break a law; {caught} of {len(planted)} planted bugs found"
    return row("the live protocol under drawn schedules", "live", ">= 20,000; all", ours, holds=holds), record


def paper_figures() -> list[dict[str, Any]]:
    return [*paper_losses(), *paper_spares(), availability()]


def main() -> int:
    with ProcessPoolExecutor(WORKERS) as pool:
        figures, scaled = pool.submit(paper_figures), pool.submit(at_scale)
        live, searched = schedules(pool)
        chooser, chosen = against_all(pool)
        scale, seconds = scaled.result()
        rows = [*figures.result(), *integers(), scale, chooser, live]
    return evidence.show(
        "simulator",
        holds=all(one["holds"] for one in rows),
        seed=SEED,
        rows=rows,
        days_30_gpus_131072_s=round(seconds, 2),
        scale="ci" if CI else "default",
        **chosen,
        **searched,
    )


if __name__ == "__main__":
    sys.exit(main())
