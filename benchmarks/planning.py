"""Measure how long planning takes: plan and digest, in one process, with empty caches; median and worst of some runs.

    python -m benchmarks.planning           growth with the number of GPUs, as JSON
    python -m benchmarks.planning --show    the evidence for `make show-planning`

Slots are lost at random over the whole cluster (so in nearly every stage), 0.1 % of them unless the case says more.
"""

import dataclasses
import json
import math
import random
import statistics
import sys
import time
from typing import Any

from benchmarks import evidence
from ntp_plugin.config import schema
from ntp_plugin.config.sections import Job
from ntp_plugin.planning.recovery_plan import Nominal, plan_recovery
from ntp_plugin.planning.shard_layout import lay_out
from ntp_plugin.planning.topology import Slot

SEED = 2504_06095
RUNS = 5
LIMIT_S = 1.0

LLAMA_70B = {"layers": 80, "hidden": 8192, "heads": 64, "groups": 8, "ffn": 28672, "vocab": 128256}
PAPER_480B = {"layers": 96, "hidden": 20480, "heads": 128, "ffn": 81920, "vocab": 128256, "seq": 16384, "gated": False}
"""The NTP paper's model (arXiv 2504.06095) has 100 layers; 96 divide over 16 stages."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    tp: int
    pp: int
    dp: int
    model: dict[str, Any]
    lost_fraction: float = 0.001

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp

    def nominal(self) -> Nominal:
        job = {"parallel": {"tp": self.tp, "pp": self.pp, "dp": self.dp}, "model": self.model}
        return Nominal.of(schema.read(Job, job, where=""))


GROWTH = [Case(tp=8, pp=16, dp=dp, model=LLAMA_70B) for dp in (8, 128, 1024)]
TP64 = [Case(tp=64, pp=16, dp=dp, model=PAPER_480B) for dp in (16, 128)]
HEAVY = [Case(tp=8, pp=16, dp=1024, model=LLAMA_70B, lost_fraction=0.01)]


def measure(case: Case) -> dict[str, Any]:
    """One row: the median time of a plan and its digest, and the worst."""
    nominal = case.nominal()
    lost = lose(nominal, case.lost_fraction)
    seconds, digests = [], set()
    for _ in range(RUNS):
        lay_out.cache_clear()
        start = time.perf_counter()
        plan = plan_recovery(nominal, lost=lost)
        digests.add(plan.digest)
        seconds.append(time.perf_counter() - start)
    assert len(digests) == 1, "the same facts gave different plans"
    return {
        "gpus": case.gpus,
        "tp": case.tp,
        "pp": case.pp,
        "dp": case.dp,
        "lost": len(lost),
        "plan_s": statistics.median(seconds),
        "worst_s": max(seconds),
        "lanes": sum(len(route.lanes.lanes) for route in plan.routes),
        "transfers": len(plan.transfers),
    }


def lose(nominal: Nominal, fraction: float) -> frozenset[Slot]:
    """Lose this share of all slots, at random; one replica is spared so that the job can continue."""
    topology = nominal.topology
    ranks = [rank for rank in range(topology.size) if topology.slot_of(rank).replica or topology.dp == 1]
    wanted = max(1, round(topology.size * fraction))
    return frozenset(topology.slot_of(rank) for rank in random.Random(SEED).sample(ranks, wanted))


def growth(rows: list[dict[str, Any]]) -> float:
    """The exponent e of time ~ GPUs^e between the first and the last row."""
    first, last = rows[0], rows[-1]
    return round(math.log(last["plan_s"] / first["plan_s"]) / math.log(last["gpus"] / first["gpus"]), 2)


def main() -> int:
    tp8, tp64 = [measure(case) for case in GROWTH], [measure(case) for case in TP64]
    heavy = [measure(case) for case in HEAVY]
    report = {"growth_exponent_tp8": growth(tp8), "growth_exponent_tp64": growth(tp64)}
    rows = tp8 + tp64 + heavy
    if "--show" in sys.argv[1:]:
        holds = all(row["worst_s"] < LIMIT_S for row in tp8 + tp64)
        return evidence.show("planning", holds=holds, seed=SEED, rows=rows, limit_s=LIMIT_S, runs=RUNS, **report)
    print(json.dumps({"machine": evidence.machine(), "seed": SEED, "runs": RUNS, **report, "rows": rows}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
