"""`ntp copies`: what is kept in the memory of this host, of runs that live and of those that are dead."""

import argparse
import dataclasses
import fcntl
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ntp_plugin.cli.parser import OneLineParser
from ntp_plugin.errors import ConfigError
from ntp_plugin.launch.run_folder import COPIES, left_by_the_dead, shared_memory


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One version of one run, as far as it is on this host."""

    folder: Path
    host: str
    run: str
    step: int
    epoch: int
    here: frozenset[int]
    holders: frozenset[int]
    size: int
    age_s: float
    wrong: tuple[str, ...] = ()


def add_command(commands: "argparse._SubParsersAction[OneLineParser]") -> None:
    """Add `copies` to the commands of `ntp`."""
    parser = commands.add_parser(
        "copies",
        help="list, verify or remove the copies of training state on this host",
        description="Copies of training state in this host's memory. A run removes its own when it ends well; those of"
        " a run that failed stay until the next run, or until `ntp copies clean`.",
    )
    parser.add_argument("what", choices=("list", "verify", "clean"), help="what to do with them")
    parser.add_argument(
        "folders", nargs="*", type=Path, metavar="FOLDER", help=f"default: {shared_memory()}/{COPIES}* of this user"
    )
    parser.set_defaults(run=run, parser=parser)


def run(said: Any) -> int:
    """Do it; 1 where a copy is not what was written."""
    if said.what == "clean":
        return _clean(said.folders)
    rows = [row for folder in _folders(said.folders) for row in _rows(folder, verify=said.what == "verify")]
    _show(rows, verify=said.what == "verify")
    return int(any(row.wrong for row in rows))


def _folders(given: Sequence[Path]) -> list[Path]:
    for folder in given:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder", way_out="name one that `ntp copies list` shows")
    return list(given) or [
        folder for folder in sorted(shared_memory().glob(f"{COPIES}*")) if os.access(folder, os.R_OK)
    ]


def _rows(folder: Path, *, verify: bool) -> Iterator[Row]:
    from ntp_plugin.copies.manifest import wrong  # noqa: PLC0415  (brings torch, which no other command needs)
    from ntp_plugin.copies.store import Store  # noqa: PLC0415

    found: defaultdict[tuple[str, str, int, int], list[tuple[Any, Any, float]]] = defaultdict(list)
    for host in sorted(path for path in folder.iterdir() if path.is_dir()):
        store = Store(host)
        for place, manifest in store.found():
            checked = manifest.held if verify else ()
            bad = [what for held in checked for what in wrong(manifest, held, store.read(place, held))]
            key = host.name, manifest.run, manifest.version.step, manifest.version.epoch
            age = time.time() - (host / str(place)).stat().st_mtime
            found[key].append((manifest, [f"{place}: {what}" for what in bad], age))
        store.close()
    for (host_name, run_name, step, epoch), copies in sorted(found.items()):
        yield Row(
            folder=folder,
            host=host_name,
            run=run_name,
            step=step,
            epoch=epoch,
            here=frozenset(manifest.slot for manifest, _, _ in copies),
            holders=frozenset(copies[0][0].holders),
            size=sum(manifest.size for manifest, _, _ in copies),
            age_s=min(age for _, _, age in copies),
            wrong=tuple(what for _, bad, _ in copies for what in bad),
        )


def _show(rows: Sequence[Row], *, verify: bool) -> None:
    console = Console()
    if not rows:
        console.print("no copies on this host")
        return
    table = Table()
    for column in (
        "folder",
        "host",
        "run",
        "step",
        "epoch",
        "parts here",
        "MB",
        "age",
        *(["digests"] if verify else []),
    ):
        table.add_column(column)
    for row in rows:
        state = [f"{len(row.wrong)} WRONG" if row.wrong else "right"] if verify else []
        table.add_row(
            str(row.folder),
            row.host,
            row.run,
            str(row.step),
            str(row.epoch),
            f"{len(row.here)} of {len(row.holders)}",
            f"{row.size / 1e6:.1f}",
            f"{row.age_s:.0f} s",
            *state,
        )
    console.print(table)
    for row in rows:
        for what in row.wrong:
            console.print(f"step {row.step}, {what}: not as it was written", style="red")


def _clean(given: Sequence[Path]) -> int:
    dead = set(left_by_the_dead(shared_memory(), COPIES)) if not given else None
    for folder in sorted(dead) if dead is not None else _folders(given):
        if dead is None and _lives(folder):
            raise ConfigError(f"{folder} belongs to a run that lives", way_out="end that first")
        shutil.rmtree(folder)
        print(f"removed {folder}")
    return 0


def _lives(folder: Path) -> bool:
    try:
        lock = os.open(folder / "owner", os.O_RDWR)
    except FileNotFoundError:
        raise ConfigError(f"{folder} is no folder of a run", way_out="name one that `ntp copies list` shows") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
