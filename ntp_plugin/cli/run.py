"""`ntp run`: torchrun's command line for jobs that survive their ranks.

Everything that is not a flag of ours goes to torchrun as it is.
"""

import argparse
import contextlib
import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ntp_plugin.chaos.faults import worker_words
from ntp_plugin.cli.parser import OneLineParser, number
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
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([smhd]?)")


def run(words: Sequence[str]) -> int:
    """Start the job; returns its exit code."""
    parser = _parser()
    said, rest = parser.parse_known_args(list(words))
    _check_record(said)
    thresholds = _thresholds(said.ntp_thresholds)
    keep_s = _seconds("--ntp-copies-keep", said.ntp_copies_keep)
    resume = _resumed(said.ntp_resume) if said.ntp_resume is not None else None
    folder = None if said.ntp_run_dir is None else Path(said.ntp_run_dir)
    recording = RecordingOptions(
        folder=folder, record=not said.ntp_no_record, wandb=said.ntp_wandb, prometheus=said.ntp_prometheus
    )
    from ntp_plugin.launch import agent, torchrun_flags  # noqa: PLC0415  (brings torch, which no other command needs)

    policy = agent.RunPolicy(
        respawn=max(said.ntp_respawn, said.ntp_spares),
        spares=said.ntp_spares,
        fork=said.ntp_fork,
        resume=resume,
        copies_keep_s=keep_s,
        on_error=said.ntp_on_error,
        thresholds=thresholds,
        through=worker_words(folder) if said.ntp_chaos and folder else (),
        recording=recording,
    )
    flags = torchrun_flags.parse(rest, ours=parser.flags)
    with _held(resume):
        return agent.run(flags, policy)


def _check_record(said: argparse.Namespace) -> None:
    """Refuse flags that do not agree on where the record of the run is."""
    if said.ntp_run_dir is not None:
        if said.ntp_no_record:
            raise ConfigError("--ntp-no-record and --ntp-run-dir are both said", way_out="choose one")
        require_usable(said.ntp_run_dir, "--ntp-run-dir")
    elif said.ntp_chaos:
        raise ConfigError("--ntp-chaos needs a place for its orders", way_out="name a folder: --ntp-run-dir")


def _parser() -> OneLineParser:
    """Our flags."""
    parser = OneLineParser(
        prog="ntp run",
        description="Run a job as torchrun does, but let the others go on when a worker dies.",
        epilog="All other flags are torchrun's: see torchrun --help. They and ours stand before the script; its own"
        " flags and those of its framework, such as Megatron's --ntp-enable, stand behind it.",
        allow_abbrev=False,
    )
    _add_workers(parser.add_argument_group("lost workers"))
    _add_copies(parser.add_argument_group("copies in this host's memory"))
    _add_record(parser.add_argument_group("the record of the run"))
    return parser


def _add_workers(group: "argparse._ArgumentGroup") -> None:
    count = number(int, least=0, most=_MOST_WORKERS)
    group.add_argument(
        "--ntp-respawn", type=count, default=0, metavar="N", help="how many lost workers to start anew, in all"
    )
    group.add_argument(
        "--ntp-spares",
        type=count,
        default=0,
        metavar="N",
        help="how many processes to keep warm, with their imports done; raises --ntp-respawn to at least N",
    )
    group.add_argument(
        "--ntp-fork",
        action="store_true",
        help="fork workers from one process that has done the imports: they start at once, and a lost one is back at"
        " once, without spares",
    )
    group.add_argument(
        "--ntp-on-error",
        choices=ON_ERROR,
        default="stop",
        help="what a Python exception of the script's own, which no loss has caused, does: stop ends the job with code"
        " 9 (default); retry takes the rank for lost, and ends the job where the same exception comes again; evict"
        " takes the rank for lost",
    )
    group.add_argument(
        "--ntp-thresholds",
        default="",
        metavar="NAME=S,...",
        help=f"when a rank or a host is taken for lost, in seconds (defaults: {_defaults()})",
    )


