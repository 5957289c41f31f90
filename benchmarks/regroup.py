"""Measure the time from a fault to the first good collective, in real processes: `make show-regroup`.

    python -m benchmarks.regroup            4 and 8 ranks, every fault in every operation, 20 trials; torchrun beside
    SCALE=ci python -m benchmarks.regroup   the slice for CI
    SCALE=full ...                          4, 8 and 16 ranks

Each trial starts its ranks, lets them loop over one operation in the world or in TP, DP and PP groups, injects a fault
into one of them at a random time, and waits until every survivor has made a good collective in every group of its own,
by the handles that it had from the start. The time is that of the last survivor. A survivor that is not back within ten
seconds, or gets a wrong sum or a wrong size, counts as hung.

A kill or a freeze comes from outside. A hang does no harm until the last of the others waits for the hung rank: the
clock starts there, and `p50_from_strike_s` is the time from the beginning of the hang.
"""

import dataclasses
import functools
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import evidence
from benchmarks.torchrun_restart import restart_seconds
from ntp_plugin.membership.failure_detector import Thresholds
from ntp_plugin.recovery.elastic_rank import ElasticRank
from ntp_plugin.testing.faults import hang
from ntp_plugin.testing.ranks import Rank, Ranks
from ntp_plugin.testing.stateless import Stateless

SEED = 2510_00606
THRESHOLDS = Thresholds(hung_s=0.5)
PATIENCE_S = 10.0
WORLD_AND_TP_DP_PP = 4

FAULTS = ["sigkill", "sigstop", "hang"]
REACH_S = {"sigkill": 0.3, "sigstop": THRESHOLDS.frozen_s + 0.2, "hang": THRESHOLDS.hung_s + 0.2}
"""Bound of the median; for SIGKILL it is 0.1 s on an idle machine, and eight ranks load two cores."""

MOST_RANKS_JUDGED = 8
"""The bounds are set for eight ranks; sixteen on two cores are only to come through."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    fault: str
    operation: str
    ranks: int
    trials: int


def groups_of(ranks: int) -> list[list[int]]:
    """TP pairs; DP strides in each half; PP pairs across the halves. The same list for every rank."""
    half = ranks // 2
    tp = [[slot, slot + 1] for slot in range(0, ranks, 2)]
    dp = [list(range(start + parity, start + half, 2)) for start in (0, half) for parity in (0, 1)]
    pp = [[slot, slot + half] for slot in range(half)]
    return [*tp, *(group for group in dp if group), *pp]


class Looper:
    """One rank that loops over one operation, in the world or in its own TP, DP and PP groups."""

    def __init__(self, rank: Rank) -> None:
        self._rank = ElasticRank(rank.place)
        self.groups = self._rank.groups
        self.own: list[tuple[dist.ProcessGroup, list[int]]] = []
        for slots in groups_of(len(rank.first.member_ids)):
            handle = dist.new_group(slots)
            if not isinstance(handle, int):
                self.own.append((handle, slots))
        self.driver = self._rank.drive(Stateless())
        self.waits_since = 0.0
        """When this rank last came to wait for others."""
        self._rank.start()

    def end(self) -> None:
        self._rank.leave()

    def check_all(self) -> list[str]:
        """One all-reduce in every group; what is wrong with it."""
        wrong = []
        for handle, slots in [(dist.group.WORLD, list(self.groups.members)), *self.own]:
            expected = [slot for slot in self.groups.members if slot in slots]
            total = torch.full((1,), float(self.groups.slot))
            dist.all_reduce(total, group=handle)
            if (int(total), dist.get_world_size(handle)) != (sum(expected), len(expected)):
                wrong.append(f"{expected}: sum {int(total)}, size {dist.get_world_size(handle)}")
        return wrong

    def stand(self) -> None:
        """From here on this rank waits for others."""
        self.waits_since = time.monotonic()

    def stand_and_reduce(self, size: int, group: dist.ProcessGroup | None = None) -> None:
        self.stand_and_wait(dist.all_reduce(torch.ones(size), group=group, async_op=True))

    def stand_and_wait(self, work: dist.Work | None) -> None:
        """Eight times 16 MB keep two cores busy for a tenth of a second before anybody waits."""
        assert work is not None, "this rank is in the group"
        self.stand()
        work.wait()

    def reduce_small(self) -> None:
        self.stand_and_reduce(1024)

    def reduce_large(self) -> None:
        self.stand_and_reduce(4_000_000)

    def barrier(self) -> None:
        self.stand_and_wait(dist.barrier(async_op=True))

    def pass_round(self) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        if size > 1:
            sent, got = torch.ones(1024), torch.empty(1024)
            works = [dist.isend(sent, (rank + 1) % size), dist.irecv(got, (rank - 1) % size)]
            for work in works:
                self.stand_and_wait(work)

    def reduce_subgroups(self) -> None:
        for handle, _ in self.own:
            self.stand_and_reduce(64, handle)

    def compute_between(self) -> None:
        time.sleep(0.05)
        self.stand_and_reduce(8)


OPERATIONS = {
    "all-reduce small": Looper.reduce_small,
    "all-reduce large": Looper.reduce_large,
    "barrier": Looper.barrier,
    "p2p": Looper.pass_round,
    "subgroup": Looper.reduce_subgroups,
    "out of collective": Looper.compute_between,
    "during recovery": Looper.reduce_small,
}


def play(rank: Rank, operation: str, losses: int) -> dict[str, Any]:
    """Loop until as many losses were survived; when good collectives were done in all groups, and what was wrong."""
    looper = Looper(rank)
    operate = functools.partial(OPERATIONS[operation], looper)
    looper.driver.run_with_recovery(looper.check_all)
    rank.write([["ready", rank.slot]])

    def operate_or_check() -> list[str] | None:
        if len(rank.first.member_ids) - len(looper.groups.members) == losses:
            return looper.check_all()
        operate()
        return None

    count, wrong = 0, None
    while wrong is None:
        count += 1
        if any(fault.slot == rank.slot and fault.step == count for fault in rank.faults):
            rank.write([["injected", time.monotonic()]])
        rank.reached("loop", count)
        wrong = looper.driver.run_with_recovery(operate_or_check)
    done = time.monotonic()
    looper.driver.finish()
    looper.end()
    return {"done": done, "stood": looper.waits_since, "wrong": wrong}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """Seconds to the last survivor's good collectives; or why there are none."""

    seconds: float = math.inf
    from_fault: float = math.inf
    hung: str = ""


