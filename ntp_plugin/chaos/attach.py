"""Inject faults into a job that already runs, from another terminal of its owner: one fault, or a whole recipe.

The job must obey orders (`ntp run --ntp-chaos`), and the caller must be able to read its token. This holds for signals
too, although only the record says which process has the slot. A signal goes to workers of `ntp run` only, and every
fault is recorded before it is injected.

A recipe's steps, seconds and epochs count from now. The recipe is over when all its faults are injected and the job has
gone on; the job itself does not end, and there is no reference run.
"""

import dataclasses
import signal
import time
from pathlib import Path

from ntp_plugin.chaos.campaign import Look
from ntp_plugin.chaos.ending import Wait
from ntp_plugin.chaos.fault_injector import SIGNALS, FaultInjector, from_outside, injected_now, is_worker, send
from ntp_plugin.chaos.faults import INJECTED_BY_WORKER, OrderedFault, Orders, orders_file
from ntp_plugin.chaos.history import History
from ntp_plugin.chaos.recipe import ANY, Recipe
from ntp_plugin.chaos.schedule import FaultSchedule
from ntp_plugin.chaos.verdict import CampaignVerdict, judge_attached
from ntp_plugin.errors import ConfigError
from ntp_plugin.telemetry import Follower, read_run
from ntp_plugin.telemetry.job_state import JobState
from ntp_plugin.telemetry.whereabouts import all_have_ended

_LOOK_S = 0.05


def inject_now(run: Path, fault: OrderedFault, *, wait: Wait) -> str:
    """Order a fault or inject it now; return one line that says what was done."""
    job = job_of(run)
    _refuse(run, job, what={fault.what}, slots={fault.slot})
    orders = Orders.of_a_running_job(orders_file(run))
    if fault.what in INJECTED_BY_WORKER:
        orders.give(fault)
        return f"ordered: {fault.what} on {fault.slot}, {fault.during or 'at its next fault point'}"
    pid = job.pids.get(fault.slot)
    if pid is None:
        raise ConfigError(f"{fault.slot} is lost, and no process has taken its place")
    if not is_worker(pid):
        raise ConfigError(f"{fault.slot}: process {pid} is no worker of ntp run on this host (any more)")
    from_outside(run).write(injected_now(fault, job))
    try:
        send(pid, SIGNALS[fault.what])
        if fault.what == "pause":
            wait(fault.seconds)
    finally:  # also if this command is interrupted meanwhile
        if fault.what == "pause":
            send(pid, signal.SIGCONT)
    return f"done: {fault.what} to {fault.slot}, pid {pid}"


def inject_by(recipe: Recipe, run: Path, *, look: Look, wait: Wait) -> tuple[History, CampaignVerdict]:
    """Inject all faults of a recipe; return the history of the job until then, and the verdict on the faults."""
    job = job_of(run)
    drawn = {what for what, _ in recipe.random.deck()} if recipe.random.count else set[str]()
    slots = {fault.slot for fault in recipe.faults} - {ANY}
    _refuse(run, job, what={fault.what for fault in recipe.faults} | drawn, slots=slots)
    schedule = FaultSchedule(_from_now_on(recipe, job), named=f"attached-{time.time_ns()}-")
    injector = FaultInjector(run, schedule, Orders.of_a_running_job(orders_file(run)))
    try:
        state = _inject_until_over(injector, run, recipe.job.patience_s, look, wait)
    finally:  # an interrupted command leaves no orders behind, and no paused process
        injector.give_up()
    history = History.of(read_run(run))
    return history, judge_attached(injector.asked(state), history)


def _inject_until_over(injector: FaultInjector, run: Path, patience_s: float, look: Look, wait: Wait) -> JobState:
    follower, state, history = Follower(run), JobState(), History()
    deadline = time.monotonic() + patience_s
    while not (state.ended or _is_over(injector, state, history)) and time.monotonic() < deadline:
        no_process_left = all_have_ended(state)
        news = follower.news()
        for recorded in news:
            state.receive(recorded)
            history.receive(recorded)
        look(state, news)
        if no_process_left and not news:
            break
        injector.inject(state, history)
        wait(_LOOK_S)
    return state


def _is_over(injector: FaultInjector, job: JobState, history: History) -> bool:
    """Return whether all faults are injected, and all surviving ranks have committed a step since."""
    if not (job.slots and injector.is_done(history)):
        return False
    outcomes = judge_attached(injector.asked(job), history).outcomes
    return all(outcome.recovered_s is not None for outcome in outcomes if outcome.injected_at)


def _refuse(run: Path, job: JobState, *, what: set[str], slots: set[str]) -> None:
    """Raise `ConfigError` for kinds or slots that this job does not have."""
    others = what - INJECTED_BY_WORKER.keys() - SIGNALS.keys()
    if others:
        raise ConfigError(
            f"{min(others)} is for jobs that a recipe starts: the record does not say what runs where",
            fix="kill the ntp run, or take down the host or its link, by hand",
        )
    if not slots <= job.slots.keys():
        there = ", ".join(sorted(job.slots)) or "none: training has not begun"
        raise ConfigError(f"{run}: there is no slot {min(slots - job.slots.keys())}", fix=f"slots: {there}")


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
    """Return the state of a job, from its record."""
    job = JobState()
    for recorded in read_run(run):
        job.receive(recorded)
    return job
