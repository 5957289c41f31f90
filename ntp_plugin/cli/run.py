"""`ntp run`: starts a job as torchrun does, and keeps it running when a rank is lost.

It takes the flags that begin with `--ntp-`. All others go to torchrun unchanged.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ntp_plugin.chaos.faults import worker_words
from ntp_plugin.cli.parser import OneLineParser, number
from ntp_plugin.config import schema
from ntp_plugin.config.files import read_file
from ntp_plugin.config.sections import TrainingPolicy
from ntp_plugin.errors import ConfigError
from ntp_plugin.launch.kept_copies import DAY_S, dead_run
from ntp_plugin.launch.recording import RecordingOptions
from ntp_plugin.launch.run_folder import COPIES, free, left_by_the_dead, shared_memory
from ntp_plugin.membership.failure_detector import Thresholds
from ntp_plugin.output_folders import require_usable
from ntp_plugin.private_folders import NotPrivate, require_private
from ntp_plugin.recovery.script_failure import ON_ERROR

_MOST_WORKERS = 1_000_000
_LONGEST_S = 1e9
_ON = "on"
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([smhd]?)")


def run(words: Sequence[str]) -> int:
    """Start the job and return its exit code."""
    parser = _parser()
    parsed, rest = parser.parse_known_args(list(words))
    _check_record(parsed)
    thresholds = _thresholds(parsed.ntp_thresholds)
    keep_s = _seconds("--ntp-copies-keep", parsed.ntp_copies_keep)
    resume = _resumed(parsed.ntp_resume) if parsed.ntp_resume is not None else None
    folder = None if parsed.ntp_run_dir is None else Path(parsed.ntp_run_dir)
    recording = RecordingOptions(
        folder=folder, record=not parsed.ntp_no_record, wandb=parsed.ntp_wandb, prometheus=parsed.ntp_prometheus
    )
    from ntp_plugin.launch import agent, torchrun_flags  # noqa: PLC0415  (brings torch, which no other command needs)

    policy = agent.RunPolicy(
        respawn=max(parsed.ntp_respawn, parsed.ntp_spares),
        spares=parsed.ntp_spares,
        fork=parsed.ntp_fork,
        resume=resume,
        deepspeed=None if parsed.ntp_deepspeed is None else deepspeed_block(parsed.ntp_deepspeed),
        copies_keep_s=keep_s,
        on_error=parsed.ntp_on_error,
        thresholds=thresholds,
        through=worker_words(folder) if parsed.ntp_chaos and folder else (),
        recording=recording,
    )
    flags = torchrun_flags.parse(rest, ours=parser.flags)
    with _held(resume):
        return agent.run(flags, policy)


def _check_record(parsed: argparse.Namespace) -> None:
    """Raise `ConfigError` where the flags contradict each other about the record of the run."""
    if parsed.ntp_run_dir is not None:
        if parsed.ntp_no_record:
            raise ConfigError("--ntp-no-record and --ntp-run-dir are both given", fix="choose one")
        require_usable(parsed.ntp_run_dir, "--ntp-run-dir")
    elif parsed.ntp_chaos:
        raise ConfigError("--ntp-chaos needs a folder for the ordered faults", fix="name one by --ntp-run-dir")


def _parser() -> OneLineParser:
    """Make the parser of the `--ntp-` flags."""
    parser = OneLineParser(
        prog="ntp run",
        description="Run a job as torchrun does, and keep it running when a worker dies.",
        epilog="All other flags are torchrun's: see torchrun --help. All of these come before the script; the flags of"
        " the script and of its framework, such as --ntp-enable of Megatron, come after it.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--ntp-deepspeed",
        metavar="FILE",
        help="enable the plugin in a DeepSpeed script that builds its configuration itself; FILE (.toml or .json) has"
        " the keys of the `ntp` block, and the word on stands for a file without any",
    )
    _add_workers(parser.add_argument_group("lost workers"))
    _add_copies(parser.add_argument_group("copies in this host's memory"))
    _add_record(parser.add_argument_group("the record of the run"))
    return parser


def _add_workers(group: "argparse._ArgumentGroup") -> None:
    count = number(int, least=0, most=_MOST_WORKERS)
    group.add_argument(
        "--ntp-respawn", type=count, default=0, metavar="N", help="how many lost workers to replace, in all"
    )
    group.add_argument(
        "--ntp-spares",
        type=count,
        default=0,
        metavar="N",
        help="how many warm spare processes to keep, with imports done; raises --ntp-respawn to at least N",
    )
    group.add_argument(
        "--ntp-fork",
        action="store_true",
        help="fork workers from one process that has done the imports: they start at once, and a lost worker is"
        " replaced at once, without spares",
    )
    group.add_argument(
        "--ntp-on-error",
        choices=ON_ERROR,
        default="stop",
        help="what to do when a rank fails by a Python exception of its own script that no loss has caused: stop ends"
        " the job with code 9 (default); retry treats the rank as lost, and ends the job when the same exception comes"
        " again; evict treats the rank as lost",
    )
    group.add_argument(
        "--ntp-thresholds",
        default="",
        metavar="NAME=S,...",
        help=f"timeouts after which a rank or a host counts as lost, in seconds (defaults: {_defaults()})",
    )


def _add_copies(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--ntp-resume",
        metavar="FOLDER",
        help="resume from the copies that a dead run has left in this host's memory (see ntp copies list); latest: the"
        " newest ones",
    )
    group.add_argument(
        "--ntp-copies-keep",
        default="1d",
        metavar="TIME",
        help="how long copies stay in this host's memory if this run dies, for example 90s, 30m, 12h or 2d; a new run"
        " that needs the memory removes the oldest earlier (default: %(default)s; 0: until the next run)",
    )


def _add_record(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--ntp-run-dir",
        metavar="DIR",
        help="a folder for the record of the run: its events, as lines of JSON (see ntp status, ntp report); without it"
        " the record is among this machine's temporary files",
    )
    group.add_argument("--ntp-no-record", action="store_true", help="keep no record")
    group.add_argument(
        "--ntp-wandb",
        default="",
        metavar="PROJECT",
        help="report to Weights & Biases, as one run whichever rank is lost; needs --ntp-run-dir",
    )
    group.add_argument(
        "--ntp-prometheus",
        type=number(int, least=0, most=65535),
        metavar="PORT",
        help="serve metrics at http://127.0.0.1:PORT/metrics; 0 takes a free port; needs --ntp-run-dir",
    )
    group.add_argument(
        "--ntp-chaos", action="store_true", help="let `ntp chaos` inject faults into this run; needs --ntp-run-dir"
    )


def deepspeed_block(file: str) -> str:
    """Return the `ntp` block of a DeepSpeed job, as JSON, which enables the plugin; `on`: without other keys."""
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError("--ntp-deepspeed: deepspeed is not installed", fix="pip install 'ntp-plugin[deepspeed]'")
    try:
        block = {"enabled": True} | (read_file(Path(file)) if file != _ON else {})
        schema.read(TrainingPolicy, block, where="ntp.")
    except ConfigError as error:
        raise ConfigError(f"--ntp-deepspeed: {error.what}", fix=error.fix) from None
    return json.dumps(block)


def _resumed(name: str) -> Path:
    dead = [dead_run(folder) for folder in left_by_the_dead(shared_memory(), COPIES)]
    left = [run.folder for run in sorted(dead, key=lambda run: run.died_at)]
    if name == "latest" and left:
        return left[-1]
    if Path(name) in left:
        return Path(name)
    if Path(name).exists():
        require_private(Path(name))
    found = ", ".join(map(str, left)) or "none"
    raise ConfigError(f"--ntp-resume {name}: no copies of a dead run there", fix=f"name a folder of this host: {found}")


@contextlib.contextmanager
def _held(resume: Path | None) -> Iterator[None]:
    """Hold the lock of the folder that the job resumes from, so that nobody removes it."""
    with contextlib.ExitStack() as held:
        if resume is not None:
            try:
                held.enter_context(free(resume, shared=True))
            except (OSError, NotPrivate) as error:
                raise ConfigError(
                    f"--ntp-resume {resume}: another command is exporting or removing it",
                    fix="look at ntp copies list, then start the same command again",
                ) from error
        yield


def _seconds(flag: str, text: str) -> float:
    """Return the seconds of a duration such as `30m`: a number with one of s, m, h, d."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ConfigError(f"{flag} = {text!r} is not a duration", fix="write 90s, 30m, 12h or 2d")
    return float(match[1]) * {"s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0, "d": DAY_S}[match[2]]


def _defaults() -> str:
    return ", ".join(f"{name}={value:g}" for name, value in dataclasses.asdict(Thresholds()).items())


def thresholds_in(words: Sequence[str]) -> Thresholds:
    """Return the thresholds of a job that `ntp run` starts with these words."""
    return _thresholds(_parser().parse_known_args(list(words))[0].ntp_thresholds)


def _thresholds(words: str) -> Thresholds:
    known = dataclasses.asdict(Thresholds())
    given: dict[str, float] = {}
    for word in filter(None, words.split(",")):
        name, _, value = word.partition("=")
        if name not in known:
            raise ConfigError(f"--ntp-thresholds: {name} is not known", fix=f"choose from {', '.join(known)}")
        given[name] = _threshold(name, value)
    return Thresholds(**given)


def _threshold(name: str, text: str) -> float:
    try:
        return number(float, least=0.0, most=_LONGEST_S)(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--ntp-thresholds: {name}: {error}", fix=f"{name}=SECONDS") from None
