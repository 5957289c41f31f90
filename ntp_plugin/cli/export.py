"""`ntp copies export`: writes the copies of a dead or live run as a checkpoint of its framework.

Only the job's own script knows the model. So the command starts the script once more, on this host, with the command
line that the user gives, and has it save and exit (`recovery/exporting.py`). A run records its command line beside its
copies (`launch/started_by.py`). Export shows that record to a user who gives no command, and never executes it.

The copies do not change while they are read. Export locks the folder of a dead run. For a live run it first takes a
copy of one version (`copies/excerpt.py`), so the run notices nothing but the load.
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
from ntp_plugin.cli.run import deepspeed_block
from ntp_plugin.errors import ConfigError, Refused
from ntp_plugin.launch.run_folder import COPIES, EXCERPTS, RunFolder, free, shared_memory
from ntp_plugin.launch.started_by import StartedBy
from ntp_plugin.private_folders import changed_at, private_folders, require_private
from ntp_plugin.telemetry.printable import printable

_CAN_ONLY_SAVE = ("megatron", "deepspeed")
"""Frameworks whose adapter ends the script once the checkpoint is written; with others the script would train."""


def add_command(actions: "argparse._SubParsersAction[OneLineParser]") -> None:
    """Add `export` to the commands of `ntp copies`."""
    text = "write the newest version as a checkpoint, with the job's own script"
    parser = actions.add_parser("export", help=text, description=text)
    parser.add_argument("folder", metavar="RUN", help="a folder that ntp copies list shows; latest: the newest one")
    parser.add_argument(
        "--to", type=Path, required=True, metavar="DIR", help="an empty or new folder for the checkpoint"
    )
    parser.add_argument(
        "--nproc-per-node",
        type=number(int, least=1, most=1_000_000),
        metavar="N",
        help="processes to start (default: the number of ranks of the job)",
    )
    parser.add_argument(
        "--ntp-deepspeed", metavar="FILE", help="as the run had it: on, or a file with the keys of its `ntp` block"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be done, and exit")
    parser.epilog = "The command of a worker follows after --: -- train.py ARGUMENTS, or -- -m MODULE ARGUMENTS."
    parser.usage = "%(prog)s RUN --to DIR [--nproc-per-node N] [--ntp-deepspeed FILE] [--dry-run] -- COMMAND"
    parser.takes_command = True
    parser.set_defaults(run=run, parser=parser)


def run(parsed: Any) -> int:
    """Write the checkpoint and return the exit code."""
    folder = _chosen(parsed.folder)
    version, words = _version(folder), _command(parsed.command, folder, parsed)
    processes = _processes(folder) if parsed.nproc_per_node is None else parsed.nproc_per_node
    to = _empty(parsed.to.absolute(), folder)
    block = None if parsed.ntp_deepspeed is None else deepspeed_block(parsed.ntp_deepspeed)
    if parsed.dry_run:
        print(f"{version} of {folder} would be written to {to} by {processes} processes of")
        print(shlex.join(words))
        return 0
    code = _whole_or_nothing(to, lambda: _write(folder, processes, words, to, deepspeed=block))
    _say(f"no checkpoint was written; {folder} is unchanged" if code else f"the checkpoint is in {to}")
    return code


# ---------------------------------------------------------------- what is wanted


def _chosen(name: str) -> Path:
    ours = private_folders(shared_memory(), COPIES)
    there = sorted((folder for folder in ours if any(folder.glob("*/*.json"))), key=changed_at)
    if name == "latest" and there:
        return there[-1]
    if (folder := Path(name).absolute()).is_dir():
        require_private(folder)
        return folder
    found = ", ".join(map(str, there)) or "none"
    raise ConfigError(f"{name}: no copies of a run there", fix=f"name a folder of this host: {found}")


def _version(folder: Path) -> Any:
    """Return the version that an export would write now; raise `Refused` where the framework cannot only save."""
    from ntp_plugin.copies import excerpt  # noqa: PLC0415  (brings torch)

    store = _store(folder)
    version = excerpt.newest(store)
    for _, manifest in store.found():
        framework = manifest.extras.get("framework", "an unnamed framework")
        if framework not in _CAN_ONLY_SAVE:
            raise Refused(
                f"the copies in {folder} were made by {framework}, which cannot start only to save a checkpoint",
                fix=f"resume the job and have it save: ntp run --ntp-resume {folder} with the job's own command",
            )
    return version


def _store(folder: Path) -> Any:
    """Open the copies that a run has on this host, whatever the number of this host in the run."""
    from ntp_plugin.copies.store import Store  # noqa: PLC0415

    hosts = sorted(folder.glob("host-*"))
    if len(hosts) != 1:
        raise ConfigError(
            f"{folder} has copies of {len(hosts)} hosts; the folder of a run has those of one",
            fix="name one that `ntp copies list` shows",
        )
    return Store(hosts[0], makes=False)


def _command(given: Sequence[str], folder: Path, parsed: Any) -> tuple[str, ...]:
    """Return the command line of a worker, with the interpreter first."""
    if not given:
        raise ConfigError("the command of the job is missing", fix=_suggestion(folder, parsed))
    if given[0] == "ntp":
        raise ConfigError(
            "the command after -- must be that of a worker, not ntp run",
            fix="leave out ntp run and its flags: -- train.py ARGUMENTS, or -- -m MODULE ARGUMENTS",
        )
    if given[0] == "-m" or given[0].endswith(".py"):
        return sys.executable, "-u", *given
    return (sys.executable if _is_this_python(given[0]) else given[0]), *given[1:]


def _is_this_python(word: str) -> bool:
    """Return whether a word names this interpreter. Only its scripts get the hooks that make them save."""
    found = shutil.which(word)
    return found is not None and Path(found).parent == Path(sys.executable).parent and "python" in Path(found).name


def _suggestion(folder: Path, parsed: Any) -> str:
    """Return a command line for the user to type, built from the command that the run has recorded."""
    asked = shlex.join(["ntp", "copies", "export", parsed.folder, "--to", str(parsed.to)])
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
        raise ConfigError(error.what, fix="say how many processes to start: --nproc-per-node") from error
    return started.workers * started.hosts


def _empty(to: Path, folder: Path) -> Path:
    """Return the folder; raise `ConfigError` unless it is empty or new, and outside of the copies."""
    fix = "name another one by --to"
    if to.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"--to {to} is inside the run's folder of copies, which is removed later", fix=fix)
    if to.exists() and not to.is_dir():
        raise ConfigError(f"--to {to} is not a folder", fix=fix)
    if to.exists() and any(to.iterdir()):
        raise ConfigError(f"--to {to} is not empty", fix=fix)
    return to


# ---------------------------------------------------------------- doing it


@contextlib.contextmanager
def _undisturbed(folder: Path) -> Iterator[Path]:
    """Yield a folder of copies that nobody changes or removes within the `with` block."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(free(folder))
        except FileNotFoundError:
            raise ConfigError(f"{folder} is no folder of a run", fix="name one that `ntp copies list` shows") from None
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
            f"{folder} belongs to a running job: {version} is first copied to {scratch.path}, which takes"
            f" {into.used / 1e6:.1f} MB until the checkpoint is written"
        )
        into.close()
        yield scratch.path
    finally:
        scratch.remove()


