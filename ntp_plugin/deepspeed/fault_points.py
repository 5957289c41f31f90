"""The points in a step and in a recovery where faults can be injected, in a live DeepSpeed job
(`recovery/fault_points.py`)."""

from typing import Any

from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from ntp_plugin.deepspeed.job import DeepSpeedJob
from ntp_plugin.recovery.fault_points import FaultPoints, IsHere, Reached, recovery_fault_points
from ntp_plugin.reduction.sharded_optimizer import LaneShards


def report_steps(job: DeepSpeedJob, engine: Any, reached: Reached) -> None:
    """Report the fault points of the engine's calls, and of the votes in them. Their number is that of the optimizer
    step: a framework's loop votes several times in each."""
    fault_points = FaultPoints(reached, "step", lambda: job.window.step + 1)
    fault_points.at(engine, "forward", "forward")
    fault_points.at(engine, "backward", "backward")
    fault_points.at(engine, "step", "accumulated", "stepped")
    fault_points.at(engine, "allreduce_gradients", "reduce")
    fault_points.at(job.window.checkpoints, "write", "save", "written")
    fault_points.at(job.loop, "vote", "vote")
    fault_points.at(job.loop, "apply", "apply", "applied")
    fault_points.at(LaneShards, "begin_spread", "gather")
    report_sharding(fault_points)


def report_sharding(fault_points: FaultPoints) -> None:
    """Report the fault points in ZeRO's own collectives. Classes report them, because a recovery builds the objects
    again."""
    fault_points.at(stage_1_and_2, "all_gather_dp_groups", "gather")
    fault_points.at(DeepSpeedZeroOptimizer_Stage3, "_post_step", "gather")
    fault_points.at(DeepSpeedZeRoOffload, "pre_sub_module_forward_function", "gather-forward")
    fault_points.at(DeepSpeedZeRoOffload, "pre_sub_module_backward_function", "gather-backward")
    fault_points.at(DeepSpeedZeroOptimizer_Stage3, "partition_grads", "scatter")


def report_recoveries(job: DeepSpeedJob, driver: Any, reached: Reached) -> None:
    """Report the fault points of recoveries, once the driver exists."""
    recovery_fault_points(driver, job.trainer, reached).at(job.loop, "roll_forward", None, "rolled")


def whenever_there_is_a_job(reached: Reached, is_here: IsHere) -> None:
    """Report all fault points of a job that this process will have; calls `is_here` when it has one."""
    take = DeepSpeedJob.take

    def take_engine(job: DeepSpeedJob, engine: Any, *args: Any) -> None:
        take(job, engine, *args)
        is_here(str(job.trainer.topology.slot_of(job.rank.place.slot)), job.trainer.weights)
        report_steps(job, engine, reached)
        if job.rank.place.joining:
            drive = job.rank.drive

            def driven(trainer: Any) -> Any:
                driver = drive(trainer)
                report_recoveries(job, driver, reached)
                return driver

            setattr(job.rank, "drive", driven)  # noqa: B010
        else:
            report_recoveries(job, job.loop.driver, reached)

    setattr(DeepSpeedJob, "take", take_engine)  # noqa: B010  (a plain assignment is not for methods)
