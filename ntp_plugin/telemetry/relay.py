"""The process that follows the record of a run and hands every event to the sinks.

    python -m ntp_plugin.telemetry.relay FOLDER [--wandb PROJECT] [--prometheus PORT]

`ntp run` starts it, and ends it by closing its standard input, on purpose or by dying. The relay then hands over all
events recorded so far, and closes the sinks. It is a separate process because a supervisor must neither wait for a sink
nor share Python's lock with one. If a sink fails (its server is away, its disk is full), the relay reports it in one
line and drops the sink; the other sinks and the job are not affected.

The folder of the run stores how far the relay has come. If its host is lost, the machine that takes over starts another
relay. That one reads all events from the beginning, to rebuild the state of the job, and hands over only newer ones.
"""

import argparse
import contextlib
import functools
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ntp_plugin.telemetry.job_state import JobState
from ntp_plugin.telemetry.prometheus_sink import PrometheusSink
from ntp_plugin.telemetry.record import Follower, RecordedEvent
from ntp_plugin.telemetry.wandb_sink import WandbSink

EVERY_S = 0.5


class Sink(Protocol):
    """Receives the events of a job."""

    def receive(self, entry: RecordedEvent, job: JobState, *, news: bool, again: bool) -> None:
        """Receive one event, and the state of the job after it. `news`: no other process has recorded the same before.
        `again`: an earlier relay has handed it over already."""

    def close(self) -> None:
        """Called when the job is over, or is no longer followed."""


class Relay:
    """Hands the events of one record to sinks."""

    def __init__(
        self, follower: Follower, sinks: Sequence[Sink], *, position_file: Path, log: Callable[[str], None]
    ) -> None:
        """`come_to`: the file that stores how far the relay has come."""
        self._follower, self._sinks, self._log, self._position_file = follower, list(sinks), log, position_file
        self._job, self._all_hear = JobState(), True
        self._hand_over(follower.news(until=_read_position(position_file)), again=True)

    def hand_over(self) -> None:
        """Hand over the events recorded since the last call."""
        news = self._follower.news()
        self._hand_over(news, again=False)
        if news and self._all_hear:
            _write_position(self._position_file, self._follower.position)

    def _hand_over(self, news: Sequence[RecordedEvent], *, again: bool) -> None:
        for entry in news:
            new = self._job.receive(entry)
            for sink in tuple(self._sinks):
                self._guarded(sink, functools.partial(sink.receive, entry, self._job, news=new, again=again))

    def close(self) -> None:
        """Close all sinks."""
        if self._follower.malformed:
            self._log(f"{self._follower.malformed} malformed lines of the record skipped")
        for sink in tuple(self._sinks):
            self._guarded(sink, sink.close)

    def _guarded(self, sink: Sink, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # whatever a sink's library raises; the training goes on without the sink
            self._sinks.remove(sink)
            self._all_hear = False  # so that the next relay begins with the events that this sink has missed
            self._log(f"{type(sink).__name__} failed and is dropped: {type(error).__name__}: {error}")


def _read_position(file: Path) -> dict[str, int]:
    """The stored position; empty if no relay ran before."""
    try:
        return {str(name): max(0, int(read)) for name, read in json.loads(file.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write_position(file: Path, position: Mapping[str, int]) -> None:
    """Replace the file atomically: its reader starts after this process has died."""
    whole = file.with_suffix(".new")
    with contextlib.suppress(OSError):  # the record itself reports a full disk
        whole.write_text(json.dumps(position))
        whole.replace(file)


def main(words: Sequence[str]) -> None:
    """Relay events until the process that started this one closes the pipe."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wandb", default="")
    parser.add_argument("--prometheus", type=int)
    asked = parser.parse_args(words)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the job, which then closes the pipe
    sinks: list[Sink] = []
    if asked.prometheus is not None:
        sinks.append(PrometheusSink(asked.prometheus))
    if asked.wandb:
        sinks.append(WandbSink(asked.wandb, asked.folder, os.environ, log=_say))
    relay = Relay(Follower(asked.folder), sinks, position_file=asked.folder / "handed-over.json", log=_say)
    relay.hand_over()
    for page in sinks:
        if isinstance(page, PrometheusSink):
            _say(f"Prometheus metrics are at {page.address}")
    while not select.select([sys.stdin], [], [], EVERY_S)[0]:
        relay.hand_over()
    relay.hand_over()
    relay.close()


def _say(message: str) -> None:
    sys.stdout.write(f"ntp run: {message}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