def _whole_or_nothing(to: Path, write: Callable[[], int]) -> int:
    """Call `write`; where it fails, remove all that it has written: the folder was empty before."""
    was_there, code = to.exists(), 1
    _require_writable(to)
    try:
        code = write()
        if not code and not any(to.iterdir()):
            _say("the script exited with 0, but wrote no checkpoint")
            code = 1
    finally:
        if code:
            _remove_all_in(to)
            if not was_there:
                to.rmdir()
    return code


def _require_writable(to: Path) -> None:
    """Raise unless a file can be made there. It tries, because a read-only file system does not show in the mode."""
    try:
        to.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=to).close()
    except OSError as error:
        raise ConfigError(f"--to {to} cannot be written to: {error}", fix="name another one by --to") from error


def _remove_all_in(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _write(folder: Path, processes: int, words: Sequence[str], to: Path, *, deepspeed: str | None) -> int:
    """Start the job's workers, which read from the environment that they are to save; return the exit code."""
    from ntp_plugin.launch import agent, torchrun_flags  # noqa: PLC0415

    with _undisturbed(folder) as source:
        flags = ["--standalone", "--nproc-per-node", str(processes), "--no-python"]
        started = torchrun_flags.parse([*flags, *words])
        return agent.run(started, agent.RunPolicy(resume=source, export=to, deepspeed=deepspeed))


def _say(what: str) -> None:
    print(f"ntp copies export: {what}", flush=True)
