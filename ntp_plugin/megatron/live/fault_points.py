"""The points in a step and in a recovery where faults can be injected, in a live Megatron job
(`recovery/fault_points.py`)."""

from collections.abc import Iterator
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.pipeline_parallel import combined_1f1b, schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
)

from ntp_plugin.megatron.layers.expert_dispatch import UnevenDispatcher
from ntp_plugin.megatron.live import start
from ntp_plugin.megatron.reduction.buckets import LaneBucketGroup
from ntp_plugin.recovery.fault_points import FaultPoints, IsHere, Reached, Weight, recovery_fault_points
from ntp_plugin.reduction.sharded_optimizer import LaneShards


def report_steps(job: start.MegatronJob, reached: Reached) -> None:
    """Report the fault points of steps, and of recoveries of a member. A joining rank gets its driver later:
    `report_recoveries`."""
    fault_points = FaultPoints(reached, "step", lambda: int(job.loop.done) + 1)
    fault_points.at(job.step.watch, "look", "compare")
    fault_points.at(job.step, "_begin", "step")
    fault_points.at(job.step, "reported", "reduced")
    fault_points.at(job.loop, "vote", "vote")
    fault_points.at(job.loop, "apply", "apply", "applied")
    fault_points.at(job.loop, "between", "between")
    fault_points.at(job.step, "_step_result", "scheduled")
    fault_points.at(schedules, "forward_step", "forward")
    fault_points.at(schedules, "backward_step", "backward")
    fault_points.at(combined_1f1b, "combined_forward_backward_step", "forward")  # with the backward of another one
    fault_points.at(P2PCommunicator, "_communicate", "exchange")
    for dispatcher in (
        MoEAllGatherTokenDispatcher,
        MoEAlltoAllTokenDispatcher,
        MoEFlexTokenDispatcher,
        UnevenDispatcher,
    ):
        fault_points.at(dispatcher, "token_dispatch", "dispatch")
        fault_points.at(dispatcher, "token_combine", "combine")
    for buckets in (_ParamAndGradBucketGroup, LaneBucketGroup):
        fault_points.at(buckets, "finish_grad_sync", "reduce")
    fault_points.at(_ParamAndGradBucketGroup, "start_param_sync", "gather")
    fault_points.at(LaneShards, "begin_spread", "gather")
    fault_points.at(dist_checkpointing, "save", "save", "written")


def report_recoveries(job: start.MegatronJob, reached: Reached) -> None:
    """Report the fault points of recoveries, once the driver exists."""
    fault_points = recovery_fault_points(job.driver, job.trainer, reached)
    fault_points.at(job.trainer, "_put_in", "moved")
    fault_points.at(job.model_rebuild, "wrap_again", "built", "made")
    fault_points.at(job.trainer, "wait_for_the_rest", "arriving", "arrived")


def _weights(job: start.MegatronJob) -> Iterator[Weight]:
    state, layout = job.trainer.state, job.trainer.layout_now
    for tensor, tensor_slice in state.slices(layout):
        yield Weight(
            tensor_slice=tensor_slice,
            values=state.live.parameters[tensor.name],
            is_cut=bool(tensor.family),
            shared_by=state.expert_group(tensor, layout),
        )


def whenever_there_is_a_job(reached: Reached, is_here: IsHere) -> None:
    """Report all fault points of a job that this process will have; calls `is_here` when it has one."""
    begin = start.MegatronJob.__init__

    def init(job: Any, *args: Any) -> None:
        begin(job, *args)
        slot = job.topology.slot_of(job.rank.place.slot)
        is_here(str(slot), lambda: _weights(job))
        report_steps(job, reached)
        drive = job.rank.drive

        def driven(trainer: Any) -> Any:
            job.driver = drive(trainer)
            report_recoveries(job, reached)
            return job.driver

        if job.rank.place.joining:
            job.rank.drive = driven
        else:
            report_recoveries(job, reached)

    setattr(start.MegatronJob, "__init__", init)  # noqa: B010  (a plain assignment is not for methods)
