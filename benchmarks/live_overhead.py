"""Measure what the plugin costs a job that could lose ranks and loses none: the evidence for `make show-live-overhead`.

    python -m benchmarks.live_overhead                        two hours or more, on a machine by itself
    python -m benchmarks.live_overhead 11                     one job of one case
    FRAMEWORK=deepspeed python -m benchmarks.live_overhead    the rows of one framework
    SCALE=ci python -m benchmarks.live_overhead               a slice

In a live job, as `ntp run` starts it, every other step runs as in the stock framework: all ranks put back what the
plugin has replaced for that step. A pair is two consecutive steps, in the order on-off, off-on, and so on; its ratio
compares the times of their slowest ranks, from the beginning of a step to that of the next. Nothing is copied.

A row has several jobs, so that it does not depend on one job's luck, and jobs of all rows alternate. The pairs of a job
are a line in docs/results/live-overhead-FRAMEWORK-pairs.jsonl, and the next call continues after it, as long as the
committed plugin and benchmarks are the same: a sitting may end at any time and continue elsewhere on a machine of the
same kind, because both steps of a pair are on one machine. Lines of other trees are dropped for the requested
frameworks. Remove the file to get everything in one sitting. Nothing is kept from a tree with uncommitted changes.

The number of pairs that a row needs depends on the machine. So it has four jobs, and more until its interval is
`PRECISE` or all planned ones have run. Only the width decides, not where the interval lies; an interval of a width
fixed in advance has the right coverage for many pairs (Chow and Robbins 1965).

Pairs of two jobs would be simpler, and were tried: two jobs without the plugin differed from each other, for as long as
they lived, by 2.4 % with Megatron and by 1.7 % with DeepSpeed. Within one job both steps have the same processes and
the same memory.

Steps differ from one another by two to fifteen times the bound, because processors do: most of a step is the model's
own arithmetic, whose time varies. With DeepSpeed, whose ranks compute by themselves between their messages, each rank
times this in every step: the module's forward, and the backward up to the last gradient. It contains nothing of the
plugin, so it is the same work in both steps of a pair. A pair then gives two numbers. `ratio` compares the full steps.
`apart` is one plus the difference of the steps without the longest computing of a rank, as a share of a step. Its
interval is two to five times narrower; it is reported beside, and proves nothing alone.

`apart` cannot show a plugin that makes the arithmetic itself slower, by its caches, or because ranks share processors.
`computing` is the ratio of that alone, and full steps include it; one of the controls does this.

Three things stay in the steps without the plugin: groups that can be edited, loaders that can go back, including what
Megatron's schedule reports of the losses, and the threads, a watcher and a heartbeat. The processor time of the threads
is measured separately, as a share of all processors' time, and added. The supervisor, one process per host, is not
counted.

The claim covers long steps, of half a second or more, which is short for training on many devices: the interval of the
median (order statistics, 95 %) plus the threads is within 1.01, for full steps, and for `apart` too where it is known;
with four ranks, which share the processors, and with two, so that each has one. It covers DeepSpeed's steps of seconds
as well: the plugin adds some milliseconds to any step. Short steps, mostly Python and messages, show what these
milliseconds are. If only a part of an interval is within, the row says that the number is not resolved.

Controls for each framework, with four ranks, whose pairs vary least: pairs of two steps both without the plugin, whose
ratio must be one, and steps with the plugin that sleep for a twentieth, which must be detected; with DeepSpeed also a
sleep within the computing, which must show in full steps.
"""

import dataclasses
import functools
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks import evidence
from benchmarks.computing import Computing
from benchmarks.overhead import BOUND, PLANTED, SEED
from benchmarks.step_pairs import WARM_UP, Block, is_first, pairs_of, row_of
from ntp_plugin.groups.process_groups import ElasticGroups
from ntp_plugin.testing.ranks import Rank, Ranks
from tests.harness.parity.job import RECIPES, Job, have_megatron_imported
from tests.harness.parity.layouts import BASE, MODELS
from tests.harness.played_ranks import quietly
from tests.harness.zero.job import have_deepspeed_imported

