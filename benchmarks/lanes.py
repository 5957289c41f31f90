"""Measure what lanes of a degraded layout cost: the bytes sent by either route, and their time beside one all-reduce.

    python -m benchmarks.lanes            `make bench-lanes`; times need a quiet machine, bytes do not
    SCALE=ci python -m benchmarks.lanes   fewer layouts and rounds

Bytes are counted in real runs of Megatron, at the collectives that `reduction/` issues, as a ring sends them. They must
equal the plan to the byte, and be at most 1.05 x what the widest slot must send in any case: its own units once.

Times are those of plain ranks, two replicas of TP 4. In each round all ranks reduce the same gradients in every way,
one after the other: in place and complete, as a framework's bucket does; complete, but packed and unpacked as a lane;
without one slot, by either route. A round's ratio compares the slowest rank with the first way.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import evidence
from benchmarks.routed import Routed, Tensors, connect, small_nominal
from ntp_plugin.planning.topology import parse_slots
from ntp_plugin.reduction import core_lanes, gradient_lanes
from ntp_plugin.reduction.core_lanes import CoreSums
from ntp_plugin.reduction.gradient_lanes import GradientLanes
from ntp_plugin.testing.ranks import Rank, Ranks
from tests.harness.parity.job import STEPS, run
from tests.harness.parity.layouts import BASE, LAYOUTS, degraded

SEED = 1234
BOUND = 1.05
ROUTES = ("direct", "via_core")
TP, DP, LOST = 4, 2, "r1.s0.t3"
WARM_UP = 3
GRADIENT_BYTES = 4


# ---------------------------------------------------------------- bytes


def traffic(scale: str) -> list[dict[str, Any]]:
    """Bytes by layout and route, of the busiest rank in one step of the real Megatron."""
    rows = []
    for layout in ("TP4+TP3", "TP4+TP2") if scale == "ci" else LAYOUTS:
        for route in ROUTES:
            outcomes = run(degraded(BASE, layout, dtype="float32", route=route))
            planned = outcomes[0].route
            cost = planned.direct_cost if route == "direct" else planned.core_cost
            nic = max(seen.sent["all_reduce"] for seen in outcomes.values()) / STEPS
            domain = max(seen.sent["all_to_all_single"] for seen in outcomes.values()) / STEPS
            ratio = nic / planned.least_nic_bytes
            rows.append(
                {
                    "layout": layout,
                    "route": route,
                    "between_replicas": round(nic),
                    "planned": cost.nic_bytes,
                    "in_the_domain": round(domain),
                    "planned_there": cost.domain_bytes,
                    "to_what_must_be_sent": round(ratio, 4),
                    "holds": ratio <= BOUND and abs(nic - cost.nic_bytes) < 4 and domain == cost.domain_bytes,
                }
            )
    return rows


# ---------------------------------------------------------------- times


def times(scale: str) -> dict[str, list[float]]:
    """Way -> of each round, the time of its slowest rank to that of the framework's way."""
    measured = _rounds(scale)
    slowest = {
        way: [max(seconds) for seconds in zip(*(seen[way] for seen in measured), strict=True)] for way in measured[0]
    }
    usual = slowest.pop("in place")
    return {
        f"{way} / one all-reduce in place": [mine / other for mine, other in zip(seconds, usual, strict=True)]
        for way, seconds in slowest.items()
    }


def _rounds(scale: str) -> list[Mapping[str, list[float]]]:
    width, rounds = (8, 12) if scale == "ci" else (32, 60)
    with Ranks(TP * DP, _Times(width, WARM_UP + rounds)) as ranks:
        return [
            {way: seconds[WARM_UP:] for way, seconds in seen.items()} for seen in ranks.wait(60 + 5.0 * rounds).values()
        ]


class _Times:
    def __init__(self, width: int, rounds: int) -> None:
        self._width, self._rounds = width, rounds

    def __call__(self, rank: Rank) -> dict[str, list[float]]:
        connect(rank, TP * DP)
        nominal = small_nominal(TP, DP, width=self._width)
        whole = Routed(nominal, frozenset(), rank.slot)
        short = Routed(nominal, parse_slots([LOST], nominal.topology), rank.slot)
        ways = _ways(whole, short)
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(self._rounds):
            for way, reduce in ways.items():
                dist.barrier()
                began = time.perf_counter()
                reduce()
                seconds[way].append(time.perf_counter() - began)
        dist.barrier()
        dist.destroy_process_group()
        return seconds


def _ways(whole: Routed, short: Routed) -> dict[str, Callable[[], object]]:
    gradients = _single(whole.gradients())
    (lane,) = whole.lanes
    bucket = gradient_lanes.pack(lane.slices, gradients)
    ways: dict[str, Callable[[], object]] = {
        "in place": lambda: dist.all_reduce(bucket, group=lane.group),
        "packed and unpacked": lambda: GradientLanes(whole.lanes, gradients).finish(),
        "TP4+TP3, direct": lambda: None,
        "TP4+TP3, via_core": lambda: None,
    }
    if short.lives:
        assert short.core_exchange is not None, "a living slot has a core slot"
        mine, cores = _single(short.gradients()), CoreSums(short.core_exchange)
        ways["TP4+TP3, direct"] = lambda: GradientLanes(short.lanes, mine).finish()
        ways["TP4+TP3, via_core"] = lambda: cores.begin(mine).finish()
    return ways


def _single(tensors: Tensors) -> Tensors:
    return {name: values.float() for name, values in tensors.items()}


# ---------------------------------------------------------------- copies


def copied() -> dict[str, float]:
    """Way -> bytes that are packed and unpacked, to those of the gradients, of the busiest rank."""
    with Ranks(TP * DP, _count_copies) as ranks:
        measured = list(ranks.wait(60).values())
    return {way: round(max(seen[way] for seen in measured), 3) for way in measured[0]}


def _count_copies(rank: Rank) -> dict[str, float]:
    connect(rank, TP * DP)
    nominal, count = small_nominal(TP, DP), [0]
    whole = Routed(nominal, frozenset(), rank.slot)
    short = Routed(nominal, parse_slots([LOST], nominal.topology), rank.slot)
    ways = _ways(whole, short)
    pack, unpack = gradient_lanes.pack, gradient_lanes.unpack

    def packed(*args: Any) -> torch.Tensor:
        buffer = pack(*args)
        count[0] += buffer.numel()
        return buffer

    def unpacked(slices: Any, tensors: Any, buffer: torch.Tensor) -> None:
        count[0] += buffer.numel()
        unpack(slices, tensors, buffer)

    for module in (gradient_lanes, core_lanes):
        vars(module).update(pack=packed, unpack=unpacked)
    found = {}
    for way, reduce in ways.items():
        count[0] = 0
        reduce()
        routed = short if "TP3" in way else whole
        held = sum(values.numel() for values in routed.gradients().values()) if routed.lives else 1
        found[way] = count[0] / held
    dist.barrier()
    dist.destroy_process_group()
    return found


def main(scale: str) -> int:
    sent, copies = traffic(scale), copied()
    ways = {way: statistics.median(ratios) for way, ratios in times(scale).items()}
    return evidence.show(
        "lanes",
        holds=all(row["holds"] for row in sent),
        seed=SEED,
        rows=sent,
        command="make bench-lanes",
        scale=scale or "default",
        bound=BOUND,
        copied_to_gradient_bytes=copies,
        median_time_ratio=ways,
    )


if __name__ == "__main__":
    sys.exit(main(os.environ.get("SCALE", "")))
