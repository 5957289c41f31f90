"""`ntp copies export`: copies in memory, of a run that is dead or lives, as a checkpoint of its framework.

Only the job's own script knows the model. So it is started once more, on this host, by the command that the user gives,
and told to save and end (`recovery/exporting.py`). A run leaves its command beside its copies (`launch/started_by.py`),
where it is shown to whoever gives none; a command that stands in a file is never executed.

What it reads stays as it is meanwhile: the folder of a dead run is locked, and of a run that lives one version is
copied first (`copies/excerpt.py`), so that nothing of this is felt there but the load.
"""

import argparse
import contextlib
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ntp_plugin.cli.parser import OneLineParser, number
from ntp_plugin.errors import ConfigError, Refused
from ntp_plugin.launch.run_folder import COPIES, EXCERPTS, RunFolder, free, shared_memory
from ntp_plugin.launch.started_by import StartedBy
from ntp_plugin.private_folders import changed_at, private_folders, require_private
from ntp_plugin.telemetry.printable import printable

_CAN_ONLY_SAVE = ("megatron", "deepspeed")
"""Frameworks whose adapter ends a script when the checkpoint is written; of others it would begin to train."""


def add_command(actions: "argparse._SubParsersAction[OneLineParser]") -> None:
    """Add `export` to what `ntp copies` does."""
    told = "write the newest version as a checkpoint, by the job's own script"
    parser = actions.add_parser("export", help=told, description=told)
    parser.add_argument("folder", metavar="RUN", help="a folder that ntp copies list shows; latest: the newest of them")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="for the checkpoint: empty, or not there")
    parser.add_argument(
        "--nproc-per-node",
        type=number(int, least=1, most=1_000_000),
        metavar="N",
        help="processes to start (default: as many as the job had in all)",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be done")
    parser.epilog = "The command of a worker follows behind --: -- train.py ARGUMENTS, or -- -m MODULE ARGUMENTS."
    parser.usage = "%(prog)s RUN --to DIR [--nproc-per-node N] [--dry-run] -- COMMAND"
    parser.takes_command = True
    parser.set_defaults(run=run, parser=parser)


def run(said: Any) -> int:
    """Do it; returns the exit code."""
    folder = _chosen(said.folder)
    version, words = _version(folder), _command(said.command, folder, said)
    processes = _processes(folder) if said.nproc_per_node is None else said.nproc_per_node
    to = _empty(said.to.absolute(), folder)
    if said.dry_run:
        print(f"{version} of {folder} would go into {to}, by {processes} processes of")
        print(shlex.join(words))
        return 0
    code = _whole_or_nothing(to, lambda: _write(folder, processes, words, to))
    _say(f"there is no checkpoint; {folder} is as it was" if code else f"the checkpoint is in {to}")
    return code


# ---------------------------------------------------------------- what is wanted


def _chosen(said: str) -> Path:
    ours = private_folders(shared_memory(), COPIES)
    there = sorted((folder for folder in ours if any(folder.glob("*/*.json"))), key=changed_at)
    if said == "latest" and there:
        return there[-1]
    if (folder := Path(said).absolute()).is_dir():
        require_private(folder)
        return folder
    found = ", ".join(map(str, there)) or "none"
    raise ConfigError(f"{said}: there are no copies of a run there", way_out=f"on this host: {found}")


def _version(folder: Path) -> Any:
    """The one that would be written now; raises where none can be."""
    from ntp_plugin.copies import excerpt  # noqa: PLC0415  (brings torch)

    store = _store(folder)
    version = excerpt.newest(store)
    for _, manifest in store.found():
        framework = manifest.extras.get("framework", "something that does not say its name")
        if framework not in _CAN_ONLY_SAVE:
            raise Refused(
                f"the copies in {folder} were made by {framework}, and it cannot start only to save",
                way_out=f"ntp run --ntp-resume {folder} with the job's own command, and have that save",
            )
    return version


def _store(folder: Path) -> Any:
    """The copies of a run that are on this host, whichever of the run's hosts it is."""
    from ntp_plugin.copies.store import Store  # noqa: PLC0415

    hosts = sorted(folder.glob("host-*"))
    if len(hosts) != 1:
        raise ConfigError(
            f"{folder} has copies of {len(hosts)} hosts, and a run has those of one",
            way_out="name one that `ntp copies list` shows",
        )
    return Store(hosts[0], makes=False)


def _command(given: Sequence[str], folder: Path, said: Any) -> tuple[str, ...]:
    """Return the words of a worker's command, the interpreter first."""
    if not given:
        raise ConfigError("the command of the job is missing", way_out=_suggestion(folder, said))
    if given[0] == "ntp":
        raise ConfigError(
            "the command behind -- is that of a worker, and ntp run starts workers",
            way_out="leave out ntp run and its flags: -- train.py ARGUMENTS, or -- -m MODULE ARGUMENTS",
        )
    if given[0] == "-m" or given[0].endswith(".py"):
        return sys.executable, "-u", *given
    return (sys.executable if _is_this_python(given[0]) else given[0]), *given[1:]


def _is_this_python(word: str) -> bool:
    """Return whether a word names this interpreter: hooks go into its scripts alone, and only they make them save."""
    found = shutil.which(word)
    return found is not None and Path(found).parent == Path(sys.executable).parent and "python" in Path(found).name


def _suggestion(folder: Path, said: Any) -> str:
    """Return what to type, by the command that the run has left for its owner to read."""
    asked = shlex.join(["ntp", "copies", "export", said.folder, "--to", str(said.to)])
    try:
        started = StartedBy.read(folder)
    except ConfigError:
        return f"{asked} -- train.py ARGUMENTS"
    typed = f"cd {shlex.quote(str(started.folder))} && {asked} -- {shlex.join(started.words)}"
    return f"{printable(typed)}   (as its folder has recorded it: read it before you run it)"


def _processes(folder: Path) -> int:
    """Return how many workers the run had on all its hosts."""
    try:
        started = StartedBy.read(folder)
    except ConfigError as error:
        raise ConfigError(error.what, way_out="say how many processes to start: --nproc-per-node") from error
    return started.workers * started.hosts


def _empty(to: Path, folder: Path) -> Path:
    """A folder where nobody has written yet."""
    way_out = "name another one by --to"
    if to.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"--to {to} is among the copies of the run, which go with it", way_out=way_out)
    if to.exists() and not to.is_dir():
        raise ConfigError(f"--to {to} is not a folder", way_out=way_out)
    if to.exists() and any(to.iterdir()):
        raise ConfigError(f"--to {to} is not empty", way_out=way_out)
    return to


