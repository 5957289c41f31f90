"""Strikes at a job that runs already, from another terminal of its owner: one, or all of a recipe.

They are for jobs that obey orders (`ntp run --ntp-chaos`), and for who can read their token: a signal, too, though only
the record says which process has the slot. Nothing is sent to a process that is no worker of `ntp run`, and nothing
that the record is not told of before.

A recipe's steps, seconds and epochs count from now on. It is over when all of it has struck and the others have gone
on; the job is not ended, and has no reference run.
"""

import dataclasses
import signal
import time
from pathlib import Path

from ntp_plugin.chaos.campaign import Look
from ntp_plugin.chaos.ending import Wait
from ntp_plugin.chaos.fault_injector import SIGNALS, FaultInjector, from_outside, injected_now, is_worker, send
from ntp_plugin.chaos.faults import BY_ITS_OWN_HAND, OrderedFault, Orders, orders_file
from ntp_plugin.chaos.history import History
from ntp_plugin.chaos.recipe import ANY, Recipe
from ntp_plugin.chaos.schedule import FaultSchedule
from ntp_plugin.chaos.verdict import CampaignVerdict, judge_attached
from ntp_plugin.errors import ConfigError
from ntp_plugin.telemetry import Follower, read_run
from ntp_plugin.telemetry.job_state import JobState
from ntp_plugin.telemetry.whereabouts import nobody_is_left

_LOOK_S = 0.05


def inject_now(run: Path, fault: OrderedFault, *, wait: Wait) -> str:
    """Order it, or do it; what was done, in words."""
    job = job_of(run)
    _refuse(run, job, what={fault.what}, slots={fault.slot})
    orders = Orders.of_a_running_job(orders_file(run))
    if fault.what in BY_ITS_OWN_HAND:
        orders.give(fault)
        return f"ordered: {fault.what} on {fault.slot}, {fault.during or 'at its next moment'}"
    pid = job.pids.get(fault.slot)
    if pid is None:
        raise ConfigError(f"{fault.slot} is lost, and nobody has its place")
    if not is_worker(pid):
        raise ConfigError(f"{fault.slot}: process {pid} is no worker of ntp run on this host (any more)")
    from_outside(run).tell(injected_now(fault, job))
    try:
        send(pid, SIGNALS[fault.what])
        if fault.what == "pause":
            wait(fault.seconds)
    finally:  # also where somebody ends this command meanwhile
        if fault.what == "pause":
            send(pid, signal.SIGCONT)
    return f"done: {fault.what} to {fault.slot}, pid {pid}"


def inject_by(recipe: Recipe, run: Path, *, look: Look, wait: Wait) -> tuple[History, CampaignVerdict]:
    """All of a recipe; what the job has told until then, and what is to be said of the strikes."""
    job = job_of(run)
    drawn = {what for what, _ in recipe.random.deck()} if recipe.random.count else set[str]()
    slots = {fault.slot for fault in recipe.faults} - {ANY}
    _refuse(run, job, what={fault.what for fault in recipe.faults} | drawn, slots=slots)
    schedule = FaultSchedule(_from_now_on(recipe, job), named=f"attached-{time.time_ns()}-")
    injector = FaultInjector(run, schedule, Orders.of_a_running_job(orders_file(run)))
    try:
        state = _inject_until_over(injector, run, recipe.job.patience_s, look, wait)
    finally:  # whoever is interrupted leaves no orders behind, and nobody who sleeps
        injector.give_up()
    whole = History.of(read_run(run))
    return whole, judge_attached(injector.asked(state), whole)


def _inject_until_over(injector: FaultInjector, run: Path, patience_s: float, look: Look, wait: Wait) -> JobState:
    follower, state, history = Follower(run), JobState(), History()
    deadline = time.monotonic() + patience_s
    while not (state.ended or _is_over(injector, state, history)) and time.monotonic() < deadline:
        alone = nobody_is_left(state)
        news = follower.news()
        for told in news:
            state.hear(told)
            history.hear(told)
        look(state, news)
        if alone and not news:
            break
        injector.inject(state, history)
        wait(_LOOK_S)
    return state


def _is_over(injector: FaultInjector, job: JobState, history: History) -> bool:
    """Whether all has struck, and a step has been committed since by all who are left."""
    if not (job.slots and injector.is_done(history)):
        return False
    outcomes = judge_attached(injector.asked(job), history).outcomes
    return all(outcome.recovered_s is not None for outcome in outcomes if outcome.injected_at)


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
