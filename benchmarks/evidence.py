"""Write the evidence of a `make show-<topic>`: a table or rows on the terminal, and `build/show/<topic>.json`."""

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

FOLDER = Path("build/show")
_WIDTH = 140
"""Of what is printed to a file."""
_SLICES = ("SCALE", "ROWS", "FRAMEWORK", "CYCLES")
"""Names in the environment by which some of the evidence is asked for."""
_COLUMNS = 14
"""Of a table that can be read in it; rows of more values are printed one by one."""


def machine() -> str:
    """The machine in words, without its name."""
    return f"{os.cpu_count()} x {platform.machine()}, {platform.system()}, Python {platform.python_version()}"


def today() -> str:
    """The date, wherever the machine is."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def commit() -> str:
    """The commit of the measured tree; with a + if the tree has changes."""
    words = ("git", "describe", "--always", "--dirty=+", "--exclude=*")
    found = subprocess.run(words, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return found.stdout.strip() or "unknown"


def trees(*folders: str) -> str | None:
    """The committed trees of some folders; None if they have changes."""
    top = Path(__file__).parents[1]
    changed = subprocess.run(
        ("git", "status", "--porcelain", "--", *folders), capture_output=True, text=True, check=False, cwd=top
    )
    if changed.returncode or changed.stdout:
        return None
    words = ("git", "rev-parse", *(f"HEAD:{folder}" for folder in folders))
    return "+".join(subprocess.run(words, capture_output=True, text=True, check=True, cwd=top).stdout.split())


class Sittings:
    """Results gathered in several sittings: a line of JSON each, in a file or nowhere."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self._rows: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def find(self, **alike: object) -> dict[str, Any] | None:
        """The first from a sitting before this one that has these values."""
        return next(iter(self.all(**alike)), None)

    def all(self, **alike: object) -> list[dict[str, Any]]:
        """All of them."""
        return [one for one in self._rows if all(one.get(name) == alike[name] for name in alike)]

    def keep_only(self, **alike: object) -> None:
        """Drop all other rows, also from the file."""
        self._rows, before = self.all(**alike), len(self._rows)
        if self._path is not None and len(self._rows) < before:
            self._path.write_text("".join(json.dumps(one) + "\n" for one in self._rows))

    def add(self, row: Mapping[str, Any]) -> None:
        """For the next sitting."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def show(topic: str, *, holds: bool, seed: int, rows: Sequence[Mapping[str, Any]], **more: Any) -> int:
    """Print and write the evidence; returns the exit code: 0 where the claim holds, else 1."""
    report = {
        "topic": topic,
        "holds": holds,
        "machine": machine(),
        "date": today(),
        "command": " ".join((*_asked(), f"make show-{topic}")),
        "seed": seed,
        **more,
        "rows": list(rows),
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{topic}.json"
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    names = list(dict.fromkeys(name for row in rows for name in row))
    if len(names) <= _COLUMNS:
        console.print(_table(topic, names, rows))
    else:
        for row in rows:
            console.print(", ".join(f"{name} {_cell(value)}" for name, value in row.items()), end="\n\n")
    for name, value in more.items():
        console.print(f"{name}: {value}")
    console.print(f"{topic}: {'holds' if holds else 'DOES NOT HOLD'} ({path})")
    return 0 if holds else 1


def _asked() -> list[str]:
    """The requested part of it."""
    return [f"{name}={os.environ[name]}" for name in _SLICES if os.environ.get(name)]


def _table(topic: str, names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=topic, title_justify="left")
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(_cell(row[name]) if name in row else "" for name in names))
    return table


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:,.3f}"
    if isinstance(value, Mapping):
        return "\n".join(f"{name} {_cell(part)}" for name, part in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)