SHORT, LONG, LONGER = "short", "long", "longer"
FULL, CI = {SHORT: 600, LONG: 900, LONGER: 600}, {SHORT: 24, LONG: 12, LONGER: 4}
"""Pairs, at most. 450 of long steps reached 0.004 to either side of the median on a noisy machine of two processors,
which 0.005 of overhead and 0.002 of threads do not leave room for. Steps of seconds differ as much from one to the
next: of these 80 reached 0.012, so that 250 would reach 0.007 at best."""
PRECISE, JOBS = 0.006, 4
"""The width of an interval at which a row may end early, and the least number of its jobs: 0.003 to either side leave
0.007 for overhead and threads."""
OF_A_JOB = {SHORT: 200, LONG: 75, LONGER: 50}
"""Pairs: some minutes."""
MEASURED = ("ntp_plugin", "benchmarks", "tests/harness")
RESULTS = Path(__file__).parents[1] / "docs/results"
FRAMEWORKS = {"megatron": have_megatron_imported, "deepspeed": have_deepspeed_imported}
MEGATRON = {
    SHORT: (6, ""),
    LONG: (
        24,
        "--hidden-size 512 --kv-channels 32 --ffn-hidden-size 1280 --seq-length 128 --max-position-embeddings 128",
    ),
}
"""Samples of a step, and the model."""
DEEPSPEED = {SHORT: (512, 64), LONG: (1536, 1024), LONGER: (1536, 3072)}
"""Features, and samples of a micro-batch."""
EACH = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One job, and what its pairs are."""

    what: str
    framework: str
    length: str = LONG
    tp: int = 1
    dp: int = 2
    live: bool = True
    """Whether the plugin is in the first step of a pair at all."""
    planted: float = 0.0
    """Of each step with the plugin it sleeps so much."""
    within: bool = False
    """Whether it sleeps in the midst of the computing."""

    @property
    def ranks(self) -> int:
        return self.tp * self.dp

    @property
    def judged(self) -> bool:
        """Whether the claim is on it."""
        return self.length != SHORT and self.live and not self.planted

    def pairs(self, scale: str) -> int:
        """A plant is five times the bound; it has to be seen in fewer, which is the harder for it."""
        if scale == "ci":
            return CI[self.length]
        return FULL[self.length] // (6 if self.planted else 1)

    def pairs_of_a_job(self, scale: str) -> int:
        """All that have to be are in so many jobs of so many."""
        return min(OF_A_JOB[self.length], self.pairs(scale))


CASES = (
    Case(what="on / off: four ranks", framework="megatron", tp=2),
    Case(what="on / off: two replicas of a rank", framework="megatron"),
    Case(what="on / off: a replica of two ranks", framework="megatron", tp=2, dp=1),
    Case(what="off / off", framework="megatron", tp=2, live=False),
    Case(what=f"on, {PLANTED:.0%} asleep / off", framework="megatron", tp=2, planted=PLANTED),
    Case(what="on / off: four ranks, short steps", framework="megatron", length=SHORT, tp=2),
    Case(what="on / off: four ranks, ZeRO-1", framework="deepspeed", dp=4),
    Case(what="on / off: two ranks, ZeRO-1", framework="deepspeed"),
    Case(what="off / off", framework="deepspeed", dp=4, live=False),
    Case(what=f"on, {PLANTED:.0%} asleep / off", framework="deepspeed", dp=4, planted=PLANTED),
    Case(what="on / off: four ranks, short steps", framework="deepspeed", length=SHORT, dp=4),
    Case(what="on / off: four ranks, ZeRO-1, steps of seconds", framework="deepspeed", length=LONGER, dp=4),
    Case(what="on / off: two ranks, ZeRO-1, steps of seconds", framework="deepspeed", length=LONGER),
    Case(what=f"on, {PLANTED:.0%} asleep within / off", framework="deepspeed", dp=4, planted=PLANTED, within=True),
)


# ---------------------------------------------------------------- one rank


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Results of one rank."""

    seconds: list[float]
    computing: list[float]
    """In each of the steps, where it is known."""
    votes: int
    threads: float
    """Processor seconds of our threads in a second."""


class Replaced:
    """Places in which the plugin has put something of its own."""

    def __init__(self, groups: ElasticGroups) -> None:
        self._places: list[tuple[Any, str, Any, Any]] = [
            (dist.ProcessGroup, name, vars(dist.ProcessGroup)[name], original)
            for name, original in groups._operations._originals.items()
        ]
        self._places.append((Work, "wait", Work.wait, groups._waits._original))

    def add(self, owner: Any, *names: str) -> None:
        """What is there now was made of what it says that it wraps."""
        for name in names:
            ours = getattr(owner, name)
            self._places.append((owner, name, ours, ours.__wrapped__))

    def put(self, *, ours: bool) -> None:
        """Have the plugin in all of them, or in none."""
        for owner, name, mine, original in self._places:
            setattr(owner, name, mine if ours else original)


