"""Measure what copies cost a job that loses no rank: the evidence for `make show-copies`.

    python -m benchmarks.copies               an hour or two; to be run on a quiet machine
    ROWS=spared python -m benchmarks.copies   the jobs with a processor to spare
    ROWS=busy python -m benchmarks.copies     those whose steps keep all processors busy, fifty minutes
    SCALE=ci python -m benchmarks.copies      the slice for CI

A live Megatron job with the distributed optimizer, TP2 x DP2, copies its state after every second step
(`--ntp-copies-lag-steps 1`). Each step with a copy follows one without, in the same job on the same machine, and the
ratio of the two is a pair. With `far`, the four ranks act as two hosts and each copy also goes to the other one. With
parities (`--ntp-copies-mode xor:2`) they act as four hosts, and the bytes sent to another host are folded into the
parity of two.

A copy costs what its bytes cost: they are read twice (digest, copying), written once, and for a far copy sent, received
and read again. If the step keeps all processors busy, this is time of the step. So each row states the measured time of
a step and the time it would have if all copies of a version were made within it, on all processors, each at the pace of
a process that only makes copies while all others do the same: they share the memory bandwidth. That pace is bytes per
second of processor time: sender and receiver of a far copy work at the same time, on a processor each. The claim is: a
ratio of at most 1.03, or not more than these bytes explain.

Moving bytes also costs the threads that do not move them: training finds the caches filled. Jobs that move as many
bytes in place of copies, in as few calls as possible and without any code of the plugin (`bare_copies.py`), show how
much: the extra processor time of all other threads. Rows report both together as explained by bytes; only the control
is judged by the sum.

The claim covers short steps, of 384 tokens, in which a copy is a large part of the work, and long ones, of 3,072
tokens, as in `live_overhead`. Long steps differ from one another by more than a copy takes, but a version has the same
bytes for any batch. So the time that a copy adds to a short step, divided by the time of a long one, must be within the
claim with its full interval (order statistics, 95 %). Because it is an inference that a long step pays no more, the
interval of pairs of long steps must not be above the claim as a whole. Copies then move 11 MB per second of each
processor; Llama 3 405B on 16,384 GPUs of 400 TFLOP/s, with 16 million tokens in a step (arXiv 2407.21783), would have
them move 50 MB per second of each GPU, whose host has a dozen processors for it.

With a processor to spare, as on a GPU host, no copy should take time of the step. Two processors are enough to test
this: all ranks train on the first, and the threads that make and receive copies have the other one. Near copies are
measured with one rank, far ones and parities with the same four ranks as above; a long step has half as many tokens,
1,536. Bytes excuse nothing there.

Jobs with bytes in place of copies have rows of their own, for each of the short steps on two busy processors, and for
near copies with one to spare.

Each row also reports where the time goes: how much more processor time the threads of all ranks took in a step with a
copy than in the one before, and of that the training threads and the copying threads. The step must be longer by the
total divided by the number of processors; if copies have their own processor, by that of the training threads. The rest
of the ratio is waiting: for a copy, a lock, another host. A second claim bounds it: the interval of its median (order
statistics, 95 %) ends within 0.03. Processor time excuses nothing of the first claim. Bytes copied per second of
processor time also have a lower bound (`PACES`), in short steps: in a long one the processor time of a version is less
than two steps differ by anyway.

Controls: in two jobs, one of them with a processor to spare, the training thread sleeps for a twentieth of each step
with a copy, after the snapshot. This must show as waiting. In another job the copying threads waste a twentieth of all
processors' time after a copy: the interval of its ratio must be above what bytes explain.

The bytes of one step's copy follow from the model: all parameters, times the numbers that Adam and its main weights
keep, each held once per TP slot, replicated ones as often as there are slots. The bytes that other hosts keep for both
versions are counted in the files of a parity host: twice that amount with far copies, the N-th part of it with parities
of N.
"""

