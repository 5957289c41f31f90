"""The record of a job: one file, one line of JSON for each event, and a folder for what belongs to one run.

Every process of a host appends to the same file, and a line is one write, so that lines of several processes do not mix
(on a local disk; each host has a file of its own). A process that is killed has told what it told. A reader follows the
files while the job runs, or reads them afterwards; a line that makes no sense is counted and passed over, because who
looks on must not be stopped by what somebody else has written there.
"""

import dataclasses
import json
import logging
import os
import time
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ntp_plugin.errors import ConfigError
from ntp_plugin.telemetry.events import KINDS, Began, Committed, Copied, Event

_LOG = logging.getLogger(__name__)
_NAME = "events.jsonl"
_ROUTINE = (Committed, Copied)
_MOST = 1 << 63
"""A number in a line is below it: what has more digits would overflow in whoever counts with it."""
_MOST_BYTES = 2 << 30
"""Of a file: beyond it what happens in every step is told no more, and all else still is."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecordedEvent:
    """An entry of the record."""

    at: float
    """When the event was recorded, in seconds since 1970."""
    slot: str
    """Who recorded it: `r0.s0.t1` is replica 0, stage 0, TP slot 1."""
    event: Event
    """What happened; its class says of which kind it is."""


def read_run(folder: Path) -> list[RecordedEvent]:
    """Read the record of a run in which training has begun.

    Lines that are no events are passed over; a warning in the log says how many.

    Args:
        folder: The folder of the run, as in `ntp run --ntp-run-dir`.

    Returns:
        The entries of all hosts, in the order of time.

    Raises:
        ConfigError: There is no such folder, or nothing in it says that training has begun.

    Examples:
        ```python
        slowest = max(entry.event.seconds for entry in read_run(folder) if isinstance(entry.event, Recovered))
        ```
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder of a run", way_out="the one that ntp run --ntp-run-dir was told")
    follower = Follower(folder)
    told = sorted(follower.news(), key=lambda one: one.at)
    if follower.senseless:
        _LOG.warning("%s: %d lines make no sense, and are passed over", folder, follower.senseless)
    if not any(isinstance(one.event, Began) for one in told):
        raise ConfigError(f"{folder}: training has not begun yet, or nothing is told there", way_out="try again later")
    return told


def events_file(run: Path, host: int = 0) -> Path:
    """Where a host of a run tells what happens."""
    return run / (_NAME if not host else f"events.host{host}.jsonl")


class Teller:
    """Writes the events of one process."""

    def __init__(self, path: str | Path | None, slot: str) -> None:
        self._slot, self._full = slot, False
        # From here on by the clock that nobody sets: a record whose times jump has no order.
        self._began_at = time.time() - time.monotonic()
        self._file = None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    @property
    def is_heard(self) -> bool:
        """Whether there is a file, so that what is costly to know is not asked for in vain."""
        return self._file is not None

    def tell(self, event: Event) -> None:
        """Append it, if there is a file."""
        if self._file is None or (isinstance(event, _ROUTINE) and self._is_full()):
            return
        line = {
            "at": self._began_at + time.monotonic(),
            "slot": self._slot,
            "event": type(event).__name__,
            **dataclasses.asdict(event),
        }
        try:
            os.write(self._file, json.dumps(line).encode() + b"\n")
        except OSError as error:  # a full disk is no reason to stop training
            _LOG.warning("what happens is not recorded any more: %s", error.strerror)
            self.close()

    def _is_full(self) -> bool:
        assert self._file is not None, "it is told to a file"
        if not self._full and os.fstat(self._file).st_size > _MOST_BYTES:
            self._full = True
            _LOG.warning("the record has %d bytes: from now on steps are not recorded, all else is", _MOST_BYTES)
        return self._full

    def close(self) -> None:
        """Nothing more is told."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Follower:
    """Reads the record of a job while it grows.

    Args:
        path: The folder of a run, with the files of all hosts, or one file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: dict[Path, int] = {}
        self.senseless = 0
        """Lines that were no events."""

    @property
    def position(self) -> dict[str, int]:
        """File -> how far it is read, for whoever reads on in this one's place."""
        return {path.name: read for path, read in self._read.items()}

    def news(self, *, until: Mapping[str, int] | None = None) -> list[RecordedEvent]:
        """Read the entries that were added since the last call; a line that is not whole yet is left for the next one.

        Args:
            until: No more than a reader has read whose `position` this was.
        """
        files = sorted(self._path.glob("events*.jsonl")) if self._path.is_dir() else [self._path]
        ends = {path: None if until is None else until.get(path.name, 0) for path in files}
        return [told for path in files if path.exists() for told in self._news_of(path, ends[path])]

    def _news_of(self, path: Path, end: int | None) -> list[RecordedEvent]:
        begin = self._read.get(path, 0)
        with path.open("rb") as file:
            file.seek(begin)
            whole = file.read(-1 if end is None else max(0, end - begin)).rpartition(b"\n")[0]
        self._read[path] = begin + len(whole) + bool(whole)
        told = [_told(line) for line in whole.splitlines()]
        self.senseless += told.count(None)
        return [one for one in told if one is not None]


def _told(line: bytes) -> RecordedEvent | None:
    try:
        read = json.loads(line)
        at, slot, kind = read.pop("at"), read.pop("slot"), KINDS[read.pop("event")]
        hints = typing.get_type_hints(kind)
        event = kind(**read)
        if not (_is_own(at, float) and isinstance(slot, str) and _fits(event, hints)):
            return None
        return RecordedEvent(at=float(at), slot=slot, event=event)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _fits(event: Any, hints: dict[str, Any]) -> bool:
    """Whether the values are of their kinds, as far as one look tells."""
    return all(_is_own(getattr(event, name), hint) for name, hint in hints.items())


def _is_own(value: Any, hint: Any) -> bool:
    """Whether it may be a field: a number alone there is a time or counts something. A loss may be NaN."""
    return _is(value, hint) and (hint not in (int, float) or 0 <= value < _MOST)


def _is(value: Any, hint: Any) -> bool:
    kind, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if isinstance(value, int):
        return kind is bool if isinstance(value, bool) else kind in (int, float) and abs(value) < _MOST
    if not isinstance(value, kind):
        return False
    if kind is list:
        return all(_is(item, parts[0]) for item in value)
    return kind is not dict or all(_is(key, parts[0]) and _is(item, parts[1]) for key, item in value.items())
