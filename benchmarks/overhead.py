"""Measure what the plugin costs a job with the nominal layout: the evidence for `make show-overhead`.

    python -m benchmarks.overhead            600 pairs of steps; to be run on a quiet machine
    SCALE=ci python -m benchmarks.overhead   the slice for CI

Two jobs of Megatron's own pretrain, TP 2 x DP 2, run side by side, one with the plugin and one without. They alternate,
step by step, in the order off-on, on-off, and so on: while one computes the other waits on a store, and uses no
processor. A pair is two consecutive steps; its ratio compares the times of their slowest ranks, from the beginning of a
step to that of the next.

In the nominal layout the plugin replaces nothing of Megatron but the two functions that read its flags. So there are
two claims: no hook is in and the collectives are the same, one by one; and the median ratio is at most 1.01. The median
of noisy pairs is known to an interval only (order statistics, 95 %). The claim holds if the full interval is within; if
only a part is, the output says that the number is not resolved. The slice for CI has too few pairs to resolve a
hundredth and fails only if the full interval is above.

Two controls run beside them: a pair of two jobs without the plugin, which shows the noise of the machine, and one whose
second job sleeps a twentieth of each step, which must be detected. `lanes.py` measures the time of the lanes of
degraded layouts, and the bytes that they send by either route.
"""

import dataclasses
import functools
import os
import runpy
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from benchmarks import evidence, lanes
from ntp_plugin.testing.ranks import Rank, Ranks
from tests.harness.parity.job import COLLECTIVES, RECIPES, Job, have_megatron_imported
from tests.harness.parity.layouts import BASE, MODELS
from tests.harness.played_ranks import quietly

