"""Compare the chooser with every fixed policy in random scenarios: hardware, layouts, models, rates, spares, costs.

All policies of a scenario see the same faults. The score is goodput: the work of the run relative to a nominal job.
"""

import dataclasses
from collections.abc import Iterator
from random import Random
from typing import Any

from ntp_plugin.config import schema
from ntp_plugin.simulator.policies import CHOOSER, policy_of
from ntp_plugin.simulator.scenario import Scenario, Simulation
from ntp_plugin.simulator.timeline import follow

FIXED = ("dp-drop", "ntp", "dp-drop+hot", "ntp+hot", "dp-drop+spares", "ntp+spares", "wait", "restart")
MODELS = {
    "13b": {"layers": 40, "hidden": 5120, "heads": 40, "ffn": 13824, "vocab": 32000, "seq": 4096},
    "70b": {"layers": 80, "hidden": 8192, "heads": 64, "groups": 8, "ffn": 28672, "vocab": 128256, "seq": 8192},
    "480b": {
        **{"layers": 96, "hidden": 20480, "heads": 128, "ffn": 81920, "vocab": 128256, "seq": 16384},
        "gated": False,
    },
}
EQUAL = 1e-5
"""Two goodputs that differ by less are one: 17 seconds in 20 days."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One scenario: the best fixed policy, and the chooser."""

    seed: int
    best: str
    best_goodput: float
    chooser_goodput: float

    @property
    def regret(self) -> float:
        """Share of the best fixed policy's goodput that is lost; 0 if the chooser is as good or better."""
        missing = 1 - self.chooser_goodput / self.best_goodput
        return missing if missing > EQUAL else 0.0


def draw_scenario(seed: int) -> dict[str, Any]:
    """Keys of `ntp simulate`."""
    random = Random(f"scenario {seed}")
    machine, tp, name = random.choice(
        (("h100-nvl8", 8, "13b"), ("h100-nvl8", 8, "70b"), ("a100-nvl8", 8, "13b"), ("b200-nvl32", 32, "480b"))
    )
    dp = random.choice((8, 16, 32, 64))
    micro_batches = random.choice((4, 8, 16, 32, 64))
    return {
        "machine": machine,
        "parallel": {"tp": tp, "pp": random.choice((1, 2, 4, 8)), "dp": dp},
        "model": MODELS[name],
        "batch": {"global_batch": dp * micro_batches},
        "state": {"distributed_optimizer": random.random() < 0.5},
        "failures": {
            "factor": random.choice((1.0, 2.0, 3.0, 5.0)),
            "repair_days": random.choice((3.0, 5.0)),
            "blast_gpus": random.choice((1, 1, 1, 2, tp // 2, tp)),
        },
        "standstills": {
            "recover_s": 10 ** random.uniform(-0.3, 1.5),
            "swap_s": 10 ** random.uniform(1, 2.8),
            "cold_s": 10 ** random.uniform(2, 4),
            "restart_s": 10 ** random.uniform(2.3, 3.5),
            "checkpoint_s": 10 ** random.uniform(2.5, 3.8),
        },
        "mode": random.choice(("shrink", "strict")),
        "packed": random.random() < 0.3,
        "min_tp_width": random.choice((1, tp // 2, tp - 1)),
        "hot": random.choice((0, 0, 1, 2, 4)),
        "cold": random.choice((0, 0, 1, 2, 4)),
        "days": 20,
        "seed": seed,
    }


def compare(seed: int) -> Compared:
    """All policies of one drawn scenario."""
    scenario = Scenario(asked=schema.read(Simulation, draw_scenario(seed), where=""))
    faults = scenario.faults()
    setting = scenario.setting(faults)
    fixed = [name for name in FIXED if _differs(scenario.asked, name)]
    goodput = {name: follow(setting, policy_of(name), faults).goodput for name in (*fixed, CHOOSER)}
    best = max(fixed, key=lambda name: goodput[name])
    return Compared(seed=seed, best=best, best_goodput=goodput[best], chooser_goodput=goodput[CHOOSER])


def _differs(asked: Simulation, name: str) -> bool:
    """Return whether the policy differs from those before it: without hot spares, or cold ones, some are equal."""
    kept = {"+hot": asked.hot, "+spares": asked.cold, "wait": asked.cold}
    return all(spares for ending, spares in kept.items() if name.endswith(ending))


def compare_all(scenarios: int) -> Iterator[Compared]:
    for seed in range(scenarios):
        yield compare(seed)