class Clock:
    """Says which steps have the plugin in, and times each from its beginning to that of the next."""

    def __init__(self, case: Case) -> None:
        self.seconds: list[float] = []
        self.computing: list[float] = []
        self.model = Computing()
        self._case, self._began = case, 0.0
        self.replaced: Replaced

    def begin(self) -> bool:
        """Whether the plugin is in the step that begins."""
        self.stop()
        number = len(self.seconds)
        live = number < WARM_UP or (self._case.live and is_first(number))
        self._began = time.perf_counter()
        if live and self._case.planted and self.seconds:
            self._sleep(self._case.planted * self.seconds[-1])
        self.replaced.put(ours=live)
        return live

    def _sleep(self, seconds: float) -> None:
        if self._case.within:
            self.model.asleep = seconds
        else:
            time.sleep(seconds)

    def stop(self) -> None:
        """The step that began last is over."""
        if self._began:
            self.seconds.append(time.perf_counter() - self._began)
            self.computing.append(self.model.taken())
            self._began = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Play:
    """The program of a rank."""

    case: Case
    steps: int

    def __call__(self, rank: Rank) -> Run:
        return quietly(rank.slot, functools.partial(self._play, rank))

    def _play(self, rank: Rank) -> Run:
        os.environ |= rank.environment() | {"NTP_EVENTS": str(Path(rank.folder) / "events")}
        clock = Clock(self.case)
        train = {"megatron": _train_megatron, "deepspeed": _train_deepspeed}[self.case.framework]
        began = time.monotonic()
        votes, end = train(self, clock, f"{rank.folder}/samples")
        took = _processor_seconds_of_threads() / (time.monotonic() - began)
        end()
        return Run(seconds=clock.seconds, computing=clock.computing, votes=votes, threads=took)


def _processor_seconds_of_threads() -> float:
    """Processor seconds of the plugin's threads."""
    ticks, found = os.sysconf("SC_CLK_TCK"), 0.0
    for thread in threading.enumerate():
        if thread.name.startswith("ntp-"):
            fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text(encoding="utf-8").rpartition(")")[2]
            user, system = fields.split()[11:13]
            found += (int(user) + int(system)) / ticks
    return found


type Trained = tuple[int, Callable[[], None]]
"""How many votes there were, and what ends the job."""


def _train_megatron(asked: Play, clock: Clock, samples: str) -> Trained:
    from ntp_plugin.megatron import activation, cpu_emulation  # noqa: PLC0415  (only ranks know Megatron: it warns of much)

    cpu_emulation.install(cpu_emulation.ON)
    activation.install()
    case = asked.case
    batch, model = MEGATRON[case.length]
    more = f"--train-iters {asked.steps} --ntp-copies-mode off {model}"
    job = Job(model=MODELS[BASE], tp=case.tp, dp=case.dp, batch=batch, enabled=True, dtype="float32", more=more)
    sys.argv = [str(RECIPES / "pretrain_gpt.py"), *job.words, "--data-cache-path", samples]
    _have_steps_begin(clock)
    runpy.run_path(str(RECIPES / "pretrain_gpt.py"), run_name="__main__")
    clock.stop()
    from ntp_plugin.megatron.live import start  # noqa: PLC0415

    assert start.Jobs.now is not None, "it was a live job"
    return start.Jobs.now.loop.done, start.end


def _have_steps_begin(clock: Clock) -> None:
    """Once there is a job, and all of its hooks are in place."""
    from megatron.core.timers import Timers  # noqa: PLC0415
    from megatron.training import training  # noqa: PLC0415

    from ntp_plugin.megatron.live import start  # noqa: PLC0415

    built = start.MegatronJob.model_is_built

    def model_is_built(job: Any) -> None:
        built(job)
        clock.replaced = Replaced(job.rank.groups)
        clock.replaced.add(
            job.model_rebuild.optimizer, "step", "step_with_ready_grads", "get_grad_norm", "clip_grad_norm"
        )
        clock.replaced.add(Timers, "log", "write")
        clock.replaced.add(dist, "barrier")
        clock.replaced.add(training, "reduce_max_stat_across_model_parallel_group")
        ours = training.train_step

        def step(*args: Any, **kwargs: Any) -> Any:
            return (ours if clock.begin() else ours.__wrapped__)(*args, **kwargs)

        training.train_step = step

    setattr(start.MegatronJob, "model_is_built", model_is_built)  # noqa: B010