def trial(case: Case, chance: random.Random) -> Trial:
    """Start the ranks, inject a fault, and wait until every survivor is back."""
    losses = 2 if case.operation == "during recovery" else 1
    victim, second = chance.sample(range(case.ranks), 2)
    faults = [hang(victim, during="loop", step=chance.randrange(5, 40))] if case.fault == "hang" else []
    player = functools.partial(play, operation=case.operation, losses=losses)
    ranks = Ranks(case.ranks, player, faults=faults, thresholds=THRESHOLDS)
    try:
        with ranks:
            ranks.wait_for_rows(case.ranks, "ready")
            injected = 0.0
            if case.fault == "hang":
                ranks.wait_for_rows(1, "injected", timeout_s=60)  # forty large operations come before it
            else:
                time.sleep(chance.uniform(0.02, 0.2))
                injected = ranks.kill(victim) if case.fault == "sigkill" else ranks.freeze(victim)
            if losses == 2:
                ranks.wait_for_death(victim, PATIENCE_S)
                injected = ranks.kill(second)
            away = [victim, second][:losses]
            outcomes = ranks.wait(PATIENCE_S, but=away)
            if case.fault == "sigstop":
                ranks.kill(victim)
    except (AssertionError, RuntimeError, TimeoutError) as error:
        lost = "; ".join(f"slot {slot}: {verdict.reason}" for slot, verdict in sorted(ranks.verdicts.items()))
        return Trial(
            hung=f"{type(error).__name__}: {error} (lost: {lost or 'nobody'}; injected into: {victim}, {second})"
        )
    harmed = injected
    if case.fault == "hang" and losses == 1:
        injected = next(row[1] for row in ranks.rows if row[0] == "injected")
        harmed = max(injected, *(outcome["stood"] for outcome in outcomes.values()))
    wrong = [text for outcome in outcomes.values() for text in outcome["wrong"]]
    if wrong or len(outcomes) != case.ranks - losses:
        return Trial(hung="; ".join(wrong) or f"{len(outcomes)} survivors of {case.ranks - losses}")
    done = max(outcome["done"] for outcome in outcomes.values())
    return Trial(seconds=done - harmed, from_fault=done - injected)


def measure(case: Case) -> dict[str, Any]:
    """One row."""
    chance = random.Random(f"{SEED} {case}")
    results = [trial(case, chance) for _ in range(case.trials)]
    back = [result for result in results if not result.hung] or [Trial()]
    for result in results:
        if result.hung:
            print(f"hung: {case}: {result.hung}", file=sys.stderr)
    seconds = sorted(result.seconds for result in back)
    return {
        "fault": case.fault,
        "operation": case.operation,
        "ranks": case.ranks,
        "groups": WORLD_AND_TP_DP_PP,
        "trials": case.trials,
        "p50_s": statistics.median(seconds),
        "p99_s": seconds[math.ceil(0.99 * len(seconds)) - 1],
        "p50_from_strike_s": statistics.median(result.from_fault for result in back),
        "hung": sum(bool(result.hung) for result in results),
    }


def cases(scale: str) -> list[Case]:
    sizes, trials = {"ci": ([4], 2), "": ([4, 8], 20), "full": ([4, 8, 16], 20)}[scale]
    return [
        Case(fault=fault, operation=operation, ranks=ranks, trials=trials)
        for ranks in sizes
        for fault in FAULTS
        for operation in OPERATIONS
    ]


def main(scale: str) -> int:
    rows: Sequence[dict[str, Any]] = [measure(case) for case in cases(scale)]
    ranks = max(row["ranks"] for row in rows)
    restart = restart_seconds(ranks, trials=1 if scale == "ci" else 5)
    # Two trials say nothing of a median: the slice for CI is judged by whether anybody is hung.
    judged = [] if scale == "ci" else [row for row in rows if row["ranks"] <= MOST_RANKS_JUDGED]
    holds = not any(row["hung"] for row in rows) and all(row["p50_s"] <= REACH_S[row["fault"]] for row in judged)
    return evidence.show("regroup", holds=holds, seed=SEED, rows=rows, torchrun_s=restart, scale=scale or "default")


if __name__ == "__main__":
    sys.exit(main(os.environ.get("SCALE", "")))