def _add_copies(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--ntp-resume",
        metavar="FOLDER",
        help="begin from the copies that a dead run has left in this host's memory (see ntp copies list); latest: the"
        " newest of them",
    )
    group.add_argument(
        "--ntp-copies-keep",
        default="1d",
        metavar="TIME",
        help="how long copies stay in this host's memory if this run dies, for example 90s, 30m, 12h or 2d; the oldest"
        " go earlier where a new run needs their room (default: %(default)s; 0: until the next run)",
    )


def _add_record(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--ntp-run-dir",
        metavar="DIR",
        help="a folder for the record of the run: what happens, as lines of JSON (see ntp status, ntp report);"
        " without it the record is among this machine's temporary files",
    )
    group.add_argument("--ntp-no-record", action="store_true", help="keep no record")
    group.add_argument(
        "--ntp-wandb",
        default="",
        metavar="PROJECT",
        help="have the run in Weights & Biases, as one run whoever of the job dies; needs --ntp-run-dir",
    )
    group.add_argument(
        "--ntp-prometheus",
        type=number(int, least=0, most=65535),
        metavar="PORT",
        help="show the run's numbers at http://127.0.0.1:PORT/metrics; 0 takes a free port; needs --ntp-run-dir",
    )
    group.add_argument(
        "--ntp-chaos", action="store_true", help="let faults strike that `ntp chaos` orders; needs --ntp-run-dir"
    )


def _resumed(said: str) -> Path:
    dead = [dead_run(folder) for folder in left_by_the_dead(shared_memory(), COPIES)]
    left = [run.folder for run in sorted(dead, key=lambda run: run.died_at)]
    if said == "latest" and left:
        return left[-1]
    if Path(said) in left:
        return Path(said)
    if Path(said).exists():
        require_private(Path(said))
    found = ", ".join(map(str, left)) or "none"
    raise ConfigError(f"--ntp-resume {said}: there are no copies of a dead run there", way_out=f"on this host: {found}")


@contextlib.contextmanager
def _held(resume: Path | None) -> Iterator[None]:
    """Hold the folder that the job resumes from: nobody removes it meanwhile."""
    with contextlib.ExitStack() as held:
        if resume is not None:
            try:
                held.enter_context(free(resume, shared=True))
            except (OSError, NotPrivate) as error:
                raise ConfigError(
                    f"--ntp-resume {resume}: another command exports or removes it just now",
                    way_out="ntp copies list shows what is there; then start the same command again",
                ) from error
        yield


def _seconds(flag: str, text: str) -> float:
    """Return a duration that was written as a number and one of s, m, h, d."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ConfigError(f"{flag} = {text!r} is no duration", way_out="write 90s, 30m, 12h or 2d")
    return float(match[1]) * {"s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0, "d": DAY_S}[match[2]]


def _defaults() -> str:
    return ", ".join(f"{name}={value:g}" for name, value in dataclasses.asdict(Thresholds()).items())


def thresholds_in(words: Sequence[str]) -> Thresholds:
    """Those of a job that is started by these words."""
    return _thresholds(_parser().parse_known_args(list(words))[0].ntp_thresholds)


def _thresholds(words: str) -> Thresholds:
    known = dataclasses.asdict(Thresholds())
    given: dict[str, float] = {}
    for word in filter(None, words.split(",")):
        name, _, value = word.partition("=")
        if name not in known:
            raise ConfigError(f"--ntp-thresholds: {name} is not known", way_out=f"known are {', '.join(known)}")
        given[name] = _threshold(name, value)
    return Thresholds(**given)


def _threshold(name: str, text: str) -> float:
    try:
        return number(float, least=0.0, most=_LONGEST_S)(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--ntp-thresholds: {name}: {error}", way_out=f"{name}=SECONDS") from None
