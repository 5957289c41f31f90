"""Runs a recipe: the job and its strikes, then the same job left alone.

Everything of a campaign is in one folder: `broken/` and `reference/` hold the record and the log of each run, and what
was found is beside them. A run that is not over in the recipe's patience is ended, and taken for hung.
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
"""For workers whose `ntp run` was killed: they have to notice by themselves."""

type Look = Callable[[JobState, list[RecordedEvent]], None]
"""Shows a run to whoever looks on, with what is new."""
type Looking = Callable[[str], contextlib.AbstractContextManager[Look]]
"""Makes one for a run, by its name: broken or reference run."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CampaignRun:
    """One run, when it was over."""

    folder: Path
    end: End
    history: History
    asked: RequestedFaults

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Campaign:
    """Both runs, and what is to be said of them."""

    recipe: Recipe
    broken: CampaignRun
    reference: CampaignRun | None
    verdict: CampaignVerdict


def run_campaign(
    recipe: Recipe, folder: Path, *, look: Looking, reference: Path | None = None, wait: Wait = time.sleep
) -> Campaign:
    """`look` is asked for a view of each run, by its name; `reference` is one that has run already."""
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
    """A `Looking` for runs that nobody looks on at."""
    yield lambda _job, _news: None


def run_undisturbed(job: JobSpec, folder: Path) -> CampaignRun:
    """As a reference run is run, and nobody looks on."""
    with quietly("reference") as look:
        return _run(job, folder, None, look, time.sleep)


def verdict_on(job: JobSpec, broken: CampaignRun, reference: CampaignRun | None) -> CampaignVerdict:
    """By what both runs have told."""
    expected = Expected(
        code=job.code,
        returns=job.returns,
        troubles=job.troubles,
        bound=job.bound,
        weights_bound=job.weights_bound,
    )
    if reference is not None and (reference.end.hung or reference.end.code):
        how = "was not over in time" if reference.end.hung else f"ended with code {reference.end.code}"
        raise Refused(f"the reference run, which nobody has broken, {how}", way_out=f"see {reference.log}")
    calm = None if reference is None else reference.history
    return judge(broken.asked, broken.history, calm, broken.end, expected)


def _ran_before(folder: Path) -> CampaignRun:
    history = History.of(read_run(folder))
    if not history.ended:
        raise ConfigError(
            f"{folder} holds no run that came to its end", way_out="name the reference/ of another campaign"
        )
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
            for told in news:
                state.hear(told)
                history.hear(told)
            if injector is not None and not over:
                injector.inject(state, history, running)
            shown(state, news)
            hung = time.monotonic() > deadline
            if over or hung:
                break
            wait(_LOOK_S)
        code = running.code if over else 0
        left = _left_behind(folder) if over else ()  # while the machines are there that they would be left on
    left = left if over else _left_behind(folder)
    whole = History.of(Follower(folder).news())
    return CampaignRun(
        folder=folder,
        end=End(code=code, hung=not over, left=left),
        history=whole,
        asked=RequestedFaults() if injector is None else injector.asked(state),
    )


def _left_behind(folder: Path) -> tuple[int, ...]:
    """Workers that are still there some time after their `ntp run`; they are ended."""
    deadline = time.monotonic() + _LEAVE_S
    pids = {said.event.pid for said in History.of(Follower(folder).news()).began}
    while (left := sorted(pid for pid in pids if is_worker(pid))) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    for pid in left:
        send(pid, signal.SIGKILL)
    return tuple(left)