# ---------------------------------------------------------------- doing it


@contextlib.contextmanager
def _undisturbed(folder: Path) -> Iterator[Path]:
    """Copies that nobody changes or removes meanwhile."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(free(folder))
        except FileNotFoundError:
            raise ConfigError(
                f"{folder} is no folder of a run", way_out="name one that `ntp copies list` shows"
            ) from None
        except BlockingIOError:
            yield stack.enter_context(_excerpt(folder))
        else:
            yield folder


@contextlib.contextmanager
def _excerpt(folder: Path) -> Iterator[Path]:
    from ntp_plugin.copies import excerpt  # noqa: PLC0415
    from ntp_plugin.copies.store import Store  # noqa: PLC0415

    scratch = RunFolder(EXCERPTS)
    try:
        into = Store(scratch.path / "host-0")
        version = excerpt.take(_store(folder), into)
        _say(
            f"{folder} is of a run that lives; {version} is copied to {scratch.path} first, which takes"
            f" {into.used / 1e6:.1f} MB until the checkpoint is written"
        )
        into.close()
        yield scratch.path
    finally:
        scratch.remove()


def _whole_or_nothing(to: Path, write: Callable[[], int]) -> int:
    """What a checkpoint that fails has written by then is removed: the folder was empty."""
    was_there, code = to.exists(), 1
    _require_writable(to)
    try:
        code = write()
        if not code and not any(to.iterdir()):
            _say("the script has ended well, and has written nothing")
            code = 1
    finally:
        if code:
            _remove_all_in(to)
            if not was_there:
                to.rmdir()
    return code


def _require_writable(to: Path) -> None:
    """Tried, because rights alone do not say it: of a file system that is read-only, say."""
    try:
        to.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=to).close()
    except OSError as error:
        raise ConfigError(f"--to {to} cannot be written to: {error}", way_out="name another one by --to") from error


def _remove_all_in(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _write(folder: Path, processes: int, words: Sequence[str], to: Path) -> int:
    """Start the job's workers, who know from their place what they are for; the exit code."""
    from ntp_plugin.launch import agent, torchrun_flags  # noqa: PLC0415

    with _undisturbed(folder) as source:
        flags = ["--standalone", "--nproc-per-node", str(processes), "--no-python"]
        started = torchrun_flags.parse([*flags, *words])
        return agent.run(started, agent.RunPolicy(resume=source, export=to))


def _say(what: str) -> None:
    print(f"ntp copies export: {what}", flush=True)
