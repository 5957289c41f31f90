"""Measure the time from a fault to the next committed step of a live Megatron job: `make show-recovery`.

    python -m benchmarks.recovery             4 and 8 ranks, 30 kills at 8 ranks, 10 trials of each other case
    SCALE=ci python -m benchmarks.recovery    the slice for CI: one trial of each fault at 4 ranks

The job is recipes/megatron/pretrain_gpt.py on a tiny GPT, two replicas of half the ranks each, and a micro-batch for
each. If there are more ranks than processors, an ordinary step takes a good part of the time: see `step_s`.

Faults are injected into two different slots one after the other in a job, into one in the slice for CI, each at a
random time of a random step. The time is that of the last survivor, from the fault to the end of the first step that it
takes with the new members: a step that was only rolled forward does not count. It has phases, each of which ends where
the next one begins:

    signal      the supervisor has published that the slot is lost
    break out   the survivor was interrupted in whatever it did (the name in the records)
    agree       with the others, on the members and the plan
    plan        who holds, sends and computes what
    regroup     the process groups are edited
    move        parameters and optimizer state; digests of all of them are compared
    model       the model is built again on the meta device, and its sizes are taken over
    lanes       the groups of the new lanes are connected
    wrap        DDP's buffers and buckets are made again
    rebuild     whatever else makes Megatron run in the new layout
    first step  from its samples to its commit

A kill or a freeze comes from outside, at any instant. A rank hangs by itself, at one of the fault points of
tests/harness/parity/live.py.

A trial is `hung` if a survivor does not commit within 20 seconds, or ends. It is `wrong` if losses, norms or weights of
its job differ in float64 by more than 1e-9 from those of a job without plugin and without faults, on the same samples.
"""

import dataclasses
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from benchmarks import evidence
from benchmarks.megatron_restart import restart_seconds
from ntp_plugin.errors import NtpError
from ntp_plugin.membership.failure_detector import Thresholds
from ntp_plugin.recovery.fault_points import FAULT_POINTS
from ntp_plugin.testing.faults import hang
from ntp_plugin.testing.ranks import Rank, Ranks
from tests.harness.parity import live
from tests.harness.parity.job import Job, have_megatron_imported, largest_differences, run
from tests.harness.parity.layouts import BASE, MODELS, uniform

SEED = 2504_06095
HUNG = Thresholds(hung_s=1.0)
"""Of jobs in which a rank hangs; 30 s, the default, would only be waited for."""
BATCH = 2
PATIENCE_S = 20.0
WRONG = 1e-9

PHASES = (
    *("signal", "break out", "agree", "plan", "regroup", "move", "model", "lanes", "wrap", "rebuild"),
    "first step",
)
BEYOND_S = 0.5
"""Bound of the median beyond the threshold of a fault; a kill has none."""
SLOWEST_KILL_S = 1.0
THRESHOLD_S = {"sigkill": 0.0, "sigstop": HUNG.frozen_s, "hang": HUNG.hung_s}

_AFTER = (range(3, 7), range(11, 14))
"""The steps after which faults are injected, one after the other."""
_WITHIN_S = 0.3
"""And for how long after such a step at most: a step or two."""
_HANGS_IN = ("step", "forward", "backward", "reduced", "vote", "apply", "applied", "between")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    fault: str
    ranks: int
    jobs: int
    losses: int = 2
    """In each job."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One fault; `hung` says why there is no time."""

    seconds: float = math.inf
    phases: Mapping[str, float] = dataclasses.field(default_factory=dict)
    step_s: float = math.inf
    """Of an ordinary step of its job."""
    wrong: str = ""
    hung: str = ""


# ---------------------------------------------------------------- what a rank does


@dataclasses.dataclass(frozen=True)
class Play(live.Play):
    """A live run that records the times of its phases."""

    def _play(self, rank: Rank) -> live.Lived:
        _record_faults()
        _record_phases(rank)
        return super()._play(rank)


def _record_faults() -> None:
    """Record when this rank injects a fault into itself."""
    reached = Rank.reached

    def recording_reached(rank: Rank, fault_point: str, step: int | None = None, *, epoch: int | None = None) -> None:
        if any(fault.is_for(rank.slot, fault_point, step, epoch) for fault in rank.faults):
            rank.write([[_injected(rank.slot), rank.slot, time.monotonic()]])
        reached(rank, fault_point, step, epoch=epoch)

    setattr(Rank, "reached", recording_reached)  # noqa: B010  (a plain assignment is not for methods)


