"""Where faults are injected into a live job of the Trainer."""

import functools
from collections.abc import Callable
from typing import Any

from ntp_plugin.testing.ranks import Rank
from tests.harness.played_ranks import Asking, report_request, wait_until_they_ask

STEP_FAULT_POINTS = ("forward", "backward", "reduce", "vote", "apply", "applied", "gather")
SECTION_FAULT_POINTS = ("counting", "counted", "logging", "evaluating", "evaluated", "saving", "written", "ended")
RECOVERY_FAULT_POINTS = ("report", "plan", "regroup", "resume", "resumed", "rolled")
FAULT_POINTS = (*STEP_FAULT_POINTS, *SECTION_FAULT_POINTS, *RECOVERY_FAULT_POINTS)


def report_fault_points(rank: Rank, asking: Asking) -> None:
    """Report them once there is an engine. Steps are the Trainer's, counted from 1: in a section, the newest that is
    taken; "counting" belongs to the step whose tokens are counted."""
    from ntp_plugin.deepspeed.hf.trainer_loop import TrainerLoop  # noqa: PLC0415
    from ntp_plugin.deepspeed.job import DeepSpeedJob  # noqa: PLC0415

    take = DeepSpeedJob.take

    def taken(job: Any, engine: Any, policy: Any) -> None:
        take(job, engine, policy)
        report_steps(rank, job, engine)
        wait_for_joining_ranks(rank, job, asking)

    setattr(DeepSpeedJob, "take", taken)  # noqa: B010  (a plain assignment is not for methods)
    _report_sections(rank, TrainerLoop)


def at(owner: Any, name: str, reach: Callable[[str], None], before: Any = "", after: Any = "") -> None:
    """Report fault points before and after a function of a module, a class or an object."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def reporting(*args: Any, **kwargs: Any) -> Any:
        reach(before() if callable(before) else before)
        found = original(*args, **kwargs)
        reach(after() if callable(after) else after)
        return found

    setattr(owner, name, reporting)


def report_steps(rank: Rank, job: Any, engine: Any) -> None:
    """Report those within a step, and those of a recovery."""
    from deepspeed.runtime.zero import stage3, stage_1_and_2  # noqa: PLC0415

    from ntp_plugin.deepspeed.fault_points import report_recoveries  # noqa: PLC0415

    window = job.window

    def reach(name: str) -> None:
        if name and (window.votes_on is not None or name in ("forward", "backward", "reduce", "gather")):
            rank.reached(name, window.step + 1)

    at(engine, "forward", lambda name: reach(name if engine.module.training else ""), "forward")
    at(engine, "backward", reach, "backward")
    at(engine, "allreduce_gradients", reach, "reduce")
    at(stage_1_and_2, "all_gather_dp_groups", reach, "gather")
    at(stage3.DeepSpeedZeroOptimizer_Stage3, "_post_step", reach, "gather")
    at(job.loop, "vote", reach, "vote")
    at(job.loop, "apply", reach, "apply", "applied")
    if not rank.joining:
        report_recoveries(job, job.loop.driver, rank.reached)


def _report_sections(rank: Rank, loop_class: Any) -> None:
    def now() -> int:
        return int(loop_class.now.done) if loop_class.now else 0

    def reach_next(name: str) -> None:
        if name:
            rank.reached(name, now() + 1)

    def reach(name: str) -> None:
        if name:
            rank.reached(name, now())

    import transformers  # noqa: PLC0415

    from ntp_plugin.deepspeed.checkpoints import EngineCheckpoints  # noqa: PLC0415

    at(loop_class, "_count", reach_next, "counting", "counted")
    at(loop_class, "mean_loss", reach, "logging")
    at(transformers.Trainer, "prediction_step", reach, "evaluating", "evaluated")
    at(EngineCheckpoints, "write", reach, "saving", "written")
    at(transformers.Trainer, "_finalize_training", reach, "ended")


def wait_for_joining_ranks(rank: Rank, job: Any, asking: Asking) -> None:
    """Have members wait before a step until the joining ranks have asked."""
    begin = job.window._take_in_hand

    def wait_and_begin() -> None:
        wait_until_they_ask(rank, asking, lambda: int(job.window.step) + 1, lambda: None)
        begin()

    job.window._take_in_hand = wait_and_begin
    report_request(rank, asking, job.rank._agreeing)
