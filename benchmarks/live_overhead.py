"""What being able to lose ranks costs a job that loses none: the evidence for `make show-live-overhead`.

    python -m benchmarks.live_overhead            half an hour; to be run on a quiet machine of two processors or more
    SCALE=ci python -m benchmarks.live_overhead   a slice

As in `overhead.py` two jobs stand side by side and take turns, step by step; a pair is two steps that ran one after the
other. Here the second job is a live one, as `ntp run` starts it: its groups can be edited, its ranks are watched and
beat, it votes on each step and tells its record. Nothing is copied.

The claim is on jobs of two ranks, so that each has a processor, as each has a device and some processors where models
are trained; and on steps of about a second, short for who trains on many of them. What it costs is a time in each step,
hardly more in a longer one: the vote is one message to the first rank and one back, whatever is trained. Beside them
stand steps of the test model, of which most is Python and messages, with four ranks on the same processors: what the
time is where ranks wait for each other's turn to compute.

The threads of the live job, its watcher and its heart, go on in the turns of both jobs, so that the ratio does not show
them. Their processor time is measured by itself, as a share of all processors' time, and added: the claim is that the
interval of the median and they together are within 1.01. What is not counted is the supervisor, one process on a host.

Two controls stand beside them for each framework: a pair of two jobs without the plugin, which shows what the machine
does to the ratio, and one with a live job that sleeps a twentieth of each step, which must be seen. Two jobs are never
quite alike, wherever their memory lies; where the first control finds them different, a hundredth is not resolved.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks import evidence
from benchmarks.overhead import BOUND, PLANTED, SEED, WARM_UP, Clock, Turns, interval, ratios_of, row
from benchmarks.parity.job import RECIPES, Job, have_megatron_imported
from benchmarks.parity.layouts import BASE, MODELS
from benchmarks.rehearsal import quietly
from benchmarks.zero.job import have_deepspeed_imported
from ntp_plugin.testing.ranks import Rank, Ranks

SHORT, LONG = "short", "long"
FULL, CI = {SHORT: 300, LONG: 100}, {SHORT: 24, LONG: 12}
FRAMEWORKS = {"megatron": have_megatron_imported, "deepspeed": have_deepspeed_imported}
MEGATRON = {
    SHORT: "",
    LONG: "--hidden-size 512 --kv-channels 32 --ffn-hidden-size 1280 --seq-length 256 --max-position-embeddings 256",
}
DEEPSPEED = {SHORT: (512, 64), LONG: (2048, 448)}
"""Features, and samples of a micro-batch."""
EACH = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """Two jobs of one shape: the framework's own, and a live one unless that is what is controlled."""

    what: str
    framework: str
    length: str = LONG
    tp: int = 1
    dp: int = 2
    live: bool = True
    planted: float = 0.0
    """Of each step the second job sleeps so much."""
    judged: bool = False

    @property
    def ranks(self) -> int:
        return self.tp * self.dp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What one rank of one job saw."""

    seconds: list[float]
    threads: float
    """Processor seconds of our threads in a second."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SideBySide:
    """What a rank does: the first half of the ranks are the first job, the others are the second."""

    pair: Pair
    steps: int
    second_port: int

    def __call__(self, rank: Rank) -> Run:
        return quietly(rank.slot, functools.partial(self._play, rank, second=rank.slot >= self.pair.ranks))

    def _play(self, rank: Rank, *, second: bool) -> Run:
        live, number = second and self.pair.live, rank.slot % self.pair.ranks
        os.environ |= _of_a_live_job(rank, number) if live else {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        os.environ |= {
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": str(self.pair.ranks),
            "LOCAL_WORLD_SIZE": str(self.pair.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.second_port if second else rank.port),
        }
        turns = Turns(TCPStore("127.0.0.1", rank.port, None, False), second, self.pair.ranks)
        clock = _clock_of(self.pair.framework)(turns, self.pair.planted if second else 0.0)
        work = {"megatron": _train_megatron, "deepspeed": _train_deepspeed}[self.pair.framework]
        began = time.monotonic()
        end = work(self, clock, live, f"{rank.folder}/samples{second}")
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


def _train_megatron(asked: SideBySide, clock: Clock, live: bool, samples: str) -> Callable[[], None]:
    from ntp_plugin.megatron import activation, cpu  # noqa: PLC0415  (only ranks know Megatron: it warns of much)

    cpu.install(cpu.ON)
    if live:
        activation.install()
    pair = asked.pair
    more = f"--train-iters {asked.steps} {MEGATRON[pair.length]}" + " --ntp-copies-mode off" * live
    job = Job(model=MODELS[BASE], tp=pair.tp, dp=pair.dp, enabled=live, dtype="float32", more=more)
    sys.argv = [str(RECIPES / "pretrain_gpt.py"), *job.words, "--data-cache-path", samples]
    runpy.run_path(str(RECIPES / "pretrain_gpt.py"), run_name="__main__")
    clock.stop()
    if not live:
        return _nothing
    from ntp_plugin.megatron.live import start  # noqa: PLC0415

    assert start.Jobs.now is not None, "it was a live job"
    return start.end


class _OwnClock(Clock):
    """Of a loop that says itself where its steps begin."""

    def __init__(self, turns: Turns, planted: float) -> None:
        self.seconds: list[float] = []
        self._turns, self._planted, self._began = turns, planted, 0.0

    def begin(self) -> None:
        self._turn()

    def _step(self) -> None:
        """The loop takes it."""


def _train_deepspeed(asked: SideBySide, clock: Any, live: bool, _samples: str) -> Callable[[], None]:
    if live:
        from ntp_plugin.deepspeed import activation as ours  # noqa: PLC0415
    import deepspeed  # noqa: PLC0415

    ranks = asked.pair.ranks
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    features, size = DEEPSPEED[asked.pair.length]
    first, second = torch.nn.Linear(features, features), torch.nn.Linear(features, features)
    model = torch.nn.Sequential(first, torch.nn.Tanh(), second, torch.nn.Linear(features, 1))
    adam = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    config = {
        "train_batch_size": ranks * EACH * size,
        "train_micro_batch_size_per_gpu": size,
        "gradient_accumulation_steps": EACH,
        "steps_per_print": 1_000_000,
        "optimizer": adam,
        "zero_optimization": {"stage": 1},
    }
    config |= {"ntp": {"enabled": True, "copies": {"mode": "off"}}} if live else {}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    samples = TensorDataset(torch.randn(1, features).expand(asked.steps * EACH * size * ranks, features))
    sampler: Any = DistributedSampler(samples, ranks, int(os.environ["RANK"]), shuffle=False)
    for number, (x,) in enumerate(DataLoader(samples, batch_size=size, sampler=sampler)):
        if number % EACH == 0:
            clock.begin()
        loss = (engine(x).squeeze(-1) - x.sum(dim=-1)).square().mean()
        engine.backward(loss)
        engine.step()
    clock.stop()
    return ours.end if live else _nothing


def _clock_of(framework: str) -> type[Clock]:
    return Clock if framework == "megatron" else _OwnClock


def _nothing() -> None:
    """There is nothing to end."""


# ---------------------------------------------------------------- pairs


PAIRS = (
    Pair(what="live, nobody lost / alone: two replicas of a rank", framework="megatron", judged=True),
    Pair(what="live, nobody lost / alone: a replica of two ranks", framework="megatron", tp=2, dp=1, judged=True),
    Pair(what="alone / alone", framework="megatron", live=False),
    Pair(what=f"live and {PLANTED:.0%} asleep / alone", framework="megatron", planted=PLANTED),
    Pair(what="live / alone: four ranks, short steps", framework="megatron", length=SHORT, tp=2),
    Pair(what="alone / alone: four ranks, short steps", framework="megatron", length=SHORT, tp=2, live=False),
    Pair(what="live, nobody lost / alone: two ranks, ZeRO-1", framework="deepspeed", judged=True),
    Pair(what="alone / alone", framework="deepspeed", live=False),
    Pair(what=f"live and {PLANTED:.0%} asleep / alone", framework="deepspeed", planted=PLANTED),
    Pair(what="live / alone: four ranks, short steps", framework="deepspeed", length=SHORT, dp=4),
    Pair(what="alone / alone: four ranks, short steps", framework="deepspeed", length=SHORT, dp=4, live=False),
)


def measured(pair: Pair, scale: str) -> dict[str, Any]:
    """The row of one; in a process that has only one framework, as both change torch."""
    FRAMEWORKS[pair.framework]()
    pairs = (CI if scale == "ci" else FULL)[pair.length]
    second = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    play = SideBySide(pair=pair, steps=WARM_UP + pairs + 1, second_port=second.port)
    with Ranks(2 * pair.ranks, play) as ranks:
        told: dict[int, Run] = ranks.wait(120 + 10.0 * pairs)
    off, on = ([told[slot] for slot in range(first, first + pair.ranks)] for first in (0, pair.ranks))
    seconds = sorted(max(times) for times in zip(*(run.seconds for run in off), strict=True))
    step_s = seconds[len(seconds) // 2]
    threads = sum(run.threads for run in on) / (os.cpu_count() or 1)
    ratios = ratios_of([run.seconds for run in off], [run.seconds for run in on])
    found = row(pair.what, ratios, framework=pair.framework)
    added_ms = 1000 * step_s * (found["ratio"] - 1)
    found |= {"threads": round(threads, 4), "step_ms": round(1000 * step_s, 1), "added_ms": round(added_ms, 1)}
    low, high = interval(ratios)
    return found | {"low": low + threads, "high": high + threads}


def main(scale: str) -> int:
    rows: list[dict[str, Any]] = []
    for number, _ in enumerate(PAIRS):
        words = [sys.executable, "-m", "benchmarks.live_overhead", str(number)]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    found = list(zip(PAIRS, rows, strict=True))
    judged = {f"{pair.framework}, {pair.what}": row for pair, row in found if pair.judged}
    noticed = all(row["low"] > 1 + PLANTED / 5 for pair, row in found if pair.planted)
    alike = all(row["low"] <= 1 <= row["high"] for pair, row in found if not pair.live)
    resolved = all(row["high"] <= BOUND for row in judged.values()) and noticed and alike
    shown = [{key: value for key, value in row.items() if key not in _FOR_THE_VERDICT} for row in rows]
    return evidence.show(
        "live-overhead",
        holds=resolved or (scale == "ci" and all(row["low"] <= BOUND for row in judged.values())),
        seed=SEED,
        rows=shown,
        scale=scale or "default",
        bound=BOUND,
        healthy={what: _verdict(row["low"], row["high"], alike=alike) for what, row in judged.items()},
        negative_controls=[{"name": "a twentieth of each step asleep", "noticed": noticed}],
    )


_FOR_THE_VERDICT = ("low", "high")


def _verdict(low: float, high: float, *, alike: bool) -> str:
    if not alike:
        return "not resolved: two jobs without the plugin differ as well"
    if high <= BOUND:
        return "at most 1.01"
    return "above 1.01" if low > BOUND else "not resolved: too few or noisy pairs"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measured(PAIRS[int(sys.argv[1])], os.environ.get("SCALE", ""))))
    else:
        sys.exit(main(os.environ.get("SCALE", "")))