def _record_phases(rank: Rank) -> None:
    from ntp_plugin.megatron.live import start, trainer  # noqa: PLC0415  (only ranks know Megatron)

    begin = start.MegatronJob.__init__

    def marked(owner: Any, name: str, before: str = "", after: str = "") -> None:
        """Calls of it end these phases."""
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if before:
                rank.write([["ended", rank.slot, before, time.monotonic()]])
            try:
                return original(*args, **kwargs)
            finally:
                if after:
                    rank.write([["ended", rank.slot, after, time.monotonic()]])

        setattr(owner, name, call)

    def recording_init(job: Any, *args: Any) -> None:
        begin(job, *args)
        marked(job.driver, "_agree", before="break out")
        marked(job.trainer, "plan", before="agree", after="plan")
        marked(job.driver, "_regroup", before="agree", after="regroup")
        marked(trainer, "relayout", before="rebuild", after="move")
        marked(job.model_rebuild, "elsewhere", before="rebuild")
        marked(job.model_rebuild, "take_over", after="model")
        marked(job.rank.groups, "make_lanes", before="rebuild", after="lanes")
        marked(job.model_rebuild, "wrap_again", before="rebuild", after="wrap")
        marked(job.trainer, "resume_from", after="rebuild")
        _record_commits(rank, job)

    setattr(start.MegatronJob, "__init__", recording_init)  # noqa: B010


def _record_commits(rank: Rank, job: Any) -> None:
    vote, known = job.loop.vote, [len(rank.first.member_ids)]

    def recording_vote(*args: Any) -> Any:
        result = vote(*args)
        now, members = time.monotonic(), len(job.rank.groups.members)
        rank.write([[_step(job.loop.done), rank.slot, now]])
        if members != known[0]:
            known[0] = members
            rank.write([["ended", rank.slot, "first step", now], [_members(members), rank.slot, now]])
        return result

    job.loop.vote = recording_vote


def _step(number: int) -> str:
    return f"step {number}"


def _injected(slot: int) -> str:
    return f"slot {slot} hangs"


def _members(count: int) -> str:
    return f"with {count} members"


# ---------------------------------------------------------------- a job and its trials


