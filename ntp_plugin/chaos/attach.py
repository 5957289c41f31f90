"""Strikes at a job that runs already, from another terminal of its owner: one, or all of a recipe.

They are for jobs that obey orders (`ntp run --ntp-chaos`), and for who can read their token: a signal, too, though only
the record says which process has the slot. Nothing is sent to a process that is no worker of `ntp run`, and nothing
that the record is not told of before.

A recipe's steps, seconds and epochs count from now on. It is over when all of it has struck and the others have gone
on; the job is not ended, and has no twin.
"""

import dataclasses
import signal
import time
from pathlib import Path

from ntp_plugin.chaos.campaign import Look
from ntp_plugin.chaos.ending import Wait
from ntp_plugin.chaos.history import History
from ntp_plugin.chaos.recipe import ANY, Recipe
from ntp_plugin.chaos.schedule import FaultSchedule
from ntp_plugin.chaos.striker import SIGNALS, Striker, from_outside, is_worker, send, struck_now
from ntp_plugin.chaos.strikes import BY_ITS_OWN_HAND, Orders, Strike, orders_file
from ntp_plugin.chaos.verdict import CampaignVerdict, judge_attached
from ntp_plugin.errors import ConfigError
from ntp_plugin.telemetry import Follower, read_run
from ntp_plugin.telemetry.job_state import JobState
from ntp_plugin.telemetry.whereabouts import nobody_is_left

_LOOK_S = 0.05


def strike_now(run: Path, strike: Strike, *, wait: Wait) -> str:
    """Order it, or do it; what was done, in words."""
    job = job_of(run)
    _refuse(run, job, what={strike.what}, slots={strike.slot})
    orders = Orders.of_a_running_job(orders_file(run))
    if strike.what in BY_ITS_OWN_HAND:
        orders.give(strike)
        return f"ordered: {strike.what} on {strike.slot}, {strike.during or 'at its next moment'}"
    pid = job.pids.get(strike.slot)
    if pid is None:
        raise ConfigError(f"{strike.slot} is lost, and nobody has its place")
    if not is_worker(pid):
        raise ConfigError(f"{strike.slot}: process {pid} is no worker of ntp run on this host (any more)")
    from_outside(run).tell(struck_now(strike, job))
    try:
        send(pid, SIGNALS[strike.what])
        if strike.what == "pause":
            wait(strike.seconds)
    finally:  # also where somebody ends this command meanwhile
        if strike.what == "pause":
            send(pid, signal.SIGCONT)
    return f"done: {strike.what} to {strike.slot}, pid {pid}"


def strike_by(recipe: Recipe, run: Path, *, look: Look, wait: Wait) -> tuple[History, CampaignVerdict]:
    """All of a recipe; what the job has told until then, and what is to be said of the strikes."""
    job = job_of(run)
    drawn = {what for what, _ in recipe.random.deck()} if recipe.random.count else set[str]()
    slots = {fault.slot for fault in recipe.faults} - {ANY}
    _refuse(run, job, what={fault.what for fault in recipe.faults} | drawn, slots=slots)
    schedule = FaultSchedule(_from_now_on(recipe, job), named=f"attached-{time.time_ns()}-")
    striker = Striker(run, schedule, Orders.of_a_running_job(orders_file(run)))
    try:
        state = _strike_until_over(striker, run, recipe.job.patience_s, look, wait)
    finally:  # whoever is interrupted leaves no orders behind, and nobody who sleeps
        striker.give_up()
    whole = History.of(read_run(run))
    return whole, judge_attached(striker.asked(state), whole)


def _strike_until_over(striker: Striker, run: Path, patience_s: float, look: Look, wait: Wait) -> JobState:
    follower, state, history = Follower(run), JobState(), History()
    deadline = time.monotonic() + patience_s
    while not (state.ended or _is_over(striker, state, history)) and time.monotonic() < deadline:
        alone = nobody_is_left(state)
        news = follower.news()
        for told in news:
            state.hear(told)
            history.hear(told)
        look(state, news)
        if alone and not news:
            break
        striker.strike(state, history)
        wait(_LOOK_S)
    return state


def _is_over(striker: Striker, job: JobState, history: History) -> bool:
    """Whether all has struck, and a step has been committed since by all who are left."""
    if not (job.slots and striker.is_done(history)):
        return False
    outcomes = judge_attached(striker.asked(job), history).outcomes
    return all(outcome.recovered_s is not None for outcome in outcomes if outcome.struck_at)


def _refuse(run: Path, job: JobState, *, what: set[str], slots: set[str]) -> None:
    """What this job cannot be struck with, or where."""
    others = what - BY_ITS_OWN_HAND.keys() - SIGNALS.keys()
    if others:
        raise ConfigError(
            f"{min(others)} is for jobs that a recipe has started: the record does not say what runs where",
            way_out="take the ntp run, the host or its link away by hand",
        )
    if not slots <= job.slots.keys():
        there = ", ".join(sorted(job.slots)) or "none: training has not begun"
        raise ConfigError(f"{run}: there is no slot {min(slots - job.slots.keys())}", way_out=f"slots: {there}")


def _from_now_on(recipe: Recipe, job: JobState) -> Recipe:
    passed = job.heard_at - job.began_at
    faults = tuple(
        dataclasses.replace(
            fault,
            at_step=None if fault.at_step is None else fault.at_step + job.step,
            at_s=None if fault.at_s is None else fault.at_s + passed,
            epoch=None if fault.epoch is None else fault.epoch + job.epoch,
        )
        for fault in recipe.faults
    )
    return dataclasses.replace(recipe, faults=faults)


def job_of(run: Path) -> JobState:
    """As its record has it now."""
    job = JobState()
    for told in read_run(run):
        job.hear(told)
    return job
