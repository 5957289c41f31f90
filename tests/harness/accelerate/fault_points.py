"""Where faults are injected into a live job of a loop with accelerate."""

from typing import Any

from ntp_plugin.testing.ranks import Rank
from tests.harness.hf.fault_points import at, report_steps, wait_for_joining_ranks
from tests.harness.played_ranks import Asking

STEP_FAULT_POINTS = ("forward", "backward", "reduce", "vote", "apply", "applied", "gather")
LOOP_FAULT_POINTS = ("drawing", "stepped", "collecting", "collected", "waiting", "saving", "written", "saved")
RECOVERY_FAULT_POINTS = ("report", "plan", "regroup", "resume", "resumed", "rolled")
FAULT_POINTS = (*STEP_FAULT_POINTS, *LOOP_FAULT_POINTS, *RECOVERY_FAULT_POINTS)


def report_fault_points(rank: Rank, asking: Asking) -> None:
    """Report them once there is an engine. Steps are those of the engine, counted from 1: between two steps and in what
    the loop does there, the newest that is taken; before and within a step, that step."""
    from ntp_plugin.deepspeed.job import DeepSpeedJob  # noqa: PLC0415

    take = DeepSpeedJob.take

    def taken(job: Any, engine: Any, policy: Any) -> None:
        take(job, engine, policy)
        report_steps(rank, job, engine)
        wait_for_joining_ranks(rank, job, asking)

    setattr(DeepSpeedJob, "take", taken)  # noqa: B010  (a plain assignment is not for methods)
    _report_loop(rank)


def _report_loop(rank: Rank) -> None:
    import accelerate.accelerator  # noqa: PLC0415
    from accelerate.state import PartialState  # noqa: PLC0415
    from accelerate.utils import operations  # noqa: PLC0415

    from ntp_plugin.deepspeed.accelerate_loop.feed import LoopFeed  # noqa: PLC0415
    from ntp_plugin.deepspeed.accelerate_loop.user_loop import AccelerateLoop  # noqa: PLC0415
    from ntp_plugin.deepspeed.checkpoints import EngineCheckpoints  # noqa: PLC0415

    def reach(name: str, more: int = 0) -> None:
        loop = AccelerateLoop.now
        if name and loop is not None and not loop.passing:
            rank.reached(name, loop.window.step + more)

    def reach_next(name: str) -> None:
        reach(name, 1)

    owner = accelerate.accelerator.Accelerator
    at(LoopFeed, "draw", reach_next, "drawing")
    at(owner, "backward", reach, after="stepped")
    for module, name in ((operations, "_gpu_gather"), (accelerate.accelerator, "reduce")):
        at(module, name, reach, "collecting", "collected")
    at(PartialState, "wait_for_everyone", reach, "waiting")
    at(EngineCheckpoints, "write", reach, "saving", "written")
    at(owner, "save_state", reach, after="saved")
