"""Compare DeepSpeed jobs whose ranks are killed with undisturbed ones: what `make show-deepspeed` measures.

    python -m benchmarks.deepspeed_numerics              every stage, fault point and victim; some minutes
    SCALE=ci python -m benchmarks.deepspeed_numerics     a slice

Each row is a job of 20 steps, usually of four ranks, that loses one, and the largest relative difference of its losses,
norms and weights from stock DeepSpeed on the same samples. `seconds` is the time from the kill to the end of the first
later step of the others, including an ordinary step. In float64 the gradients are not clipped, since DeepSpeed's norms
are in float32. Each negative control has one planted fault, and must be detected.
"""

import dataclasses
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import evidence
from ntp_plugin.errors import NtpError
from ntp_plugin.reduction import direct_lanes
from ntp_plugin.reduction.gradient_lanes import GradientLanes
from ntp_plugin.testing.faults import Fault, kill
from ntp_plugin.testing.ranks import Rank
from tests.harness.zero import job as zero
from tests.harness.zero.compare import BOUNDS, differences, used_once, within
from tests.harness.zero.fault_points import STEP_FAULT_POINTS
from tests.harness.zero.job import Job, Rows, run

SEED = 7
STEP = 6
FAULT_POINTS = ("forward", "backward", "accumulated", "reduce", "vote", "apply", "applied", "gather", "between")
HEARD = ("forward", "backward", "accumulated")
"""Where the others learn of a loss in their own code, and not in a collective: `heard` in a row."""
VICTIMS = (0, 1, 3)
CUT_FAULT_POINTS = (*STEP_FAULT_POINTS, "gather")
"""With ZeRO alone something is gathered."""
CONTROLS = (
    *("mean_over_who_is_left", "samples_not_dealt", "window_goes_on", "shards_not_restored"),
    *("lanes_not_summed", "all_slots_counted", "all_slots_counted_by_zero", "mean_over_who_is_left_of_an_mpu"),
)
"""Planted faults."""
RECOVERED_S = 1.0


