"""Read outages from a file: rows of (domain, start, end), as CSV or JSON, in days.

A row of JSON is an object with `domain`, `start` and `end`. A list of events is read too, `node_id`, `event_time` and
`event_type` of `fault_start` or `fault_end`, as in the InfiniteHBD trace: each start goes with the next end of its
node, and one that never ends lasts to the trace's last event. Whatever is wrong is one error that names the line.
"""

import csv
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ntp_plugin.errors import ConfigError
from ntp_plugin.simulator.failures import DAY_S, Outage

COLUMNS = ("domain", "start", "end")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TraceRow:
    """What stands in one place of the file."""

    line: int
    values: Mapping[str, Any]


def read_trace(path: Path) -> tuple[Outage, ...]:
    """All outages, by their start."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    rows = list(_csv_rows(text, path) if path.suffix == ".csv" else _json_rows(text, path))
    if not rows:
        raise ConfigError(f"{path} has no outages", fix=f"write rows of {', '.join(COLUMNS)}")
    events = all("event_type" in row.values for row in rows)
    outages = _paired(rows, path) if events else [_outage(row, path) for row in rows]
    return tuple(sorted(outages, key=lambda outage: (outage.start_s, outage.domain)))


def _csv_rows(text: str, path: Path) -> Iterator[TraceRow]:
    reader = csv.DictReader(text.splitlines())
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise _wrong(path, 1, f"the heading has no column {missing[0]}", f"write {','.join(COLUMNS)}")
    for values in reader:
        yield TraceRow(line=reader.line_num, values=values)


def _json_rows(text: str, path: Path) -> Iterator[TraceRow]:
    """The objects of a list, one by one, so that a wrong one is known by its line."""
    decoder, at = json.JSONDecoder(), _skip(text, 0)
    if text[at : at + 1] != "[":
        raise _wrong(path, 1, "not a list", 'write [{"domain": ..., "start": ..., "end": ...}, ...]')
    at = _skip(text, at + 1)
    while text[at : at + 1] != "]":
        line = text.count("\n", 0, at) + 1
        try:
            values, at = decoder.raw_decode(text, at)
        except ValueError as error:
            raise _wrong(path, getattr(error, "lineno", line), f"not JSON: {getattr(error, 'msg', error)}") from None
        if not isinstance(values, dict):
            raise _wrong(path, line, f"{values!r} is not an object")
        yield TraceRow(line=line, values=values)
        at = _skip(text, at)
        if text[at : at + 1] == ",":
            at = _skip(text, at + 1)
        elif text[at : at + 1] != "]":
            raise _wrong(path, text.count("\n", 0, at) + 1, "a comma or the end of the list is missing")


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _outage(row: TraceRow, path: Path) -> Outage:
    start, end = (_day(row, name, path) for name in ("start", "end"))
    if end <= start:
        raise _wrong(path, row.line, f"end = {end:g} is not after start = {start:g}")
    return Outage(domain=_name(row, "domain", path), start_s=start * DAY_S, end_s=end * DAY_S)


def _paired(rows: list[TraceRow], path: Path) -> list[Outage]:
    last = max(_day(row, "event_time", path) for row in rows)
    open_since: dict[str, list[float]] = {}
    found = []
    for row in sorted(rows, key=lambda row: _day(row, "event_time", path)):
        node, day = _name(row, "node_id", path), _day(row, "event_time", path)
        kind = row.values["event_type"]
        if kind == "fault_start":
            open_since.setdefault(node, []).append(day)
        elif kind != "fault_end":
            raise _wrong(path, row.line, f"event_type = {kind!r} is neither fault_start nor fault_end")
        elif not open_since.get(node):
            raise _wrong(path, row.line, f"{node} ends a fault that has not started")
        else:
            found.append((node, open_since[node].pop(0), day))
    found += [(node, day, last) for node, days in open_since.items() for day in days]
    return [Outage(domain=node, start_s=start * DAY_S, end_s=end * DAY_S) for node, start, end in found if end > start]


def _day(row: TraceRow, name: str, path: Path) -> float:
    value = row.values.get(name)
    try:
        day = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise _wrong(path, row.line, f"{name} = {value!r} is not a number of days") from None
    if not math.isfinite(day) or day < 0:
        raise _wrong(path, row.line, f"{name} = {value!r} is not a number of days from 0 on")
    return day


def _name(row: TraceRow, name: str, path: Path) -> str:
    value = row.values.get(name)
    if value is None or not str(value).strip():
        raise _wrong(path, row.line, f"{name} is missing")
    return str(value)


def _wrong(path: Path, line: int, what: str, fix: str = "") -> ConfigError:
    return ConfigError(f"{path}, line {line}: {what}", fix=fix)