def _train_deepspeed(asked: Play, clock: Clock, _samples: str) -> Trained:
    from ntp_plugin.deepspeed.activation import end  # noqa: PLC0415, I001  (before deepspeed is imported)
    from ntp_plugin.deepspeed.job import DeepSpeedJob  # noqa: PLC0415
    import deepspeed  # noqa: PLC0415

    ranks = asked.case.ranks
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    features, size = DEEPSPEED[asked.case.length]
    first, second = torch.nn.Linear(features, features), torch.nn.Linear(features, features)
    model = torch.nn.Sequential(first, torch.nn.Tanh(), second, torch.nn.Linear(features, 1))
    clock.model.watch(model)
    config = {
        "train_batch_size": ranks * EACH * size,
        "train_micro_batch_size_per_gpu": size,
        "gradient_accumulation_steps": EACH,
        "steps_per_print": 1_000_000,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "ntp": {"enabled": True, "copies": {"mode": "off"}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    job = DeepSpeedJob.now
    assert job is not None, "it is a live job"
    clock.replaced = Replaced(job.rank.groups)
    clock.replaced.add(engine, "forward", "backward", "step")
    clock.replaced.add(engine.basic_optimizer, "step")
    samples = TensorDataset(torch.randn(1, features).expand(asked.steps * EACH * size * ranks, features))
    sampler: Any = DistributedSampler(samples, ranks, int(os.environ["RANK"]), shuffle=False)
    live = True
    for number, (x,) in enumerate(DataLoader(samples, batch_size=size, sampler=sampler)):
        if number % EACH == 0:
            live = clock.begin()
        if not live:  # calls of the window between steps
            assert job.window._followed is not None, "the first steps had the plugin in"
            job.window._followed.hand_over()
            job.window.step += number % EACH == EACH - 1
        loss = (engine(x).squeeze(-1) - x.sum(dim=-1)).square().mean()
        clock.model.watch_backward(loss)
        engine.backward(loss)
        engine.step()
    clock.stop()
    clock.replaced.put(ours=True)
    return job.loop.done, end


# ---------------------------------------------------------------- pairs


def measured(case: Case, pairs: int) -> Block:
    """Measure a job, in a process that has only one framework, as both change torch."""
    FRAMEWORKS[case.framework]()
    with Ranks(case.ranks, Play(case=case, steps=WARM_UP + 2 * pairs + 1)) as ranks:
        runs: dict[int, Run] = ranks.wait(120 + 20.0 * pairs)
    steps_with_votes = WARM_UP + case.live * pairs
    assert all(run.votes >= steps_with_votes for run in runs.values()), "the plugin was in"
    assert all(run.votes <= steps_with_votes + 3 for run in runs.values()), "and was not"
    slowest = _longest([run.seconds for run in runs.values()])
    longest = _longest([run.computing for run in runs.values()])
    threads = sum(run.threads for run in runs.values()) / (os.cpu_count() or 1)
    return Block(seconds=pairs_of(slowest), computing=pairs_of(longest), threads=threads)


def _longest(times: Sequence[Sequence[float]]) -> list[float]:
    """Times of the slowest of all ranks, step by step, to a microsecond."""
    return [round(max(those), 6) for those in zip(*times, strict=True)]


def jobs_of(cases: Sequence[tuple[int, Case]], scale: str) -> list[tuple[int, int]]:
    """The case of each job and its number within the case, alternating over all cases."""
    jobs = [
        (turn, number) for number, case in cases for turn in range(-(-case.pairs(scale) // case.pairs_of_a_job(scale)))
    ]
    return [(number, turn) for turn, number in sorted(jobs)]


type CampaignPart = dict[str, Any]
"""The result of a job, with time and machine."""


def found_of(cases: Sequence[tuple[int, Case]], scale: str) -> dict[int, list[CampaignPart]]:
    """Case -> what its jobs found, in this sitting and in those before."""
    trees = None if scale == "ci" else evidence.trees(*MEASURED)
    frameworks = {case.framework for _, case in cases}
    kept = {of: evidence.Sittings(RESULTS / f"live-overhead-{of}-pairs.jsonl" if trees else None) for of in frameworks}
    for those in kept.values():
        those.keep_only(trees=trees)
    found: dict[int, list[CampaignPart]] = {number: [] for number, _ in cases}
    for number, turn in jobs_of(cases, scale):
        if turn >= JOBS and _is_precise(number, found[number]):
            continue
        of_framework = kept[CASES[number].framework]
        part = of_framework.find(case=number, turn=turn, trees=trees)
        if part is None:
            sitting = f"{evidence.today()}, {evidence.machine()}"
            part = {"case": number, "turn": turn, "trees": trees, "sitting": sitting, "block": _block_of(number)}
            of_framework.add(part)
        found[number].append(part)
        print(_row_of_case(number, found[number]), file=sys.stderr, flush=True)
    return found


def main(scale: str, framework: str) -> int:
    """All rows, or those of one framework."""
    cases = [(number, case) for number, case in enumerate(CASES) if framework in ("", case.framework)]
    if not cases:
        print(f"FRAMEWORK is {framework}, and has to be one of {', '.join(FRAMEWORKS)}", file=sys.stderr)
        return 2
    parts = found_of(cases, scale)
    rows = [_row_of_case(number, those) for number, those in parts.items()]
    found = list(zip([case for _, case in cases], rows, strict=True))
    judged, apart = _ends(found, "low", "high"), _ends(found, "apart_low", "apart_high")
    noticed = {f"{case.framework}, {case.what}": row["low"] > 1 + PLANTED / 5 for case, row in found if case.planted}
    alike = all(row["low"] <= 1 <= row["high"] for case, row in found if not case.live)
    healthy = all(high <= BOUND for _, high in (*judged.values(), *apart.values()))
    resolved = healthy and all(noticed.values()) and alike
    return evidence.show(
        "live-overhead",
        holds=resolved or (scale == "ci" and all(low <= BOUND for low, _ in judged.values())),
        seed=SEED,
        rows=[{key: value for key, value in row.items() if not key.endswith(("low", "high"))} for row in rows],
        commit=evidence.commit(),
        scale=scale or "default",
        framework=framework or "both",
        sittings=sorted({part["sitting"] for those in parts.values() for part in those}),
        bound=BOUND,
        healthy={what: _verdict(low, high) for what, (low, high) in judged.items()},
        healthy_apart={what: _verdict(low, high) for what, (low, high) in apart.items()},
        without_the_plugin_alike=alike,
        negative_controls=[{"name": name, "noticed": seen} for name, seen in noticed.items()],
    )


def _block_of(number: int) -> dict[str, Any]:
    """Run a job of one case in a process of its own and return its result."""
    words = [sys.executable, "-m", "benchmarks.live_overhead", str(number)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    block: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return block


def _is_precise(number: int, parts: Sequence[CampaignPart]) -> bool:
    row = _row_of_case(number, parts)
    return bool(row["high"] - row["low"] <= PRECISE)


def _row_of_case(number: int, parts: Sequence[CampaignPart]) -> dict[str, Any]:
    blocks = [Block(**part["block"]) for part in parts]
    return row_of(CASES[number].what, blocks, framework=CASES[number].framework)


def _ends(found: Sequence[tuple[Case, dict[str, Any]]], low: str, high: str) -> dict[str, tuple[float, float]]:
    """Ends of an interval, including the threads, for each row of the claim."""
    return {
        f"{case.framework}, {case.what}": (row[low] + row["threads"], row[high] + row["threads"])
        for case, row in found
        if case.judged and low in row
    }


def _verdict(low: float, high: float) -> str:
    if high <= BOUND:
        return "at most 1.01"
    return "above 1.01" if low > BOUND else "not resolved: too few or noisy pairs"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        case = CASES[int(sys.argv[1])]
        print(json.dumps(dataclasses.asdict(measured(case, case.pairs_of_a_job(os.environ.get("SCALE", ""))))))
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the job that runs ends as well
        sys.exit(main(os.environ.get("SCALE", ""), os.environ.get("FRAMEWORK", "")))
