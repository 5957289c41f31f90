"""The moments of a live Megatron job (`recovery/moments.py`)."""

from collections.abc import Iterator
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from ntp_plugin.megatron.buckets import LaneBucketGroup
from ntp_plugin.megatron.live import start
from ntp_plugin.recovery.moments import IsHere, Moments, Reached, Weight, of_walks
from ntp_plugin.training.sharded_optimizer import LaneShards


def tell(job: start.MegatronJob, reached: Reached) -> None:
    """Those of its steps, and of the walks that it takes as a member; who comes in is driven later: `tell_of_walks`."""
    moments = Moments(reached, "step", lambda: int(job.loop.done) + 1)
    moments.at(job.step.watch, "look", "compare")
    moments.at(job.step, "_begin", "step")
    moments.at(job.step, "reported", "reduced")
    moments.at(job.loop, "vote", "vote")
    moments.at(job.loop, "apply", "apply", "applied")
    moments.at(job.loop, "between", "between")
    moments.at(job.step, "_told", "scheduled")
    moments.at(schedules, "forward_step", "forward")
    moments.at(schedules, "backward_step", "backward")
    moments.at(P2PCommunicator, "_communicate", "exchange")
    for buckets in (_ParamAndGradBucketGroup, LaneBucketGroup):
        moments.at(buckets, "finish_grad_sync", "reduce")
    moments.at(_ParamAndGradBucketGroup, "start_param_sync", "gather")
    moments.at(LaneShards, "begin_spread", "gather")
    moments.at(dist_checkpointing, "save", "save", "written")


def tell_of_walks(job: start.MegatronJob, reached: Reached) -> None:
    """Once it is driven."""
    moments = of_walks(job.driver, job.trainer, reached)
    moments.at(job.trainer, "_put_in", "moved")
    moments.at(job.anatomy, "wrap_again", "built", "made")
    moments.at(job.trainer, "wait_for_the_rest", "arriving", "arrived")


def _weights(job: start.MegatronJob) -> Iterator[Weight]:
    state = job.trainer.state
    for tensor, piece in state.pieces(job.trainer.layout_now):
        yield Weight(piece=piece, values=state.live.parameters[tensor.name], is_cut=bool(tensor.family))


def whenever_there_is_a_job(reached: Reached, is_here: IsHere) -> None:
    """In a process that will have one; `is_here` is told of it."""
    begin = start.MegatronJob.__init__

    def told(job: Any, *args: Any) -> None:
        begin(job, *args)
        slot = job.topology.slot_of(job.rank.place.slot)
        is_here(str(slot), lambda: _weights(job))
        tell(job, reached)
        drive = job.rank.drive

        def driven(trainer: Any) -> Any:
            job.driver = drive(trainer)
            tell_of_walks(job, reached)
            return job.driver

        if job.rank.place.joining:
            job.rank.drive = driven
        else:
            tell_of_walks(job, reached)

    setattr(start.MegatronJob, "__init__", told)  # noqa: B010  (a plain assignment is not for methods)
