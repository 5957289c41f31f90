"""What being able to lose ranks costs a job that loses none: the evidence for `make show-live-overhead`.

    python -m benchmarks.live_overhead            to be run on a quiet machine
    SCALE=ci python -m benchmarks.live_overhead   a slice

As in `overhead.py` two jobs stand side by side and take turns, step by step; a pair is two steps that ran one after the
other. Here the second job is a live one, as `ntp run` starts it: its groups can be edited, its ranks are watched and
beat, it votes on each step and tells its record. Nothing is copied. Megatron trains TP2 x DP2, DeepSpeed four ranks
with ZeRO-1.

What it costs is a time in each step, and hardly more in a longer one: the vote is one message to the first rank and one
back, whatever is trained. So there are steps of two lengths. That of the test model, some hundredths of a second of
which most is Python and messages, tells what the time is; the claim is on one of about a second, which is short for
who trains on many GPUs.

The threads of the live job, its watcher and its heart, go on in the turns of both jobs, so that the ratio does not show
them. Their processor time is measured by itself, as a share of all processors' time, and added: the claim is that the
interval of the median and they together are within 1.01 where the step is long. What is not counted is the supervisor,
one process on a host.

Beside them stands, for each framework, a pair with a live job that sleeps a twentieth of each long step: it must be
seen.
"""

import dataclasses
import functools
import json
import os
import runpy
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks import evidence
from benchmarks.overhead import BOUND, PLANTED, RANKS, SEED, WARM_UP, Clock, Turns, interval, ratios_of, row
from benchmarks.parity.job import RECIPES, Job, have_megatron_imported
from benchmarks.parity.layouts import BASE, MODELS
from benchmarks.rehearsal import quietly
from benchmarks.zero.job import have_deepspeed_imported
from ntp_plugin.testing.ranks import Rank, Ranks

SHORT, LONG = "short", "long"
FULL, CI = {SHORT: 300, LONG: 120}, {SHORT: 24, LONG: 12}
FRAMEWORKS = {"megatron": have_megatron_imported, "deepspeed": have_deepspeed_imported}
MEGATRON = {
    SHORT: "",
    LONG: "--hidden-size 512 --kv-channels 32 --ffn-hidden-size 1280 --seq-length 128 --max-position-embeddings 128",
}
DEEPSPEED = {SHORT: (512, 64), LONG: (1536, 320)}
"""Features, and samples of a micro-batch."""
EACH = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What one rank of one job saw."""

    seconds: list[float]
    threads: float
    """Processor seconds of our threads in a second."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SideBySide:
    """What a rank does: the first half of the ranks are the framework's own job, the others a live one."""

    framework: str
    length: str
    steps: int
    second_port: int
    planted: float = 0.0

    def __call__(self, rank: Rank) -> Run:
        return quietly(rank.slot, functools.partial(self._play, rank, live=rank.slot >= RANKS))

    def _play(self, rank: Rank, *, live: bool) -> Run:
        number = rank.slot % RANKS
        os.environ |= _of_a_live_job(rank, number) if live else {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        os.environ |= {
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.second_port if live else rank.port),
        }
        turns = Turns(TCPStore("127.0.0.1", rank.port, None, False), live, RANKS)
        work = {"megatron": _train_megatron, "deepspeed": _train_deepspeed}[self.framework]
        began = time.monotonic()
        clock, end = work(self, turns, live, f"{rank.folder}/samples{live}")
        took = _processor_seconds_of_threads() / (time.monotonic() - began)
        end()
        return Run(seconds=clock.seconds, threads=took)


def _of_a_live_job(rank: Rank, number: int) -> dict[str, str]:
    """A job of its own beside that of the harness."""
    folder = Path(rank.folder)
    return rank.environment() | {
        "TORCHELASTIC_RUN_ID": "live",
        "NTP_OCCUPANT": f"{number}/0",
        "NTP_HEARTBEATS": str(folder / "live-heartbeats"),
        "NTP_EVENTS": str(folder / "live-events"),
    }


def _processor_seconds_of_threads() -> float:
    """Of those that are ours."""
    ticks, found = os.sysconf("SC_CLK_TCK"), 0.0
    for thread in threading.enumerate():
        if thread.name.startswith("ntp-"):
            told = Path(f"/proc/self/task/{thread.native_id}/stat").read_text(encoding="utf-8").rpartition(")")[2]
            user, system = told.split()[11:13]
            found += (int(user) + int(system)) / ticks
    return found


# ---------------------------------------------------------------- the jobs


def _train_megatron(asked: SideBySide, turns: Turns, live: bool, samples: str) -> Any:
    from ntp_plugin.megatron import activation, cpu  # noqa: PLC0415  (only ranks know Megatron: it warns of much)

    cpu.install(cpu.ON)
    if live:
        activation.install()
    clock = Clock(turns, asked.planted if live else 0.0)
    more = f"--train-iters {asked.steps} {MEGATRON[asked.length]}"
    job = Job(model=MODELS[BASE], tp=2, dp=2, enabled=live, dtype="float32", more=more)
    sys.argv = [str(RECIPES / "pretrain_gpt.py"), *job.words, "--data-cache-path", samples]
    runpy.run_path(str(RECIPES / "pretrain_gpt.py"), run_name="__main__")
    clock.stop()
    if not live:
        return clock, _nothing
    from ntp_plugin.megatron.live import start  # noqa: PLC0415

    assert start.Jobs.now is not None, "it was a live job"
    return clock, start.end