def cases(scale: str) -> Iterator[tuple[Job, int, str]]:
    """Job, victim, fault point."""
    for stage in (0, 1, 2):
        for place, fault_point in enumerate(FAULT_POINTS):
            if fault_point == "gather" and not stage:
                continue
            if scale == "ci" and place % 3 != stage:
                continue
            for victim in VICTIMS if scale != "ci" else VICTIMS[place // 3 : place // 3 + 1]:
                yield Job(stage=stage), victim, fault_point
        yield Job(stage=stage, dtype="float32"), 2, "reduce"
        for where in HEARD if scale != "ci" else HEARD[stage : stage + 1]:
            yield Job(stage=stage, hear_at=(where, STEP, 1)), 2, "forward"
    for stage in (0, 1, 2):
        yield from _cut_cases(stage, scale)
    for stage in (0, 1, 2):
        yield from _own_cases(stage, scale)


def _cut_cases(stage: int, scale: str) -> Iterator[tuple[Job, int, str]]:
    for place, fault_point in enumerate(CUT_FAULT_POINTS if stage else CUT_FAULT_POINTS[:-1]):
        if scale == "ci" and place % 4 != stage:
            continue
        for victim in VICTIMS if scale != "ci" else VICTIMS[place // 4 : place // 4 + 1]:
            yield Job(tp=2, stage=stage), victim, fault_point
    yield Job(tp=2, stage=stage, dtype="float32"), 2, "reduce"
    if scale != "ci":
        for kind in ("llama", "tied llama", "opt"):
            yield Job(tp=2, stage=stage, dtype="float32", transformer=kind), 1, "within"
        for ranks, tp, victim in ((8, 4, 5), (6, 3, 0)):
            yield Job(ranks=ranks, tp=tp, stage=stage), victim, "backward"


def _own_cases(stage: int, scale: str) -> Iterator[tuple[Job, int, str]]:
    for place, fault_point in enumerate(CUT_FAULT_POINTS if stage else CUT_FAULT_POINTS[:-1]):
        if scale == "ci" and place != 3 * stage + 1:
            continue
        for victim in VICTIMS if scale != "ci" else VICTIMS[stage : stage + 1]:
            yield Job(tp=2, mpu=True, stage=stage), victim, fault_point
    if scale != "ci":
        yield Job(tp=2, mpu=True, stage=stage, dtype="float32"), 2, "reduce"
        yield Job(ranks=6, tp=3, mpu=True, stage=stage), 1, "backward"


def feature(job: Job) -> str:
    """The feature that the job tests."""
    cut = "mpu" if job.mpu else "AutoTP"
    return f"ZeRO-{job.stage}{f', {cut}' if job.tp > 1 else ''}{job.transformer and f' of {job.transformer}'}"


def layout(job: Job) -> str:
    """While one is lost: the widths of the replicas."""
    if job.mpu:
        return f"TP{job.tp}, the other replica gone"
    return f"DP{job.ranks}" if job.tp == 1 else f"TP{job.tp}+TP{job.tp - 1}"


def leaving(job: Job, victim: int) -> list[int]:
    """The slots that end with it."""
    first = victim - victim % job.tp
    return list(range(first, first + job.tp)) if job.mpu else []


@dataclasses.dataclass(frozen=True)
class Play(zero.Play):
    """A run that writes down when a rank is killed and when steps are over, and may have one thing wrong."""

    spoil: str = ""

    def _play(self, rank: Rank) -> zero.Seen:
        _record_times()
        if self.spoil:
            _spoil(self.spoil)
        return super()._play(rank)


def _record_times() -> None:
    from ntp_plugin.deepspeed.accumulation_window import AccumulationWindow  # noqa: PLC0415  (only ranks have DeepSpeed)

    reached, commit = Rank.reached, AccumulationWindow._commit

    def recording_reached(rank: Rank, fault_point: str, step: int | None = None, *, epoch: int | None = None) -> None:
        if any(fault.is_for(rank.slot, fault_point, step, epoch) for fault in rank.faults):
            rank.write([["injected", time.monotonic()]])
        _Now.rank = rank
        reached(rank, fault_point, step, epoch=epoch)

    def committed(window: Any) -> None:
        commit(window)
        assert _Now.rank is not None, "it has reached something"
        _Now.rank.write([["over", window._rank.groups.epoch, window.step, time.monotonic()]])

    setattr(Rank, "reached", recording_reached)  # noqa: B010  (a plain assignment is not for methods)
    setattr(AccumulationWindow, "_commit", committed)  # noqa: B010


class _Now:
    rank: Rank | None = None


def _spoil(what: str) -> None:
    from ntp_plugin.deepspeed.accumulation_window import AccumulationWindow  # noqa: PLC0415
    from ntp_plugin.deepspeed.full_width_replicas import FullWidthReplicas  # noqa: PLC0415
    from ntp_plugin.deepspeed.zero_state import ZeroState  # noqa: PLC0415

    if what.startswith("mean_over_who_is_left"):
        setattr(FullWidthReplicas, "weight", 1.0)  # noqa: B010
    elif what == "samples_not_dealt":
        shares: Any = vars(FullWidthReplicas)["shares"].fget
        cut_short = property(lambda replicas: {slot: numbers[:2] for slot, numbers in shares(replicas).items()})
        setattr(FullWidthReplicas, "shares", cut_short)  # noqa: B010
    elif what == "window_goes_on":
        unwound = AccumulationWindow._unwound

        def keep_gradients(window: Any) -> None:
            kept = [parameter.grad for parameter in window._engine.module.parameters()]
            unwound(window)
            for parameter, gradient in zip(window._engine.module.parameters(), kept, strict=True):
                parameter.grad = gradient

        setattr(AccumulationWindow, "_unwound", keep_gradients)  # noqa: B010
    elif what == "lanes_not_summed":
        setattr(GradientLanes, "__init__", lambda lanes, *_: setattr(lanes, "_under_way", []))  # noqa: B010
    elif what.startswith("all_slots_counted"):
        direct_lanes.is_replica_leader = lambda *_: True
    elif what == "shards_not_restored":
        setattr(ZeroState, "make_room", lambda *_: [])  # noqa: B010


def lived(job: Job, faults: list[Fault], spoil: str = "") -> tuple[dict[int, zero.Seen], Rows]:
    """A run with times in its rows."""
    lost = sorted({slot for fault in faults for slot in leaving(job, fault.slot)})
    return run(job, faults=faults, leaving=lost, play=lambda job, asking: Play(job, asking, spoil))


def recovered_s(rows: Rows) -> float:
    """From the kill to the first step that is over for all in the epoch after it."""
    injected = next(row[1] for row in rows if row[0] == "injected")
    epochs = {row[1] for row in rows if row[0] == "over"}  # where others leave with it, that takes an epoch more
    over = [row for row in rows if row[0] == "over" and row[1] == min(epochs - {0})]
    first = min(row[2] for row in over)
    return float(max(row[3] for row in over if row[2] == first) - injected)


def noticed(control: str) -> bool:
    """Return whether the comparison, or the plugin itself, detects it."""
    job, fault_point = Job(), "accumulated"
    if control == "shards_not_restored":
        job, fault_point = Job(stage=1), "vote"
    elif control == "mean_over_who_is_left_of_an_mpu":
        job = Job(tp=2, mpu=True)
    elif control in ("lanes_not_summed", "all_slots_counted", "all_slots_counted_by_zero"):
        job = Job(tp=2, stage=int(control.endswith("zero")))
    try:
        outcomes, rows = lived(job, [kill(1, during=fault_point, step=STEP)], control)
        return not (within(differences(outcomes, rows, job), job.dtype) and used_once(rows, job))
    except NtpError:
        return True


def main(scale: str) -> int:
    """The rows, and whether they hold."""
    rows: list[dict[str, Any]] = []
    fine, seconds = True, []
    for job, victim, fault_point in cases(scale):
        row = {
            "feature": feature(job),
            "layout": layout(job),
            "dtype": job.dtype,
            "moment": fault_point,
            "victim": victim,
        }
        row["heard"] = job.hear_at[0] if job.hear_at else "where it waits"
        try:
            outcomes, recorded = lived(job, [kill(victim, during=fault_point, step=STEP)])
            found = differences(outcomes, recorded, job)
            once, took = used_once(recorded, job), recovered_s(recorded)
        except (RuntimeError, TimeoutError, AssertionError, NtpError) as error:  # the other rows are worth knowing
            rows.append(row | {"failed": str(error)[-200:]})
            fine = False
        else:
            rows.append(row | found | {"bound": BOUNDS[job.dtype], "once": once, "seconds": took})
            fine &= within(found, job.dtype) and once
            seconds.append(took)
        print(rows[-1], file=sys.stderr, flush=True)
    controls = [{"name": control, "noticed": noticed(control)} for control in CONTROLS]
    p50 = statistics.median(seconds) if seconds else math.inf
    return evidence.show(
        "deepspeed",
        holds=fine and p50 <= RECOVERED_S and all(control["noticed"] for control in controls),
        seed=SEED,
        rows=rows,
        scale=scale or "default",
        recovered_p50_s=p50,
        recovered_slowest_s=max(seconds, default=math.inf),
        negative_controls=controls,
    )


if __name__ == "__main__":
    sys.exit(main(os.environ.get("SCALE", "")))
