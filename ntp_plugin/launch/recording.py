"""What `ntp run` tells of its job, and to whom: the folder of the run, and the relay to the sinks that follow it.

Each host keeps its own part of the record; where the folder is one that all hosts share, a reader has all of it. The
first host has the sinks. Nothing listens but the page for Prometheus, on loopback.
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
from ntp_plugin.telemetry import Event, Teller, events_file
from ntp_plugin.telemetry.wandb_sink import passed_to_workers

_PATIENCE_S = 60.0
"""For the sinks to come to an end, after the job."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecordingOptions:
    """What was asked for."""

    folder: Path | None = None
    """For the record; None: among the temporary files of each host."""
    record: bool = True
    """Whether to keep one."""
    wandb: str = ""
    """A project; none where empty."""
    prometheus: int | None = None
    """A port."""

    def __post_init__(self) -> None:
        if self.folder is None and (self.wandb or self.prometheus is not None):
            flag = "--ntp-wandb" if self.wandb else "--ntp-prometheus"
            raise ConfigError(f"{flag} follows the record of a run", way_out="name a folder for it: --ntp-run-dir")
        for asked, module, extra in (
            (self.wandb, "wandb", "wandb"),
            (self.prometheus is not None, "prometheus_client", "prometheus"),
        ):
            if asked and importlib.util.find_spec(module) is None:
                raise ConfigError(f"{module} is not installed", way_out=f"pip install 'ntp-plugin[{extra}]'")
        if self.prometheus is not None:
            _refuse_taken(self.prometheus)

    def begin(
        self,
        environment: Mapping[str, str],
        *,
        host: int,
        founds: bool,
        agreed: Callable[[str], str],
        said: Callable[[str], None],
    ) -> "Underway":
        """Before the workers start. A machine that takes a lost host's place goes on with the record that one has left,
        where it has it; `agreed` says which of the runs that hosts propose is the job's."""
        own = new_record(said) if self.folder is None and self.record else None
        folder = own.path if own is not None else self.folder
        if folder is None:
            return Underway(events=None, own=None, host=host, passed_to_workers={}, relay=None, said=said)
        events = _record(folder, host, is_new=founds)
        told = {"NTP_EVENTS": str(events)} | (passed_to_workers(environment, agreed) if self.wandb else {})
        relay = self._relay(folder, {**environment, **told}) if host == 0 else None
        return Underway(events=events, own=own, host=host, passed_to_workers=told, relay=relay, said=said)

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
    """What is told while the job runs."""

    def __init__(
        self,
        *,
        events: Path | None,
        own: RunFolder | None,
        host: int,
        passed_to_workers: Mapping[str, str],
        relay: "subprocess.Popen[bytes] | None",
        said: Callable[[str], None],
    ) -> None:
        self.passed_to_workers = passed_to_workers
        self._teller, self._relay, self._said = Teller(events, f"host{host}"), relay, said
        self._events, self._own = events, own

    def tell(self, event: Event) -> None:
        """Something that the supervisor of this host has seen."""
        self._teller.tell(event)

    def end(self) -> None:
        """The job is over here."""
        self._teller.close()
        self._end_relay()
        if self._own is not None and self._events is not None:
            if self._events.exists() and not self._events.stat().st_size:  # by a script that knows nothing of us
                self._own.remove()
            else:  # also where somebody has cleared the temporary files meanwhile
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
            self._said(f"the sinks did not come to an end within {_PATIENCE_S:g} s, and were ended")


def _record(folder: Path, host: int, *, is_new: bool) -> Path:
    events = events_file(folder, host).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = events.exists() and events.stat().st_size
        events.touch()
    except OSError as error:
        raise ConfigError(f"--ntp-run-dir {folder} cannot be written to: {error.strerror}") from None
    if taken and is_new:
        raise ConfigError(
            f"{events} holds the record of another run", way_out="name another folder, or remove this one"
        )
    return events


def _refuse_taken(port: int) -> None:
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    except OSError as error:
        raise ConfigError(
            f"--ntp-prometheus {port}: 127.0.0.1:{port} cannot be listened at: {error.strerror}",
            way_out="choose another port",
        ) from None
