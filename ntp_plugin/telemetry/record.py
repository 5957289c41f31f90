"""The record of a job: in the folder of a run, one file per host with one line of JSON for each event.

Every process of a host appends to the same file. A line is one write, so lines of several processes do not mix (on a
local disk; each host has its own file). A killed process leaves what it has written. A reader follows the files while
the job runs, or reads them afterwards. It counts and skips malformed lines, because what another process has written
must not stop it.
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
"""Upper bound of a number in a line; a larger one would overflow in the reader."""
_MOST_BYTES = 2 << 30
"""Size of a file beyond which the events of every step are no longer recorded; all others still are."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecordedEvent:
    """One entry of the record."""

    at: float
    """Time at which the event was recorded, in seconds since 1970."""
    slot: str
    """Slot that recorded it: `r0.s0.t1` is replica 0, stage 0, TP slot 1."""
    event: Event
    """The event; its class is its kind."""


def read_run(folder: Path) -> list[RecordedEvent]:
    """Read the record of a run in which training has begun.

    Malformed lines are skipped; a warning in the log counts them.

    Args:
        folder: The folder of the run, as given to `ntp run --ntp-run-dir`.

    Returns:
        The entries of all hosts, ordered by time.

    Raises:
        ConfigError: The folder does not exist, or holds no record of training that has begun.

    Examples:
        ```python
        slowest = max(entry.event.seconds for entry in read_run(folder) if isinstance(entry.event, Recovered))
        ```
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder of a run", fix="the one given to ntp run --ntp-run-dir")
    follower = Follower(folder)
    entries = sorted(follower.news(), key=lambda one: one.at)
    if follower.malformed:
        _LOG.warning("%s: %d malformed lines skipped", folder, follower.malformed)
    if not any(isinstance(one.event, Began) for one in entries):
        raise ConfigError(f"{folder}: training has not begun yet, or is not recorded there", fix="try again later")
    return entries


def events_file(run: Path, host: int = 0) -> Path:
    """The file in which a host of a run records its events."""
    return run / (_NAME if not host else f"events.host{host}.jsonl")


class EventWriter:
    """Appends the events of one process to the record."""

    def __init__(self, path: str | Path | None, slot: str) -> None:
        self._slot, self._full = slot, False
        # Times come from the monotonic clock from here on: a record whose times jump has no order.
        self._began_at = time.time() - time.monotonic()
        self._file = None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    @property
    def is_recording(self) -> bool:
        """True if events are written to a file; callers skip costly measurements otherwise."""
        return self._file is not None

    def write(self, event: Event) -> None:
        """Append an event, if there is a file."""
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
            _LOG.warning("events are no longer recorded: %s", error.strerror)
            self.close()

    def _is_full(self) -> bool:
        assert self._file is not None, "events are written to a file"
        if not self._full and os.fstat(self._file).st_size > _MOST_BYTES:
            self._full = True
            _LOG.warning("the record has %d bytes: from now on steps are not recorded, all else is", _MOST_BYTES)
        return self._full

    def close(self) -> None:
        """Close the file; later events are dropped."""
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
        self.malformed = 0
        """Number of malformed lines so far."""

    @property
    def position(self) -> dict[str, int]:
        """File name -> bytes read so far, for the reader that takes over."""
        return {path.name: read for path, read in self._read.items()}

    def news(self, *, until: Mapping[str, int] | None = None) -> list[RecordedEvent]:
        """Read the entries added since the last call; an incomplete line is left for the next call.

        Args:
            until: Read no further than this `position` of an earlier reader.
        """
        files = sorted(self._path.glob("events*.jsonl")) if self._path.is_dir() else [self._path]
        ends = {path: None if until is None else until.get(path.name, 0) for path in files}
        return [entry for path in files if path.exists() for entry in self._news_of(path, ends[path])]

    def _news_of(self, path: Path, end: int | None) -> list[RecordedEvent]:
        begin = self._read.get(path, 0)
        with path.open("rb") as file:
            file.seek(begin)
            whole = file.read(-1 if end is None else max(0, end - begin)).rpartition(b"\n")[0]
        self._read[path] = begin + len(whole) + bool(whole)
        entries = [_parsed(line) for line in whole.splitlines()]
        self.malformed += entries.count(None)
        return [one for one in entries if one is not None]


def _parsed(line: bytes) -> RecordedEvent | None:
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
    """True if all values have the types of their fields, judged by their first level."""
    return all(_is_own(getattr(event, name), hint) for name, hint in hints.items())


def _is_own(value: Any, hint: Any) -> bool:
    """True if the value may be a field. A single number is a time or a count; a loss may be NaN."""
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
