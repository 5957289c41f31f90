"""Follows the record of a run in a process of its own, and hands every event to the sinks.

    python -m ntp_plugin.telemetry.relay FOLDER [--wandb PROJECT] [--prometheus PORT]

`ntp run` starts it, and ends it by closing its standard input, on purpose or by dying: then it hands over what was told
until now, and closes the sinks. It is a process because who watches over workers must not wait for a sink, nor share
Python's lock with one. A sink may fail: its server is away, its disk is full. Then that is said in one line, and it is
left out from there on; neither the other sinks nor the job see anything of it.

How far it has come is in the folder of the run. Where its host is lost, the machine that takes the place starts another
one, which hears all from the beginning, to know what the job is like, and tells only what is behind that.
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
    """Whoever wants to hear of a job."""

    def hear(self, told: RecordedEvent, job: JobState, *, news: bool, again: bool) -> None:
        """One event, and what the job is like after it. `news`: nobody else had said the same before. `again`: another
        relay has handed it over already."""

    def close(self) -> None:
        """The job is over, or will not be followed any more."""


class Relay:
    """From one record to some sinks."""

    def __init__(
        self, follower: Follower, sinks: Sequence[Sink], *, come_to: Path, said: Callable[[str], None]
    ) -> None:
        """`come_to`: the file for how far it has come."""
        self._follower, self._sinks, self._said, self._come_to = follower, list(sinks), said, come_to
        self._job, self._all_hear = JobState(), True
        self._hand_over(follower.news(until=_read_position(come_to)), again=True)

    def hand_over(self) -> None:
        """What was told since the last time."""
        news = self._follower.news()
        self._hand_over(news, again=False)
        if news and self._all_hear:
            _write_position(self._come_to, self._follower.position)

    def _hand_over(self, news: Sequence[RecordedEvent], *, again: bool) -> None:
        for told in news:
            new = self._job.hear(told)
            for sink in tuple(self._sinks):
                self._guarded(sink, functools.partial(sink.hear, told, self._job, news=new, again=again))

    def close(self) -> None:
        """All sinks."""
        if self._follower.senseless:
            self._said(f"{self._follower.senseless} lines of the record made no sense, and were passed over")
        for sink in tuple(self._sinks):
            self._guarded(sink, sink.close)

    def _guarded(self, sink: Sink, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # whatever a sink's library raises; the training goes on without the sink
            self._sinks.remove(sink)
            self._all_hear = False  # so that another one begins with what this sink has missed
            self._said(f"{type(sink).__name__} failed and hears no more of this job: {type(error).__name__}: {error}")


def _read_position(file: Path) -> dict[str, int]:
    """Empty where nobody was here before."""
    try:
        return {str(name): max(0, int(read)) for name, read in json.loads(file.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write_position(file: Path, position: Mapping[str, int]) -> None:
    """At once, or not at all: who reads it comes after this process has died."""
    whole = file.with_suffix(".new")
    with contextlib.suppress(OSError):  # of a full disk the record itself tells
        whole.write_text(json.dumps(position))
        whole.replace(file)


def main(words: Sequence[str]) -> None:
    """Until the one who has started this closes the pipe."""
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
        sinks.append(WandbSink(asked.wandb, asked.folder, os.environ, said=_say))
    relay = Relay(Follower(asked.folder), sinks, come_to=asked.folder / "handed-over.json", said=_say)
    relay.hand_over()
    for page in sinks:
        if isinstance(page, PrometheusSink):
            _say(f"numbers for Prometheus are at {page.address}")
    while not select.select([sys.stdin], [], [], EVERY_S)[0]:
        relay.hand_over()
    relay.hand_over()
    relay.close()


def _say(what: str) -> None:
    sys.stdout.write(f"ntp run: {what}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
