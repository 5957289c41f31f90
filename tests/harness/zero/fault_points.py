"""Where faults are injected into a live DeepSpeed job, and where the others are when they learn of a loss."""

import contextlib
import itertools
import time
from typing import Any

from ntp_plugin.errors import PeerLost
from ntp_plugin.recovery.fault_points import FaultPoints
from ntp_plugin.testing.ranks import Rank
from tests.harness.played_ranks import Asking, report_request, wait_until_they_ask

SHARDED_FAULT_POINTS = ("gather-forward", "gather-backward", "scatter")
"""Those of ZeRO-3 alone."""
FAULT_POINTS = (
    *("forward", "backward", "accumulated", "reduce", "vote", "apply", "applied", "gather", "between", "save"),
    *SHARDED_FAULT_POINTS,
    *("written", "within", "gradient", "evaluation"),
    *("report", "plan", "regroup", "resume", "rolled", "resumed"),
)
STEP_FAULT_POINTS = (
    *("forward", "within", "backward", "gradient", "accumulated", "reduce", "vote", "apply", "applied", "between"),
)
"""Those of a step in a replica that is cut, whose slots wait for each other in the forward and the backward."""
FORWARDS = 3
"""Of an evaluation."""


def report_fault_points(rank: Rank, engine: Any, job_of: Any, asking: Asking) -> None:
    """Report every fault point to the rank: those of a step by its number, those of a recovery by its epoch."""
    from ntp_plugin.deepspeed.fault_points import report_recoveries, report_sharding  # noqa: PLC0415
    from ntp_plugin.deepspeed.job import DeepSpeedJob  # noqa: PLC0415

    job = DeepSpeedJob.now
    assert job is not None, "the engine is one that can lose ranks"
    driver: Any = job.loop.driver
    fault_points = FaultPoints(rank.reached, "step", lambda: int(job.loop.done) + 1)

    if job_of.hear_at and job_of.hear_at[0] == "words" and all(fault.slot != rank.slot for fault in rank.faults):
        _learn_before_the_vote(job, job_of.hear_at[1])
    if job_of.hears_in_evaluation == rank.slot:
        _learn_in_an_evaluation(engine, job)
    if job_of.slow_to_leave and rank.slot in (1, 2):
        _be_slow_to_leave(job, job_of.slow_to_leave)
    fault_points.at(engine, "allreduce_gradients", "reduce")
    if job_of.tp > 1:
        row = next(layer for layer in engine.module.modules() if type(layer).__name__ in ("LinearAllreduce", "Row"))
        fault_points.at(row, "forward", "within")
        row.weight.register_hook(lambda _: rank.reached("gradient", job.loop.done + 1))
    fault_points.at(job.loop, "vote", "vote")
    fault_points.at(job.loop, "apply", "apply", "applied")
    fault_points.at(job.window.checkpoints, "write", None, "written")
    report_sharding(fault_points)
    if not rank.joining:
        report_recoveries(job, driver, rank.reached)
    _wait_for_joining_ranks(rank, job, asking)


def wait_for_a_loss(job: Any) -> None:
    """Wait for the loss, and continue as if it had not been seen."""
    with contextlib.suppress(PeerLost):
        while True:
            job.rank.groups.check()
            time.sleep(0.001)


def _learn_before_the_vote(job: Any, step: int) -> None:
    original = job.window._words

    def words() -> Any:
        if job.loop.done + 1 == step and not job.rank.groups.epoch:
            wait_for_a_loss(job)
        return original()

    job.window._words = words


def _learn_in_an_evaluation(engine: Any, job: Any) -> None:
    """At the end of its last forward, when the other slots of the replica have had theirs."""
    forwards = itertools.count(1)

    def hear(*_: Any) -> None:
        if not engine.module.training and not job.rank.groups.epoch and next(forwards) == FORWARDS:
            wait_for_a_loss(job)
            job.rank.groups.check()

    engine.module.register_forward_hook(hear)


def _be_slow_to_leave(job: Any, section: int) -> None:
    vote, add_up = job.loop.vote, job.loop._sum

    def voting(*args: Any) -> Any:
        job.loop._sum = slowly
        try:
            return vote(*args)
        finally:
            job.loop._sum = add_up

    def slowly(numbers: Any) -> Any:
        found = add_up(numbers)
        while job.loop.done + 1 == section and not job.rank.groups.epoch:
            job.rank.groups.check()
            time.sleep(0.001)
        return found

    job.loop.vote = voting


def _wait_for_joining_ranks(rank: Rank, job: Any, asking: Asking) -> None:
    begin = job.window._take_in_hand

    def wait_and_begin() -> None:
        wait_until_they_ask(rank, asking, lambda: job.window.step + 1, lambda: None)
        begin()

    job.window._take_in_hand = wait_and_begin
    report_request(rank, asking, job.rank._agreeing)