SEED = 1234
BOUND = 1.01
WARM_UP = 5
PLANTED = 0.05
RANKS = 4
FULL, CI = 600, 24
_PATIENCE = timedelta(minutes=5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Results of one rank of one job."""

    seconds: list[float]
    collectives: dict[str, int]
    hooked: bool


@dataclasses.dataclass(frozen=True)
class Turns:
    """Decides which job computes: the first job first in even pairs, and second in odd ones."""

    store: Any
    second: bool
    ranks: int

    def place(self, pair: int) -> int:
        return 2 * pair + (self.second != bool(pair % 2))

    def wait(self, pair: int) -> None:
        before = self.place(pair) - 1
        if before >= 0:
            self.store.wait([f"turn {before} is over"], _PATIENCE)

    def over(self, pair: int) -> None:
        """This rank's part of the turn; the last rank ends it."""
        place = self.place(pair)
        if self.store.add(f"done with {place}", 1) == self.ranks:
            self.store.set(f"turn {place} is over", "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SideBySide:
    """The program of a rank: the first half of the ranks are the first job, the others are the second."""

    steps: int
    second_port: int
    with_plugin: bool
    planted: float = 0.0

    def __call__(self, rank: Rank) -> Run:
        return quietly(rank.slot, functools.partial(self._play, rank, second=rank.slot >= RANKS))

    def _play(self, rank: Rank, *, second: bool) -> Run:
        number = str(rank.slot % RANKS)
        os.environ |= {
            "RANK": number,
            "LOCAL_RANK": number,
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.second_port if second else rank.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        from ntp_plugin.megatron import activation, cpu_emulation  # noqa: PLC0415  (only ranks know Megatron: it warns of much)

        cpu_emulation.install(cpu_emulation.ON)
        enabled = second and self.with_plugin
        if enabled:
            activation.install()
        turns = Turns(TCPStore("127.0.0.1", rank.port, None, False), second, RANKS)
        clock = Clock(turns, self.planted if second else 0.0)
        collectives = count_collectives()
        job = Job(model=MODELS[BASE], tp=2, dp=2, enabled=enabled, dtype="float32", more=f"--train-iters {self.steps}")
        sys.argv = [str(RECIPES / "pretrain_gpt.py"), *job.words, "--data-cache-path", f"{rank.folder}/samples{second}"]
        runpy.run_path(str(RECIPES / "pretrain_gpt.py"), run_name="__main__")
        clock.stop()
        return Run(
            seconds=clock.seconds,
            collectives=collectives,
            hooked="ntp_plugin.megatron.hooks" in sys.modules,
        )


class Clock:
    """Times each step, from its beginning to that of the next, without the time that it waits for its turn."""

    def __init__(self, turns: Turns, planted: float) -> None:
        from megatron.training import training  # noqa: PLC0415

        self.seconds: list[float] = []
        self._turns, self._planted, self._began = turns, planted, 0.0
        self._step, training.train_step = training.train_step, self._turn

    def _turn(self, *args: Any, **kwargs: Any) -> Any:
        self.stop()
        self._turns.wait(len(self.seconds))
        self._began = time.perf_counter()
        if self._planted and self.seconds:
            time.sleep(self._planted * self.seconds[-1])
        return self._step(*args, **kwargs)

    def stop(self) -> None:
        """The step that began last is over."""
        if self._began:
            self.seconds.append(time.perf_counter() - self._began)
            self._turns.over(len(self.seconds) - 1)
            self._began = 0.0


def count_collectives() -> dict[str, int]:
    """From now on, by what they are called, how many are in them, and of what."""
    found = Counter[str]()

    def counted(name: str, original: Any) -> Any:
        def collective(*args: Any, **kwargs: Any) -> Any:
            tensors = [f"{value.dtype}{list(value.shape)}" for value in args if isinstance(value, torch.Tensor)]
            found[" ".join((name, str(torch.distributed.get_world_size(kwargs.get("group"))), *tensors))] += 1
            return original(*args, **kwargs)

        return collective

    for name in COLLECTIVES:
        setattr(torch.distributed, name, counted(name, getattr(torch.distributed, name)))
    return found


# ---------------------------------------------------------------- pairs


def side_by_side(pairs: int, **settings: Any) -> tuple[list[float], bool]:
    """The ratios of the second job to the first, and whether both had the same collectives, and no hook."""
    have_megatron_imported()
    second = TCPStore("127.0.0.1", 0, None, True, _PATIENCE, wait_for_workers=False)
    play = SideBySide(steps=WARM_UP + pairs + 1, second_port=second.port, **settings)
    with Ranks(2 * RANKS, play) as ranks:
        runs: dict[int, Run] = ranks.wait(120 + 3.0 * pairs)
    off, on = ([runs[slot] for slot in range(first, first + RANKS)] for first in (0, RANKS))
    ratios = ratios_of([run.seconds for run in off], [run.seconds for run in on])
    alike = all(one.collectives == other.collectives for one, other in zip(off, on, strict=True))
    return ratios, alike and not any(run.hooked for run in on)


def ratios_of(off: Sequence[Sequence[float]], on: Sequence[Sequence[float]]) -> list[float]:
    """Times of the slowest ranks, step by step."""
    slowest = [[max(times) for times in zip(*runs, strict=True)] for runs in (off, on)]
    return [mine / other for other, mine in zip(*slowest, strict=True)][WARM_UP:-1]  # the last has the end in it


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median of the population: two order statistics."""
    reach = 0.98 * len(values) ** 0.5
    low, high = int(len(values) / 2 - reach), int(len(values) / 2 + reach)
    ordered = sorted(values)
    return ordered[max(low, 0)], ordered[min(high, len(values) - 1)]


def row(what: str, ratios: Sequence[float], *, framework: str = "megatron") -> dict[str, Any]:
    """The median and what is known of it; half of all pairs are within `middle_half`."""
    low, high = interval(ratios)
    first, _, third = statistics.quantiles(ratios, n=4)
    return {
        "framework": framework,
        "what": what,
        "pairs": len(ratios),
        "ratio": round(statistics.median(ratios), 4),
        "interval_95": f"{low:.4f} to {high:.4f}",
        "middle_half": f"{first:.3f} to {third:.3f}",
    }


def main(scale: str) -> int:
    pairs = CI if scale == "ci" else FULL
    on, alike = side_by_side(pairs, with_plugin=True)
    noise, _ = side_by_side(pairs, with_plugin=False)
    slowed, _ = side_by_side(pairs, with_plugin=True, planted=PLANTED)
    low, high = interval(on)
    verdict = (
        "at most 1.01" if high <= BOUND else "above 1.01" if low > BOUND else "not resolved: too few or noisy pairs"
    )
    noticed = interval(slowed)[0] > 1 + PLANTED / 5
    traffic = lanes.traffic(scale)
    holds = (
        alike
        and (high <= BOUND or (scale == "ci" and low <= BOUND))
        and (noticed or scale == "ci")
        and all(sent["holds"] for sent in traffic)
    )
    return evidence.show(
        "overhead",
        holds=holds,
        seed=SEED,
        rows=[
            row("whole layout, plugin on / off", on),
            row("whole layout, off / off", noise),
            row(f"whole layout, on and {PLANTED:.0%} asleep / off", slowed),
            *(row(what, ratios, framework="plain ranks") for what, ratios in lanes.times(scale).items()),
        ],
        scale=scale or "default",
        bound=BOUND,
        healthy=verdict,
        same_collectives_and_no_hook=alike,
        negative_controls=[{"name": "a twentieth of each step asleep", "noticed": noticed}],
        traffic=traffic,
    )


if __name__ == "__main__":
    sys.exit(main(os.environ.get("SCALE", "")))
