"""Sink for Weights & Biases: one run for the whole job, whichever of its ranks die.

`ntp run` owns the wandb run, not a rank, so that no rank's death ends it. The run has an id before the workers start,
and they inherit it (`WANDB_RUN_ID`, `WANDB_RESUME`): a script that calls `wandb.init` itself, as Megatron and DeepSpeed
do, writes into the same run, and so does the process that replaces it. The plugin's metrics are `ntp/...` over their
own axis `ntp/step`, which only grows: a repeated step is not logged twice.

Without a network (`WANDB_MODE=offline`) everything is stored on disk, and `wandb sync` uploads it later.
"""

import importlib
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ntp_plugin.telemetry.event_text import described
from ntp_plugin.telemetry.events import Began, Committed, Compared, Copied, CopyTrouble, Corrupted, Recovered, Restored
from ntp_plugin.telemetry.job_state import JobState
from ntp_plugin.telemetry.record import RecordedEvent

_REST_S = 600
"""Least time between two alerts of a kind that every slot may raise in each step."""
_COLUMNS = ("at", "step", "epoch", "event", "what")


def passed_to_workers(environment: Mapping[str, str], agreed: Callable[[str], str]) -> dict[str, str]:
    """Environment variables that make every `wandb.init` of this job write into one run. All hosts use the run that is
    `agreed` on; a run id that the user has set takes precedence."""
    run = environment.get("WANDB_RUN_ID") or agreed(f"ntp-{secrets.token_hex(4)}")
    return {"WANDB_RUN_ID": run, "WANDB_RESUME": environment.get("WANDB_RESUME", "allow")}


class WandbSink:
    """Writes one wandb run."""

    def __init__(
        self, project: str, folder: Path, environment: Mapping[str, str], *, log: Callable[[str], None]
    ) -> None:
        """`environment`: that of the workers. `folder`: where wandb keeps its files."""
        self._project, self._folder, self._environment, self._log = project, folder, environment, log
        self._wandb: Any = None
        self._run: Any = None
        self._rows: list[tuple[Any, ...]] = []

    def _open(self) -> None:
        """Called late, because it may wait for a server, and the job must not wait for that."""
        self._wandb = importlib.import_module("wandb")
        quiet = self._wandb.Settings(silent=True, console="off", x_disable_stats=True, **_shared(self._environment))
        run = self._environment["WANDB_RUN_ID"]
        self._run = self._wandb.init(
            project=self._project, id=run, resume="allow", dir=str(self._folder), settings=quiet
        )
        self._run.define_metric("ntp/step")
        self._run.define_metric("ntp/*", step_metric="ntp/step")
        self._log(f"wandb: {self._run.url or f'offline, in {self._run.dir}; wandb sync sends it'}")

    def receive(self, entry: RecordedEvent, job: JobState, *, news: bool, again: bool) -> None:
        """Log metrics of new events; alert on those that need attention, and add them to the table. Events that the run
        has already (`again`) only go into the table, which is logged whole at the end."""
        if not news:
            return
        words = described(entry)
        if words is not None:
            self._rows.append((entry.at, job.step, job.epoch, type(entry.event).__name__, ": ".join(words)))
        if again:
            return
        if self._run is None:
            self._open()
        if isinstance(entry.event, Began):
            self._run.config.update({"ntp": _config(job)}, allow_val_change=True)
        numbers = _numbers(entry, job)
        if numbers:
            self._run.log({"ntp/step": job.step, **numbers})
        if words is not None:
            rest_s = _REST_S if isinstance(entry.event, CopyTrouble | Restored) else 0
            self._run.alert(f"ntp: {words[0]}", words[1], level=_level(self._wandb, entry), wait_duration=rest_s)

    def close(self) -> None:
        """Log the table of events and finish the run."""
        if self._run is None:
            return
        if self._rows:
            self._run.log({"ntp/events": self._wandb.Table(columns=list(_COLUMNS), data=[list(r) for r in self._rows])})
        self._run.finish()


def _shared(environment: Mapping[str, str]) -> dict[str, Any]:
    """Settings for a shared run: online, several processes may write into one; offline each has its own file."""
    return {"mode": "shared", "x_label": "ntp"} if environment.get("WANDB_MODE") == "shared" else {}


def _config(job: JobState) -> dict[str, Any]:
    layout = {"replicas": job.replicas, "stages": job.stages, "tp": job.tp, "micro_batches": job.micro_batches}
    return {**layout, "settings": job.settings, "versions": job.versions}


def _numbers(entry: RecordedEvent, job: JobState) -> dict[str, float]:
    match entry.event:
        case Committed():
            layout = {f"ntp/width/r{number}": min(stages) for number, stages in enumerate(job.widths)}
            shares = {f"ntp/micro_batches/r{number}": share for number, share in enumerate(job.micro_batches)}
            losses = {f"ntp/loss/{name.replace(' ', '_')}": value for name, value in job.losses.items()}
            here = {"ntp/epoch": job.epoch, "ntp/step_s": job.step_s, "ntp/goodput": job.goodput}
            return {**here, **layout, **shares, **losses}
        case Recovered():
            phases = {f"ntp/recovery_s/{name}": seconds for name, seconds in entry.event.phases.items()}
            return {"ntp/recovery_s": entry.event.seconds, "ntp/recoveries": job.recoveries, **phases}
        case Copied():
            lag = max(0, job.step - entry.event.step)
            return {"ntp/copies/lag_steps": lag, "ntp/copies/bytes": sum(job.copied_bytes.values())}
        case Compared():
            return {"ntp/digests/compared": entry.event.values, "ntp/digests/odd": entry.event.odd}
    return {}


def _level(wandb: Any, entry: RecordedEvent) -> Any:
    return wandb.AlertLevel.ERROR if isinstance(entry.event, Corrupted) else wandb.AlertLevel.WARN
