"""`ntp copies`: what is kept in the memory of this host, of runs that live and of those that are dead."""

import argparse
import contextlib
import dataclasses
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ntp_plugin.cli import export
from ntp_plugin.cli.parser import OneLineParser
from ntp_plugin.errors import ConfigError
from ntp_plugin.launch.kept_copies import DeadRun, dead_run, in_words
from ntp_plugin.launch.run_folder import COPIES, EXCERPTS, free, left_by_the_dead, shared_memory
from ntp_plugin.private_folders import NotPrivate, private_folders, require_private
from ntp_plugin.telemetry.printable import printable

_TOLD = {
    "list": "versions of all runs on this host, and whether all parts are here",
    "verify": "the same, with all digests computed again; code 1 if one is wrong",
    "clean": "remove those of dead runs",
}

_COLUMNS = ("folder", "host", "run", "step", "epoch", "parts here", "parities of", "MB", "kept")


class NotARun(ConfigError):
    """A folder has no lock of a run."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ListedVersion:
    """One version of one run, as far as it is on this host."""

    folder: Path
    host: str
    run: str = "?"
    step: int = -1
    epoch: int = -1
    here: frozenset[int] = frozenset()
    parities: tuple[str, ...] = ()
    """The slots of each that is here, as `0+2`."""
    holders: frozenset[int] = frozenset()
    size: int = 0
    kept: str = ""
    """How long its run is dead, and when a new run removes it."""
    wrong: tuple[str, ...] = ()


def add_command(commands: "argparse._SubParsersAction[OneLineParser]") -> None:
    """Add `copies` to the commands of `ntp`."""
    parser = commands.add_parser(
        "copies",
        help="list, verify, export or remove the copies of training state on this host",
        description="Copies of training state in this host's memory. A run removes its own when it ends well; those of"
        " a run that failed stay as long as it was told (ntp run --ntp-copies-keep), until a new run needs their"
        " room, or until `ntp copies clean`.",
    )
    actions = parser.add_subparsers(title="what to do with them", required=True, metavar="WHAT", dest="what")
    for what, told in _TOLD.items():
        action = actions.add_parser(what, help=told, description=told)
        action.add_argument(
            "folders", nargs="*", type=Path, metavar="FOLDER", help=f"default: {shared_memory()}/{COPIES}* of this user"
        )
        action.set_defaults(run=run, parser=action)
    export.add_command(actions)


def run(said: Any) -> int:
    """Do it; 1 where a copy is not what was written."""
    if said.what == "clean":
        return _clean(said.folders)
    verify = said.what == "verify"
    rows = [row for folder in _folders(said.folders) for row in _rows_if_there(folder, said.folders, verify=verify)]
    _show(rows, verify=verify)
    return int(any(row.wrong for row in rows))


def _folders(given: Sequence[Path]) -> list[Path]:
    for folder in given:
        require_private(folder)
    return list(given) or private_folders(shared_memory(), COPIES)


def _rows_if_there(folder: Path, given: Sequence[Path], *, verify: bool) -> list[ListedVersion]:
    """Return the rows of a folder; none where its run has not begun to own it yet, or removes it meanwhile."""
    try:
        return list(_rows(folder, verify=verify))
    except (NotARun, NotPrivate, FileNotFoundError) as error:
        if folder not in given:
            return []
        if isinstance(error, FileNotFoundError):
            raise NotARun(f"{folder} was removed while it was read", way_out="see ntp copies list") from error
        raise


def _rows(folder: Path, *, verify: bool) -> Iterator[ListedVersion]:
    from ntp_plugin.copies.parity import members_of  # noqa: PLC0415  (brings torch, which no other command needs)
    from ntp_plugin.copies.store import PARITY, Store  # noqa: PLC0415

    lives = _lives(folder)
    kept = "" if lives else _kept(dead_run(folder))
    for host in sorted(path for path in folder.iterdir() if path.is_dir()):
        store = Store(host, makes=False)
        found: defaultdict[Any, list[Any]] = defaultdict(list)
        for place, manifest in store.found():
            found[manifest.run, manifest.version.step, manifest.version.epoch].append((place, manifest))
        wrong = _wrong(store) if verify else {}
        for (run_name, step, epoch), copies in sorted(found.items()):
            yield ListedVersion(
                folder=folder,
                host=host.name,
                run=f"{run_name} ({'alive' if lives else 'dead'})",
                step=step,
                epoch=epoch,
                here=frozenset(manifest.slot for place, manifest in copies if place.kind != PARITY),
                parities=tuple(
                    "+".join(str(member.slot) for member in members_of(manifest))
                    for place, manifest in copies
                    if place.kind == PARITY
                ),
                holders=frozenset(copies[0][1].holders),
                size=sum(manifest.size for _, manifest in copies),
                kept=kept,
                wrong=tuple(wrong.pop((step, epoch), [])),
            )
        for told in wrong.values():
            yield ListedVersion(folder=folder, host=host.name, wrong=tuple(told))
        store.close()


def _kept(run: DeadRun) -> str:
    dead_s = time.time() - run.died_at
    left_s = run.keep_s - dead_s
    when = f"stays {in_words(left_s)} more, if there is room" if left_s > 0 else "goes with the next run"
    return f"dead for {in_words(dead_s)}; {when}"


def _wrong(store: Any) -> dict[tuple[int, int], list[str]]:
    """(step, epoch) -> what is not as it was written; of a copy that cannot be read the version is not known."""
    from ntp_plugin.copies.verify import wrong  # noqa: PLC0415

    told: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
    for place, version in store.broken():
        key = (version.step, version.epoch) if version is not None else (-1, -1)
        told[key].append(f"{place}: not whole, or not as it was written")
    for place, manifest in store.found():
        key = manifest.version.step, manifest.version.epoch
        try:
            bad = [what for held in manifest.held for what in wrong(manifest, held, store.read(place, held))]
        except (FileNotFoundError, EOFError):  # a run that lives has begun to write another version there
            continue
        if store.manifest(place) == manifest:  # else the same
            told[key] += [f"{place}: {what} not as it was written" for what in bad]
    return {key: found for key, found in told.items() if found}


def _show(rows: Sequence[ListedVersion], *, verify: bool) -> None:
    console = Console()
    if not rows:
        console.print("no copies on this host")
        return
    table = Table()
    for column in (*_COLUMNS, *(["digests"] if verify else [])):
        table.add_column(column)
    for row in rows:
        state = [f"{len(row.wrong)} WRONG" if row.wrong else "right"] if verify else []
        numbers = [str(row.step), str(row.epoch)] if row.holders else ["?", "?"]
        parts = f"{len(row.here)} of {len(row.holders)}" if row.holders else "?"
        shared = ", ".join(row.parities)
        cells = (row.folder, row.host, row.run, *numbers, parts, shared, f"{row.size / 1e6:.1f}", row.kept, *state)
        table.add_row(*(Text(printable(cell)) for cell in cells))
    console.print(table)
    for row in rows:
        for what in row.wrong:
            console.print(Text(printable(f"{row.host}, {what}"), style="red"))


def _clean(given: Sequence[Path]) -> int:
    """Those of dead runs, or these, which must be."""
    left = [folder for prefix in (COPIES, EXCERPTS) for folder in left_by_the_dead(shared_memory(), prefix)]
    for folder in _folders(given) if given else left:
        if given and _lives(folder):
            raise ConfigError(f"{folder} belongs to a run that lives", way_out="end that first")
        try:
            with free(folder), contextlib.suppress(FileNotFoundError):  # another run removes it as well
                shutil.rmtree(folder)
        except BlockingIOError:
            print(printable(f"left {folder}: a run resumes from it, or somebody reads it"))
            continue
        except (FileNotFoundError, NotPrivate):  # it has just been removed
            continue
        print(printable(f"removed {folder}"))
    return 0


def _lives(folder: Path) -> bool:
    try:
        with free(folder, shared=True):
            return False
    except BlockingIOError:
        return True
    except FileNotFoundError:
        raise NotARun(f"{folder} is no folder of a run", way_out="name one that `ntp copies list` shows") from None
