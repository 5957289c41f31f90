"""A run that loses a rank within a step equals, bit for bit, one that had lost it before that step: nothing of the
step in flight remains.

With ZeRO the others resume from the step of the newest copies, so the test looks it up in the run.
"""

import pytest

from ntp_plugin.testing.faults import kill
from tests.harness.zero.job import Job, Play, run

STEPS = {"steps": 12, "epochs": 3, "dtype": "float32"}
IN_FLOAT32 = (("data_types", {"grad_accum_dtype": "fp32"}),)
"""Gradients of bf16 are added up in it, by another optimizer of DeepSpeed's."""
JOBS = {
    **{f"zero {stage}": Job(stage=stage, **STEPS) for stage in (0, 1, 2)},
    "zero 1, bf16 in float32": Job(stage=1, **{**STEPS, "dtype": "bfloat16"}, more=IN_FLOAT32),
    **{f"autotp, zero {stage}": Job(tp=2, stage=stage, **STEPS) for stage in (0, 1, 2)},
    **{f"mpu, zero {stage}": Job(tp=2, mpu=True, stage=stage, **STEPS) for stage in (0, 1)},
    "mpu, bf16 in float32": Job(tp=2, mpu=True, stage=1, **{**STEPS, "dtype": "bfloat16"}, more=IN_FLOAT32),
}
FAULT_POINTS = ["forward", "backward", "accumulated", "reduce", "vote", "apply", "applied"]
SHORT = [("autotp, zero 1", "reduce")]
LOST, STEP = 2, 6


def without(name, **fault):
    """The survivors when the rank was lost then; with an mpu its replica leaves with it."""
    job = JOBS[name]
    return run(job, faults=[kill(LOST, **fault)], leaving=[LOST + 1] if job.mpu else [])


def first_degraded_step(rows):
    """A play that counts."""
    return min(row[1] for row in rows if row[0] == "micro" and row[2])


def bits(outcomes):
    return {
        slot: {name: value.tobytes() for name, value in seen.weights.items()} for slot, seen in sorted(outcomes.items())
    }


_PLANNED = {}


def planned(name, first):
    """The result of a run that loses the rank between two steps, and continues without it from that one."""
    for step in (first - 1, first, first + 1):
        if (name, first) in _PLANNED:
            break
        outcomes, rows = without(name, during="between", step=step)
        _PLANNED.setdefault((name, first_degraded_step(rows)), bits(outcomes))
    return _PLANNED[name, first]


@pytest.mark.parametrize(
    ("name", "fault_point"),
    [
        pytest.param(name, fault_point, marks=[pytest.mark.short] * ((name, fault_point) in SHORT))
        for name in JOBS
        for fault_point in FAULT_POINTS
    ],
)
def test_a_loss_within_a_step(name, fault_point):
    outcomes, rows = without(name, during=fault_point, step=STEP)
    assert bits(outcomes) == planned(name, first_degraded_step(rows))


def test_the_step_makes_a_difference():
    """The comparison distinguishes two runs."""
    runs = [without("zero 0", during="between", step=step) for step in (4, 7)]
    (early, first), (late, last) = runs
    assert first_degraded_step(first) != first_degraded_step(last)
    assert bits(early) != bits(late)


class LeavesGradients(Play):
    """State of the step in flight when the accumulation window restarts."""

    def _play(self, rank):
        from ntp_plugin.deepspeed.accumulation_window import AccumulationWindow  # noqa: PLC0415  (only ranks have DeepSpeed with hooks in it)

        unwound = AccumulationWindow._unwound

        def leave(window):
            held = {one: one.grad for one in window._engine.module.parameters()}
            unwound(window)
            for one, gradient in held.items():
                one.grad = gradient

        AccumulationWindow._unwound = leave
        return super()._play(rank)


def test_remains_of_a_step_are_detected():
    faults = [kill(LOST, during="accumulated", step=STEP)]
    outcomes, rows = run(JOBS["zero 0"], faults=faults, play=LeavesGradients)
    assert bits(outcomes) != planned("zero 0", first_degraded_step(rows))
