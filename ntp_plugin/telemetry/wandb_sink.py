"""A job in Weights & Biases: one run for the whole job, whoever of it dies.

`ntp run` keeps it, not a rank, so that no rank's death ends it. The run has an id before the workers start, and they
are told it (`WANDB_RUN_ID`, `WANDB_RESUME`): a script that calls `wandb.init` for itself, as Megatron and DeepSpeed do,
writes into the same run, and so does the process that takes its place. Our numbers are `ntp/...` over an axis of their
own, `ntp/step`, which only grows: a step that is taken again is not told twice.

Where there is no network (`WANDB_MODE=offline`) everything is on disk, and `wandb sync` sends it later.
"""

import importlib
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ntp_plugin.telemetry.event_text import in_words
from ntp_plugin.telemetry.events import Began, Committed, Compared, Copied, CopyTrouble, Corrupted, Recovered, Restored
from ntp_plugin.telemetry.job_state import JobState
from ntp_plugin.telemetry.record import RecordedEvent

_REST_S = 600
"""Between two alerts of what every slot may tell, in each step."""
_COLUMNS = ("at", "step", "epoch", "event", "what")


def passed_to_workers(environment: Mapping[str, str], agreed: Callable[[str], str]) -> dict[str, str]:
    """What has every `wandb.init` of this job write into one run, on all hosts the one that is `agreed` on; the user's
    own choice of one stands."""
    run = environment.get("WANDB_RUN_ID") or agreed(f"ntp-{secrets.token_hex(4)}")
    return {"WANDB_RUN_ID": run, "WANDB_RESUME": environment.get("WANDB_RESUME", "allow")}


class WandbSink:
    """One run."""

    def __init__(
        self, project: str, folder: Path, environment: Mapping[str, str], *, said: Callable[[str], None]
    ) -> None:
        """`environment`: the workers'. The folder is for what wandb keeps on disk."""
        self._project, self._folder, self._environment, self._said = project, folder, environment, said
        self._wandb: Any = None
        self._run: Any = None
        self._rows: list[tuple[Any, ...]] = []

    def _open(self) -> None:
        """Not at once: it may wait for a server, and the job does not wait for it."""
        self._wandb = importlib.import_module("wandb")
        quiet = self._wandb.Settings(silent=True, console="off", x_disable_stats=True, **_shared(self._environment))
        run = self._environment["WANDB_RUN_ID"]
        self._run = self._wandb.init(
            project=self._project, id=run, resume="allow", dir=str(self._folder), settings=quiet
        )
        self._run.define_metric("ntp/step")
        self._run.define_metric("ntp/*", step_metric="ntp/step")
        self._said(f"wandb: {self._run.url or f'offline, in {self._run.dir}; wandb sync sends it'}")

    def hear(self, told: RecordedEvent, job: JobState, *, news: bool, again: bool) -> None:
        """Numbers of what is new, an alert and a row of the table for what somebody should hear of. What the run has
        already is for the table alone, which is told whole at the end."""
        if not news:
            return
        words = in_words(told)
        if words is not None:
            self._rows.append((told.at, job.step, job.epoch, type(told.event).__name__, ": ".join(words)))
        if again:
            return
        if self._run is None:
            self._open()
        if isinstance(told.event, Began):
            self._run.config.update({"ntp": _config(job)}, allow_val_change=True)
        numbers = _numbers(told, job)
        if numbers:
            self._run.log({"ntp/step": job.step, **numbers})
        if words is not None:
            rest_s = _REST_S if isinstance(told.event, CopyTrouble | Restored) else 0
            self._run.alert(f"ntp: {words[0]}", words[1], level=_level(self._wandb, told), wait_duration=rest_s)

    def close(self) -> None:
        """With the table of all that happened."""
        if self._run is None:
            return
        if self._rows:
            self._run.log({"ntp/events": self._wandb.Table(columns=list(_COLUMNS), data=[list(r) for r in self._rows])})
        self._run.finish()


def _shared(environment: Mapping[str, str]) -> dict[str, Any]:
    """Online, several processes may write into one run if all say so; offline each has a file of its own."""
    return {"mode": "shared", "x_label": "ntp"} if environment.get("WANDB_MODE") == "shared" else {}


def _config(job: JobState) -> dict[str, Any]:
    layout = {"replicas": job.replicas, "stages": job.stages, "tp": job.tp, "micro_batches": job.micro_batches}
    return {**layout, "settings": job.settings, "versions": job.versions}


def _numbers(told: RecordedEvent, job: JobState) -> dict[str, float]:
    match told.event:
        case Committed():
            layout = {f"ntp/width/r{number}": min(stages) for number, stages in enumerate(job.widths)}
            shares = {f"ntp/micro_batches/r{number}": share for number, share in enumerate(job.micro_batches)}
            losses = {f"ntp/loss/{name.replace(' ', '_')}": value for name, value in job.losses.items()}
            here = {"ntp/epoch": job.epoch, "ntp/step_s": job.step_s, "ntp/goodput": job.goodput}
            return {**here, **layout, **shares, **losses}
        case Recovered():
            phases = {f"ntp/recovery_s/{name}": seconds for name, seconds in told.event.phases.items()}
            return {"ntp/recovery_s": told.event.seconds, "ntp/recoveries": job.recoveries, **phases}
        case Copied():
            lag = max(0, job.step - told.event.step)
            return {"ntp/copies/lag_steps": lag, "ntp/copies/bytes": sum(job.copied_bytes.values())}
        case Compared():
            return {"ntp/digests/compared": told.event.values, "ntp/digests/odd": told.event.odd}
    return {}


def _level(wandb: Any, told: RecordedEvent) -> Any:
    return wandb.AlertLevel.ERROR if isinstance(told.event, Corrupted) else wandb.AlertLevel.WARN
