"""`ntp copies`: lists, verifies and removes the copies of training state in this host's memory, of all its runs."""

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

_HELP = {
    "list": "list the versions of all runs on this host, and whether all parts are here",
    "verify": "list them, and compute all digests again; exit code 1 if one is wrong",
    "clean": "remove the copies of dead runs",
}

_COLUMNS = ("folder", "host", "run", "step", "epoch", "parts here", "parities of", "MB", "kept")


class NotARun(ConfigError):
    """The folder has no lock, so it is no folder of a run."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ListedVersion:
    """One row of the list: one version of one run, with the parts that are on this host."""

    folder: Path
    host: str
    run: str = "?"
    step: int = -1
    epoch: int = -1
    here: frozenset[int] = frozenset()
    parities: tuple[str, ...] = ()
    """For each parity on this host the slots it covers, as `0+2`."""
    holders: frozenset[int] = frozenset()
    size: int = 0
    kept: str = ""
    """For a dead run: how long it has been dead, and when a new run removes the copies."""
    wrong: tuple[str, ...] = ()


def add_command(commands: "argparse._SubParsersAction[OneLineParser]") -> None:
    """Add `copies` to the commands of `ntp`."""
    parser = commands.add_parser(
        "copies",
        help="list, verify, export or remove the copies of training state on this host",
        description="Copies of training state in this host's memory. A run that succeeds removes its copies. A run that"
        " fails leaves them for the time of `ntp run --ntp-copies-keep`, until a new run needs the memory, or until"
        " `ntp copies clean`.",
    )
    actions = parser.add_subparsers(title="what to do with them", required=True, metavar="WHAT", dest="what")
    for what, text in _HELP.items():
        action = actions.add_parser(what, help=text, description=text)
        action.add_argument(
            "folders", nargs="*", type=Path, metavar="FOLDER", help=f"default: {shared_memory()}/{COPIES}* of this user"
        )
        action.set_defaults(run=run, parser=action)
    export.add_command(actions)


def run(parsed: Any) -> int:
    """Run the action and return its exit code: 1 where a copy is damaged."""
    if parsed.what == "clean":
        return _clean(parsed.folders)
    verify = parsed.what == "verify"
    rows = [row for folder in _folders(parsed.folders) for row in _rows_if_there(folder, parsed.folders, verify=verify)]
    _show(rows, verify=verify)
    return int(any(row.wrong for row in rows))


def _folders(given: Sequence[Path]) -> list[Path]:
    for folder in given:
        require_private(folder)
    return list(given) or private_folders(shared_memory(), COPIES)


def _rows_if_there(folder: Path, given: Sequence[Path], *, verify: bool) -> list[ListedVersion]:
    """Return the rows of a folder; none where its run has not locked it yet, or is removing it."""
    try:
        return list(_rows(folder, verify=verify))
    except (NotARun, NotPrivate, FileNotFoundError) as error:
        if folder not in given:
            return []
        if isinstance(error, FileNotFoundError):
            raise NotARun(f"{folder} was removed while it was read", fix="see ntp copies list") from error
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
        for problems in wrong.values():
            yield ListedVersion(folder=folder, host=host.name, wrong=tuple(problems))
        store.close()


def _kept(run: DeadRun) -> str:
    dead_s = time.time() - run.died_at
    left_s = run.keep_s - dead_s
    when = f"stays for {in_words(left_s)}, if there is room" if left_s > 0 else "removed by the next run"
    return f"dead for {in_words(dead_s)}; {when}"


def _wrong(store: Any) -> dict[tuple[int, int], list[str]]:
    """Return (step, epoch) -> the damage found in that version; (-1, -1) for copies whose version cannot be read."""
    from ntp_plugin.copies.verify import wrong  # noqa: PLC0415

    problems: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
    for place, version in store.broken():
        key = (version.step, version.epoch) if version is not None else (-1, -1)
        problems[key].append(f"{place}: incomplete or damaged")
    for place, manifest in store.found():
        key = manifest.version.step, manifest.version.epoch
        try:
            bad = [what for held in manifest.held for what in wrong(manifest, held, store.read(place, held))]
        except (FileNotFoundError, EOFError):  # a live run has begun to write another version there
            continue
        if store.manifest(place) == manifest:  # else the run has overwritten this version while it was checked
            problems[key] += [f"{place}: {what} damaged" for what in bad]
    return {key: found for key, found in problems.items() if found}


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
    """Remove the given folders, which must be those of dead runs, or all folders of dead runs."""
    left = [folder for prefix in (COPIES, EXCERPTS) for folder in left_by_the_dead(shared_memory(), prefix)]
    for folder in _folders(given) if given else left:
        if given and _lives(folder):
            raise ConfigError(f"{folder} belongs to a running job", fix="end the job first")
        try:
            with free(folder), contextlib.suppress(FileNotFoundError):  # another run removes it as well
                shutil.rmtree(folder)
        except BlockingIOError:
            print(printable(f"kept {folder}: another process reads it, or a run resumes from it"))
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
        raise NotARun(f"{folder} is no folder of a run", fix="name one that `ntp copies list` shows") from None
