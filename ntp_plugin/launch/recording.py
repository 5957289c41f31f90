"""Writes the record of a run, and starts the relay that forwards it to Weights & Biases and Prometheus.

Each host writes its own part of the record. In a folder that all hosts share, a reader finds all parts. The first host
runs the relay. Nothing listens but the page for Prometheus, on loopback.
"""

import dataclasses
import importlib.util
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from ntp_plugin.errors import ConfigError
from ntp_plugin.launch.records import new_record
from ntp_plugin.launch.run_folder import RunFolder
from ntp_plugin.telemetry import Event, EventWriter, events_file
from ntp_plugin.telemetry.wandb_sink import passed_to_workers

_PATIENCE_S = 60.0
"""How long the relay may take to finish after the job."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecordingOptions:
    """The flags of `ntp run` about its record. It raises `ConfigError` where they contradict each other."""

    folder: Path | None = None
    """The folder of the record; None: one among the temporary files of each host."""
    record: bool = True
    """Whether to keep a record where no folder is given."""
    wandb: str = ""
    """A project of Weights & Biases; none where empty."""
    prometheus: int | None = None
    """The port of the page for Prometheus."""

    def __post_init__(self) -> None:
        if self.folder is None and (self.wandb or self.prometheus is not None):
            flag = "--ntp-wandb" if self.wandb else "--ntp-prometheus"
            raise ConfigError(f"{flag} needs a folder for the record", fix="name one by --ntp-run-dir")
        for asked, module, extra in (
            (self.wandb, "wandb", "wandb"),
            (self.prometheus is not None, "prometheus_client", "prometheus"),
        ):
            if asked and importlib.util.find_spec(module) is None:
                raise ConfigError(f"{module} is not installed", fix=f"pip install 'ntp-plugin[{extra}]'")
        if self.prometheus is not None:
            _refuse_taken(self.prometheus)

    def begin(
        self,
        environment: Mapping[str, str],
        *,
        host: int,
        founds: bool,
        agreed: Callable[[str], str],
        log: Callable[[str], None],
    ) -> "Underway":
        """Begin the record, before the workers start.

        Args:
            environment: The environment of the workers.
            host: The number of this host in the job.
            founds: Whether this host founds the job. A replacement appends to the record of the host that it replaces.
            agreed: Returns the value that all hosts agree on, given the one that this host proposes.
            log: Called with a log line.
        """
        own = new_record(log) if self.folder is None and self.record else None
        folder = own.path if own is not None else self.folder
        if folder is None:
            return Underway(events=None, own=None, host=host, passed_to_workers={}, relay=None, log=log)
        events = _record(folder, host, is_new=founds)
        variables = {"NTP_EVENTS": str(events)} | (passed_to_workers(environment, agreed) if self.wandb else {})
        relay = self._relay(folder, {**environment, **variables}) if host == 0 else None
        return Underway(events=events, own=own, host=host, passed_to_workers=variables, relay=relay, log=log)

    def _relay(self, folder: Path, environment: Mapping[str, str]) -> "subprocess.Popen[bytes] | None":
        sinks: list[str] = []
        if self.wandb:
            sinks += ["--wandb", self.wandb]
        if self.prometheus is not None:
            sinks += ["--prometheus", str(self.prometheus)]
        if not sinks:
            return None
        words = [sys.executable, "-m", "ntp_plugin.telemetry.relay", str(folder), *sinks]
        return subprocess.Popen(words, stdin=subprocess.PIPE, env=dict(environment))


class Underway:
    """The record of a running job."""

    def __init__(
        self,
        *,
        events: Path | None,
        own: RunFolder | None,
        host: int,
        passed_to_workers: Mapping[str, str],
        relay: "subprocess.Popen[bytes] | None",
        log: Callable[[str], None],
    ) -> None:
        self.passed_to_workers = passed_to_workers
        self._event_writer, self._relay, self._log = EventWriter(events, f"host{host}"), relay, log
        self._events, self._own = events, own

    def write(self, event: Event) -> None:
        """Write an event that the supervisor of this host has seen."""
        self._event_writer.write(event)

    def end(self) -> None:
        """Close the record and the relay, once the job is over on this host."""
        self._event_writer.close()
        self._end_relay()
        if self._own is not None and self._events is not None:
            if self._events.exists() and not self._events.stat().st_size:  # the script does not use the plugin
                self._own.remove()
            else:  # also where the temporary files were cleared meanwhile
                self._own.leave()

    def _end_relay(self) -> None:
        if self._relay is None:
            return
        assert self._relay.stdin is not None, "it was made with a pipe"
        self._relay.stdin.close()
        try:
            self._relay.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._relay.kill()
            self._relay.wait()
            self._log(f"the relay to W&B and Prometheus did not finish within {_PATIENCE_S:g} s, and was killed")


def _record(folder: Path, host: int, *, is_new: bool) -> Path:
    events = events_file(folder, host).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = events.exists() and events.stat().st_size
        events.touch()
    except OSError as error:
        raise ConfigError(f"--ntp-run-dir {folder} cannot be written to: {error.strerror}") from None
    if taken and is_new:
        raise ConfigError(f"{events} holds the record of another run", fix="name another folder, or remove this one")
    return events


def _refuse_taken(port: int) -> None:
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    except OSError as error:
        raise ConfigError(
            f"--ntp-prometheus {port}: cannot listen on 127.0.0.1:{port}: {error.strerror}",
            fix="choose another port",
        ) from None