def job_of(ranks: int) -> Job:
    """Two replicas."""
    return Job(model=MODELS[BASE], tp=ranks // 2, dp=2, batch=BATCH, enabled=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HangTrial:
    """The random part of a trial: a hang comes at the fault point of the next step, all else so many seconds later."""

    slot: int
    after_step: int
    seconds: float
    fault_point: str


def faults(case: Case, chance: random.Random) -> list[HangTrial]:
    """Trials of one job, in their order."""
    slots = chance.sample(range(case.ranks), case.losses)
    return [
        HangTrial(
            slot=slot,
            after_step=chance.choice(steps),
            seconds=chance.uniform(0, _WITHIN_S),
            fault_point=chance.choice(_HANGS_IN),
        )
        for slot, steps in zip(slots, _AFTER, strict=False)
    ]


def trials(case: Case, chance: random.Random) -> list[Trial]:
    """One job, and what each of its faults cost."""
    drawn = faults(case, chance)
    ranks = _ranks(case, drawn)
    injected: dict[int, float] = {}
    error, wrong = "", ""
    try:
        with ranks:
            for number, one in enumerate(drawn):
                injected |= _inject(ranks, case.fault, one)
                left = case.ranks - number - 1
                ranks.wait_for_rows(left, _members(left), timeout_s=PATIENCE_S)
                if case.fault == "sigstop":
                    ranks.kill(one.slot)
            lived = ranks.wait(120, but=[one.slot for one in drawn])
        assert len(lived) == left, f"{len(lived)} ranks came to the end, of {left}"
        wrong = _what_is_wrong({slot: one.seen for slot, one in lived.items()})
    except (AssertionError, NtpError, RuntimeError, TimeoutError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    lost = "; ".join(f"slot {slot}: {verdict.reason}" for slot, verdict in sorted(ranks.verdicts.items()))
    details = f" (lost: {lost or 'nobody'}; drawn: {drawn})"
    error, wrong = error and error + details, wrong and wrong + details
    injected |= {slot: at for kind, slot, at, *_ in ranks.rows if kind == _injected(slot)}
    found = [
        _trial(ranks, one.slot, injected[one.slot], left=case.ranks - number - 1, wrong=wrong)
        for number, one in enumerate(drawn)
        if one.slot in injected
    ]
    return [*found[:-1], Trial(hung=error)] if error else found


def _ranks(case: Case, drawn: Sequence[HangTrial]) -> Ranks:
    have_megatron_imported()
    hangs = case.fault == "hang"
    faults = [hang(one.slot, during=one.fault_point, step=one.after_step + 1) for one in drawn if hangs]
    thresholds = HUNG if hangs else Thresholds()
    return Ranks(case.ranks, Play(job_of(case.ranks)), faults=faults, fault_points=FAULT_POINTS, thresholds=thresholds)


def _inject(ranks: Ranks, fault: str, one: HangTrial) -> dict[int, float]:
    """Slot -> when its fault was injected; a rank that hangs records this itself."""
    if fault == "hang":
        ranks.wait_for_rows(1, _injected(one.slot), timeout_s=120)
        return {}
    ranks.wait_for_rows(1, _step(one.after_step), timeout_s=120)
    time.sleep(one.seconds)
    return {one.slot: ranks.kill(one.slot) if fault == "sigkill" else ranks.freeze(one.slot)}


def _trial(ranks: Ranks, victim: int, injected: float, *, left: int, wrong: str) -> Trial:
    back = {row[1]: row[2] for row in ranks.rows if row[0] == _members(left)}
    if len(back) < left:
        return Trial(hung=f"{len(back)} survivors of {left} came back")
    last = max(back, key=lambda slot: back[slot])
    ended = [(at, phase) for phase, at in (row[2:] for row in ranks.rows if row[:2] == ["ended", last])]
    within = [(at, phase) for at, phase in [*ended, (ranks.deaths[victim], "signal")] if injected < at <= back[last]]
    return Trial(
        seconds=back[last] - injected,
        phases=by_phase(injected, within),
        step_s=_an_ordinary_step(ranks.rows),
        wrong=wrong,
    )


def _an_ordinary_step(rows: Sequence[Sequence[Any]]) -> float:
    """The median of the steps before any fault, without the first."""
    steps = map(_step, range(1, _AFTER[0].start + 1))
    ends: list[float] = [max(row[2] for row in rows if row[0] == step) for step in steps]
    return statistics.median(until - since for since, until in pairwise(ends))


def by_phase(begin: float, ended: Iterable[tuple[float, str]]) -> dict[str, float]:
    """How long each phase took, all of its parts together, by when they ended."""
    ended = sorted(ended)
    took = dict.fromkeys(PHASES, 0.0)
    for (since, _), (until, phase) in pairwise([(begin, ""), *ended]):
        took[phase] += until - since
    return took


def _what_is_wrong(seen: Mapping[int, Any]) -> str:
    worst = largest_differences(seen, run(uniform(BASE, batch=BATCH)))
    return "" if max(worst.values()) <= WRONG else f"different from the reference run: {worst}"


# ---------------------------------------------------------------- rows


def measure(case: Case) -> dict[str, Any]:
    """One row."""
    chance = random.Random(f"{SEED} {case}")
    found = [trial for _ in range(case.jobs) for trial in trials(case, chance)]
    for trial in found:
        if trial.hung or trial.wrong:
            print(f"hung or wrong: {case}: {trial.hung or trial.wrong}", file=sys.stderr)
    back = [trial for trial in found if not trial.hung] or [Trial(phases=dict.fromkeys(PHASES, math.inf))]
    seconds = sorted(trial.seconds for trial in back)
    return {
        "framework": "megatron",
        "fault": case.fault,
        "ranks": case.ranks,
        "trials": len(found),
        "p50_s": statistics.median(seconds),
        "p99_s": seconds[math.ceil(0.99 * len(seconds)) - 1],
        "step_s": statistics.median(trial.step_s for trial in back),
        "phases": {phase: round(statistics.median(trial.phases[phase] for trial in back), 4) for phase in PHASES},
        "wrong": sum(bool(trial.wrong) for trial in found),
        "hung": sum(bool(trial.hung) for trial in found),
    }


def cases(scale: str) -> list[Case]:
    if scale == "ci":
        return [Case(fault=fault, ranks=4, jobs=1, losses=1) for fault in THRESHOLD_S]
    return [
        Case(fault=fault, ranks=ranks, jobs=15 if (fault, ranks) == ("sigkill", 8) else 5)
        for ranks in (4, 8)
        for fault in THRESHOLD_S
    ]


def is_as_wanted(row: Mapping[str, Any]) -> bool:
    """Whether a row with enough trials reaches its bounds, which are set for eight ranks on two cores."""
    slow = row["fault"] == "sigkill" and row["p99_s"] > SLOWEST_KILL_S
    return not slow and bool(row["p50_s"] <= THRESHOLD_S[row["fault"]] + BEYOND_S)


def main(scale: str) -> int:
    """The slice for CI is judged by whether anything is wrong or hung: one trial says nothing of times."""
    rows = [measure(case) for case in cases(scale)]
    restart = restart_seconds(max(row["ranks"] for row in rows), trials=1 if scale == "ci" else 3, seed=SEED)
    judged = [] if scale == "ci" else rows
    holds = not any(row["wrong"] or row["hung"] for row in rows) and all(map(is_as_wanted, judged))
    return evidence.show("recovery", holds=holds, seed=SEED, rows=rows, torchrun_s=restart, scale=scale or "default")


if __name__ == "__main__":
    sys.exit(main(os.environ.get("SCALE", "")))
