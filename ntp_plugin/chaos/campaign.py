"""Run a recipe: the job with its faults, then the same job without faults as the reference run.

A campaign writes to one folder: `broken/` and `reference/` hold the record and the log of each run, and the report is
beside them. A run that takes longer than the recipe's `patience_s` is ended, and counts as hung.
"""

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ntp_plugin.chaos.ending import Wait
from ntp_plugin.chaos.fault_injector import FaultInjector, is_worker, send
from ntp_plugin.chaos.faults import RequestedFaults
from ntp_plugin.chaos.history import History
from ntp_plugin.chaos.hosting import started
from ntp_plugin.chaos.recipe import JobSpec, Recipe
from ntp_plugin.chaos.schedule import FaultSchedule
from ntp_plugin.chaos.verdict import CampaignVerdict, End, Expected, judge
from ntp_plugin.errors import ConfigError, Refused
from ntp_plugin.output_folders import require_new
from ntp_plugin.telemetry import Follower, read_run
from ntp_plugin.telemetry.job_state import JobState
from ntp_plugin.telemetry.record import RecordedEvent

_LOOK_S = 0.05
_LEAVE_S = 15.0
"""Time for workers whose `ntp run` was killed to notice that and end."""

type Look = Callable[[JobState, list[RecordedEvent]], None]
"""Callback that shows the state of a run and its new events."""
type Looking = Callable[[str], contextlib.AbstractContextManager[Look]]
"""Makes the callback for a run, by the run's name: `broken` or `reference`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CampaignRun:
    """One finished run."""

    folder: Path
    end: End
    history: History
    asked: RequestedFaults

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Campaign:
    """Both runs, and the verdict."""

    recipe: Recipe
    broken: CampaignRun
    reference: CampaignRun | None
    verdict: CampaignVerdict


def run_campaign(
    recipe: Recipe, folder: Path, *, look: Looking, reference: Path | None = None, wait: Wait = time.sleep
) -> Campaign:
    """Run a recipe in a new folder. `look` makes the view of each run; `reference`: the folder of an existing run."""
    require_new(folder, "--out")
    calm = None if reference is None else _ran_before(reference)
    with look("broken") as shown:
        broken = _run(recipe.job, folder / "broken", FaultSchedule(recipe), shown, wait)
    if calm is None and recipe.job.reference:
        with look("reference") as shown:
            calm = _run(recipe.job, folder / "reference", None, shown, wait)
    return Campaign(recipe=recipe, broken=broken, reference=calm, verdict=verdict_on(recipe.job, broken, calm))


@contextlib.contextmanager
def quietly(_: str) -> Iterator[Look]:
    """A `Looking` that shows nothing."""
    yield lambda _job, _news: None


def run_undisturbed(job: JobSpec, folder: Path) -> CampaignRun:
    """Run a job without faults, as a reference run, and show nothing."""
    with quietly("reference") as look:
        return _run(job, folder, None, look, time.sleep)


def verdict_on(job: JobSpec, broken: CampaignRun, reference: CampaignRun | None) -> CampaignVerdict:
    """Judge a run against its reference run, from both records."""
    expected = Expected(
        code=job.code,
        returns=job.returns,
        troubles=job.troubles,
        bound=job.bound,
        weights_bound=job.weights_bound,
    )
    if reference is not None and (reference.end.hung or reference.end.code):
        how = "was not over in time" if reference.end.hung else f"ended with code {reference.end.code}"
        raise Refused(f"the reference run, which has no faults, {how}", fix=f"see {reference.log}")
    calm = None if reference is None else reference.history
    return judge(broken.asked, broken.history, calm, broken.end, expected)


def _ran_before(folder: Path) -> CampaignRun:
    history = History.of(read_run(folder))
    if not history.ended:
        raise ConfigError(f"{folder} holds no run that ended well", fix="name the reference/ of another campaign")
    return CampaignRun(folder=folder, end=End(code=0), history=history, asked=RequestedFaults())


# ---------------------------------------------------------------- one run


def _run(job: JobSpec, folder: Path, schedule: FaultSchedule | None, shown: Look, wait: Wait) -> CampaignRun:
    folder.mkdir(parents=True)
    injector = None if schedule is None else FaultInjector(folder, schedule)
    follower, state, history = Follower(folder), JobState(), History()
    deadline = time.monotonic() + job.patience_s
    with started(job, folder, broken=injector is not None) as running:
        while True:
            over = running.is_over
            news = follower.news()
            for recorded in news:
                state.receive(recorded)
                history.receive(recorded)
            if injector is not None and not over:
                injector.inject(state, history, running)
            shown(state, news)
            hung = time.monotonic() > deadline
            if over or hung:
                break
            wait(_LOOK_S)
        code = running.code if over else 0
        left = _left_behind(folder) if over else ()  # before the emulated machines are removed
    left = left if over else _left_behind(folder)
    final = History.of(Follower(folder).news())
    return CampaignRun(
        folder=folder,
        end=End(code=code, hung=not over, left=left),
        history=final,
        asked=RequestedFaults() if injector is None else injector.asked(state),
    )


def _left_behind(folder: Path) -> tuple[int, ...]:
    """Kill workers that outlive their `ntp run`, and return their pids."""
    deadline = time.monotonic() + _LEAVE_S
    pids = {began.event.pid for began in History.of(Follower(folder).news()).began}
    while (left := sorted(pid for pid in pids if is_worker(pid))) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    for pid in left:
        send(pid, signal.SIGKILL)
    return tuple(left)