import dataclasses
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import evidence
from benchmarks.copies_alone import (
    RANKS,
    bytes_wanted,
    explained,
    kept_wanted,
    speed_of_digests,
    speeds,
)
from benchmarks.copying_rank import LONG, SHORT, Clocked, Kind
from benchmarks.overhead import PLANTED, interval, row
from ntp_plugin.recovery.fault_points import FAULT_POINTS
from ntp_plugin.telemetry import Copied, Follower
from tests.harness.parity.job import Job, have_megatron_imported
from tests.harness.parity.layouts import BASE, MODELS
from tests.harness.played_ranks import played

SEED = 1234
BOUND, WAITING = 1.03, 0.03
"""Bounds of the ratio, and of the waiting in it."""
PACES = {"near": 0.5e9, "copy": 0.25e9, "xor:2": 0.2e9}
"""Bytes in a second of processor time, in the job: about half of what a slow machine had."""
FULL, CI = (300, 30), (8, 0)
"""Pairs of short steps, and of long ones. In CI there are none of these, and too few to resolve a ratio: it is seen
there that the right bytes are copied."""
WARM_UP = 4
THREADS = ("busy", "training", "copying")
"""Threads whose processor time is reported: all, the training ones, and the copying ones."""
LARGER = "--hidden-size 256 --ffn-hidden-size 640 --kv-channels 16 --num-layers 4 --vocab-size 2000 --seq-length 64"
LARGER += " --max-position-embeddings 64"