class _OwnClock(Clock):
    """Of a loop that says itself where its steps begin."""

    def __init__(self, turns: Turns, planted: float) -> None:
        self.seconds: list[float] = []
        self._turns, self._planted, self._began = turns, planted, 0.0

    def begin(self) -> None:
        self._turn()

    def _step(self) -> None:
        """The loop takes it."""


def _train_deepspeed(asked: SideBySide, turns: Turns, live: bool, _samples: str) -> Any:
    if live:
        from ntp_plugin.deepspeed import activation as ours  # noqa: PLC0415
    import deepspeed  # noqa: PLC0415

    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    features, size = DEEPSPEED[asked.length]
    first, second = torch.nn.Linear(features, features), torch.nn.Linear(features, features)
    model = torch.nn.Sequential(first, torch.nn.Tanh(), second, torch.nn.Linear(features, 1))
    adam = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    config = {
        "train_batch_size": RANKS * EACH * size,
        "train_micro_batch_size_per_gpu": size,
        "gradient_accumulation_steps": EACH,
        "steps_per_print": 1_000_000,
        "optimizer": adam,
        "zero_optimization": {"stage": 1},
    }
    config |= {"ntp": {"enabled": True, "copies": {"mode": "off"}}} if live else {}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    samples = TensorDataset(torch.randn(1, features).expand(asked.steps * EACH * size * RANKS, features))
    sampler: Any = DistributedSampler(samples, RANKS, int(os.environ["RANK"]), shuffle=False)
    clock = _OwnClock(turns, asked.planted if live else 0.0)
    for number, (x,) in enumerate(DataLoader(samples, batch_size=size, sampler=sampler)):
        if number % EACH == 0:
            clock.begin()
        loss = (engine(x).squeeze(-1) - x.sum(dim=-1)).square().mean()
        engine.backward(loss)
        engine.step()
    clock.stop()
    return clock, ours.end if live else _nothing


def _nothing() -> None:
    """There is nothing to end."""


# ---------------------------------------------------------------- pairs


def side_by_side(framework: str, length: str, pairs: int, *, planted: float = 0.0) -> tuple[list[float], float, float]:
    """The ratios of the live job to the other, the share of all processors that its threads take, and the seconds of a
    step of the other."""
    FRAMEWORKS[framework]()
    second = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    steps = WARM_UP + pairs + 1
    play = SideBySide(framework=framework, length=length, steps=steps, second_port=second.port, planted=planted)
    with Ranks(2 * RANKS, play) as ranks:
        told: dict[int, Run] = ranks.wait(120 + 6.0 * pairs)
    off, on = ([told[slot] for slot in range(first, first + RANKS)] for first in (0, RANKS))
    seconds = sorted(max(times) for times in zip(*(run.seconds for run in off), strict=True))
    threads = sum(run.threads for run in on) / (os.cpu_count() or 1)
    return ratios_of([run.seconds for run in off], [run.seconds for run in on]), threads, seconds[len(seconds) // 2]


def measured(framework: str, scale: str) -> list[dict[str, Any]]:
    """The rows of one framework, in a process of its own: both change torch."""
    pairs = CI if scale == "ci" else FULL
    rows = []
    for length, planted in ((SHORT, 0.0), (LONG, 0.0), (LONG, PLANTED)):
        ratios, threads, step_s = side_by_side(framework, length, pairs[length], planted=planted)
        low, high = interval(ratios)
        asleep = f" and {planted:.0%} asleep" if planted else ""
        found = row(f"live{asleep}, nobody lost / alone: {length} step", ratios, framework=framework)
        added_ms = 1000 * step_s * (found["ratio"] - 1)
        found |= {"threads": round(threads, 4), "step_ms": round(1000 * step_s, 1), "added_ms": round(added_ms, 1)}
        rows.append(found | {"low": low + threads, "high": high + threads, "planted": planted, "length": length})
    return rows


def main(scale: str) -> int:
    rows: list[dict[str, Any]] = []
    for framework in FRAMEWORKS:
        words = [sys.executable, "-m", "benchmarks.live_overhead", framework]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        rows += json.loads(done.stdout.splitlines()[-1])
    live = [found for found in rows if found["length"] == LONG and not found["planted"]]
    slowed = [found for found in rows if found["planted"]]
    noticed = all(found["low"] > 1 + PLANTED / 5 for found in slowed)
    within = {found["framework"]: _verdict(found["low"], found["high"]) for found in live}
    resolved = all(found["high"] <= BOUND for found in live) and noticed
    shown = [{key: value for key, value in found.items() if key not in _FOR_THE_VERDICT} for found in rows]
    return evidence.show(
        "live-overhead",
        holds=resolved or (scale == "ci" and all(found["low"] <= BOUND for found in live)),
        seed=SEED,
        rows=shown,
        scale=scale or "default",
        bound=BOUND,
        healthy=within,
        negative_controls=[{"name": "a twentieth of each step asleep", "noticed": noticed}],
    )


_FOR_THE_VERDICT = ("low", "high", "planted", "length")


def _verdict(low: float, high: float) -> str:
    if high <= BOUND:
        return "at most 1.01"
    return "above 1.01" if low > BOUND else "not resolved: too few or noisy pairs"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measured(sys.argv[1], os.environ.get("SCALE", ""))))
    else:
        sys.exit(main(os.environ.get("SCALE", "")))
