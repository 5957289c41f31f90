"""The moments of a live DeepSpeed job (`recovery/moments.py`)."""

from typing import Any

from deepspeed.runtime.zero import stage_1_and_2

from ntp_plugin.deepspeed.job import DeepSpeedJob
from ntp_plugin.recovery.moments import IsHere, Moments, Reached, of_walks
from ntp_plugin.training.sharded_optimizer import LaneShards


def tell(job: DeepSpeedJob, engine: Any, reached: Reached) -> None:
    """Those of its engine's calls, and of the votes in them."""
    moments = Moments(reached, "step", lambda: int(job.loop.done) + 1)
    moments.at(engine, "forward", "forward")
    moments.at(engine, "backward", "backward")
    moments.at(engine, "step", "accumulated", "stepped")
    moments.at(engine, "allreduce_gradients", "reduce")
    moments.at(job.window.checkpoints, "write", "save", "written")
    moments.at(job.loop, "vote", "vote")
    moments.at(job.loop, "apply", "apply", "applied")
    moments.at(stage_1_and_2, "all_gather_dp_groups", "gather")
    moments.at(LaneShards, "begin_spread", "gather")


def tell_of_walks(job: DeepSpeedJob, driver: Any, reached: Reached) -> None:
    """Once it is driven."""
    of_walks(driver, job.trainer, reached).at(job.loop, "roll_forward", None, "rolled")


def whenever_there_is_a_job(reached: Reached, is_here: IsHere) -> None:
    """In a process that will have one; `is_here` is told of it."""
    take = DeepSpeedJob.take

    def told(job: DeepSpeedJob, engine: Any, *args: Any) -> None:
        take(job, engine, *args)
        is_here(str(job.trainer.topology.slot_of(job.rank.place.slot)), job.trainer.weights)
        tell(job, engine, reached)
        if job.rank.place.joining:
            drive = job.rank.drive

            def driven(trainer: Any) -> Any:
                driver = drive(trainer)
                tell_of_walks(job, driver, reached)
                return driver

            setattr(job.rank, "drive", driven)  # noqa: B010
        else:
            tell_of_walks(job, job.loop.driver, reached)

    setattr(DeepSpeedJob, "take", told)  # noqa: B010  (a plain assignment is not for methods)