ON_ALL = (
    Kind(what="near copies", mode="near"),
    Kind(what="near and far copies", mode="copy", per_host=RANKS // 2),
    Kind(what="near copies, and parities of two", mode="xor:2", per_host=1),
)
SPARED = tuple(
    dataclasses.replace(kind, what=f"{kind.what}, a processor to spare", samples=LONG // 2, spared=True)
    for kind in (dataclasses.replace(ON_ALL[0], tp=1, dp=1), *ON_ALL[1:])
)
COPIES = (
    *ON_ALL,
    *SPARED,
    dataclasses.replace(SPARED[0], what="bytes moved, a processor to spare", bare=True),
)
BARE_SHORT = tuple(dataclasses.replace(kind, what=f"bytes of {kind.what}", bare=True) for kind in ON_ALL)
KINDS = (
    *(dataclasses.replace(kind, what=f"{kind.what}, short steps", samples=SHORT) for kind in BARE_SHORT + COPIES),
    *COPIES,
    *(
        dataclasses.replace(kind, what=f"{kind.what}, {PLANTED:.0%} asleep, short steps", samples=SHORT, asleep=PLANTED)
        for kind in (ON_ALL[0], SPARED[0])
    ),
    dataclasses.replace(
        ON_ALL[0], what=f"{ON_ALL[0].what}, {PLANTED:.0%} wasted, short steps", samples=SHORT, wasteful=PLANTED
    ),
)
ROWS = {
    "": KINDS,
    "spared": tuple(kind for kind in KINDS if kind.spared),
    "busy": tuple(kind for kind in KINDS if not kind.spared),
}
"""Rows by name."""
IN_CI = tuple(kind for kind in KINDS if kind.short and not kind.bare and (kind.mode == "near" or not kind.spared))
"""Each kind of copies, and the controls."""


# ---------------------------------------------------------------- pairs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """Seconds of the slowest rank; processor seconds of all threads of all ranks, of training and of copying ones."""

    seconds: float
    busy: float
    training: float
    copying: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """A step with a copy, and the one before."""

    on: Step
    off: Step
    spared: bool

    @property
    def added(self) -> float:
        return self.on.seconds - self.off.seconds

    @property
    def ratio(self) -> float:
        return self.on.seconds / self.off.seconds

    @property
    def explained(self) -> float:
        """The ratio that there would be if nothing waited."""
        more = self.more("training") if self.spared else self.more("busy") / (os.cpu_count() or 1)
        return 1 + more / self.off.seconds

    def more(self, of: str) -> float:
        """Processor seconds of these threads."""
        found: float = getattr(self.on, of) - getattr(self.off, of)
        return found

    @property
    def more_of_others(self) -> float:
        """Additional processor seconds of all threads that do not copy."""
        return self.more("busy") - self.more("copying")


def run(kind: Kind, pairs: int) -> tuple[list[Pair], list[Copied]]:
    """Run a job of this kind; return its pairs and its copies."""
    steps = 2 * (pairs + WARM_UP)
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder) / "events"
        more = f"--use-distributed-optimizer --overlap-grad-reduce --train-iters {steps} --ntp-copies-lag-steps 1"
        more += f" --ntp-copies-mode {kind.mode}"
        job = Job(
            model=MODELS[BASE],
            tp=kind.tp,
            dp=kind.dp,
            batch=kind.samples,
            enabled=True,
            dtype="float32",
            per_host=kind.per_host,
            more=f"{more} {LARGER} --ntp-events={events}",
        )
        have_megatron_imported()
        _, read = played(
            job.processes,
            Clocked(job, kind=kind),
            faults=(),
            fault_points=FAULT_POINTS,
            back=(),
            leaving=(),
            timeout_s=240 + (2.0 + kind.samples / 4) * steps,
        )
        recorded = [one.event for one in Follower(events).news()]
    copied = [event for event in recorded if isinstance(event, Copied)]
    took = _steps(read, ranks=job.processes)
    beside = {event.step for event in copied} - set(range(2 * WARM_UP))
    return [
        Pair(on=took[step], off=took[step - 1], spared=kind.spared)
        for step in sorted(beside)
        if step in took and step - 1 in took and step - 1 not in beside
    ], copied


def _steps(read: Sequence[Sequence[Any]], *, ranks: int) -> dict[int, Step]:
    """The times of each step by its number, on the clocks of all ranks, from its beginning to that of the next."""
    clocks = {(slot, step): clock for slot, step, *clock in read if isinstance(slot, int)}
    passed: dict[int, list[tuple[float, ...]]] = defaultdict(list)
    for (slot, step), clock in clocks.items():
        if (after := clocks.get((slot, step + 1))) is not None:
            passed[step].append(tuple(end - begin for begin, end in zip(clock, after, strict=True)))
    return {
        step: Step(seconds=max(seconds), busy=sum(busy), training=sum(training), copying=sum(copying))
        for step, all_ranks in passed.items()
        if len(all_ranks) == ranks
        for seconds, busy, training, copying in [zip(*all_ranks, strict=True)]
    }


# ---------------------------------------------------------------- what is claimed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Known:
    """Results of rows that later ones are judged by."""

    added: dict[Kind, tuple[float, float]] = dataclasses.field(default_factory=dict)
    """The interval of what is added to a short step, in seconds."""
    others: dict[str, float] = dataclasses.field(default_factory=dict)
    """Additional processor seconds of all other threads in a short step in which bytes are moved and all processors are
    busy, by mode."""


def measured(kind: Kind, pairs: int, known: Known) -> dict[str, Any]:
    """The row of one; `exact` and `holds` say what is claimed of it. What others are judged by is noted. Copies alone
    are made before and after, since a machine is not as fast in one minute as in the next."""
    alone = [speeds(kind.mode)] if kind.explained else []
    found, copied = run(kind, pairs)
    alone += [speeds(kind.mode)] if kind.explained else []
    ratios, waiting = [pair.ratio for pair in found], [pair.ratio - pair.explained for pair in found]
    wanted, off = bytes_wanted(kind.tp), statistics.median(pair.off.seconds for pair in found)
    versions = {event.step for event in copied if event.step}
    sizes = {sum(event.size for event in copied if event.step == step) for step in versions}
    pace = wanted / statistics.median(pair.more("busy") for pair in found)
    found_row, allowed = row(kind.what, ratios), BOUND
    if alone:
        found_row |= by_bytes(alone, kind.mode, off, known)
        found_row["is_above_bytes"] = interval(ratios)[0] > max(BOUND, found_row["explained_by_bytes"])
        allowed = max(BOUND, found_row["explained_by_copies_alone"])
    found_row |= {
        "processor_time": round(statistics.median(pair.explained for pair in found), 4),
        "waiting": round(statistics.median(waiting), 4),
        "waiting_95": "{:.4f} to {:.4f}".format(*interval(waiting)),
        "bytes": max(sizes),
        "bytes_wanted": wanted,
        "step_ms": round(1000 * off, 1),
        "copy_ms": round(1000 * statistics.median(event.seconds for event in copied), 1),
    }
    holds = interval(waiting)[1] <= WAITING
    if kind.short:
        low, high = known.added[kind.alike] = interval([pair.added for pair in found])
        if kind.bare and not kind.spared:
            known.others[kind.mode] = statistics.median(pair.more_of_others for pair in found)
        found_row |= {"added_ms_95": f"{1000 * low:.1f} to {1000 * high:.1f}", "gb_per_s": round(pace / 1e9, 2)}
        found_row |= {
            f"more_ms_{of}": round(1000 * statistics.median(pair.more(of) for pair in found), 1) for of in THREADS
        }
        holds &= found_row["ratio"] <= allowed and pace >= PACES[kind.mode]
    else:
        low, high = (1 + seconds / off for seconds in known.added[kind.alike])
        found_row["ratio_by_short_steps_95"] = f"{low:.4f} to {high:.4f}"
        holds &= is_within(high, interval(ratios)[0], allowed)
    slack = 64 * RANKS * 200  # each value begins at a multiple of 64 bytes
    exact = all(wanted <= size <= wanted + slack for size in sizes)
    return found_row | {"exact": exact and all(kept == kept_wanted(kind.mode) for *_, kept in alone), "holds": holds}


def by_bytes(alone: Sequence[tuple[float, float, int]], mode: str, off: float, known: Known) -> dict[str, Any]:
    """The time of a step as explained by copies alone, and by bytes moved in place of copies."""
    speed, at_once = (statistics.mean(each) for each in list(zip(*alone, strict=True))[:2])
    others = max(0.0, known.others.get(mode, 0.0))
    return {
        "explained_by_bytes": round(explained(off, speed, others), 4),
        "explained_by_copies_alone": round(explained(off, speed), 4),
        "explained_if_at_once": round(explained(off, at_once), 4),
        "more_ms_of_others_by_bytes": round(1000 * others, 1),
        "gb_per_s_alone": round(speed / 1e9, 2),
        "kept_far_of_two_ranks": alone[0][2],
        "kept_far_wanted": kept_wanted(mode),
    }


def is_within(by_short_steps: float, at_least: float, allowed: float) -> bool:
    """Whether a ratio is: what it is at most, as short steps say, and at least, as long ones do."""
    most = max(BOUND, allowed)
    return by_short_steps <= most and at_least <= most


def main(scale: str, only: str) -> int:
    if only not in ROWS:
        print(f"ROWS is {only}, and has to be {' or '.join(filter(None, ROWS))}, or nothing for all", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    kinds = [kind for kind in ROWS[only] if scale != "ci" or kind in IN_CI]
    short, long = CI if scale == "ci" else FULL
    of_digests = speed_of_digests()
    rows: list[dict[str, Any]] = []
    known = Known()
    for kind in kinds:
        rows.append(measured(kind, short if kind.short else long, known))
        print(rows[-1], file=sys.stderr, flush=True)
    judged = [row["holds"] for kind, row in zip(kinds, rows, strict=True) if kind.judged]
    asleep = [row["waiting"] > WAITING for kind, row in zip(kinds, rows, strict=True) if kind.asleep]
    wasted = [row["is_above_bytes"] for kind, row in zip(kinds, rows, strict=True) if kind.wasteful]
    exact = all(row["exact"] for row in rows)
    resolved = all(judged) and all(asleep + wasted) and of_digests >= 1e9
    return evidence.show(
        "copies",
        holds=exact and (resolved or scale == "ci"),
        seed=SEED,
        rows=rows,
        scale=scale or "default",
        only=only or "all",
        bound=BOUND,
        waiting_bound=WAITING,
        gb_per_s_of_digests=round(of_digests / 1e9, 2),
        negative_controls=[
            {"name": f"a twentieth {what}", "noticed": all(noticed)}
            for what, noticed in (("of each step with a copy asleep", asleep), ("of processor time wasted", wasted))
            if noticed
        ],
    )


if __name__ == "__main__":
    sys.exit(main(os.environ.get("SCALE", ""), os.environ.get("ROWS", "")))
