"""Checks torchrun's flags and the script before anything is started.

torch finds most mistakes late: in an assertion without a message, after the store is started, or in every worker at
once. Here each mistake is reported in one line, and leaves no folder and no process behind. Mistakes of the script and
of other hosts are not checked here.
"""

import argparse
import difflib
import importlib.util
import math
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NoReturn

from torch.distributed.elastic.events.handlers import get_logging_handler
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config, parse_rendezvous_endpoint
from torch.distributed.run import (
    _get_logs_specs_class,
    determine_local_world_size,
    get_args_parser,
    parse_min_max_nnodes,
)

from ntp_plugin.config import schema
from ntp_plugin.config.sections import TrainingPolicy
from ntp_plugin.errors import ConfigError

_MOST_WORKERS = 4096
"""Most workers of a host. A greater number is a typing error, and torch would try to start them all."""
_LONGEST_LOOK_S = 3600.0
_STORE_IN_RANK_0 = ("static", "etcd")
_WHOLE_SECONDS = ("join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout", "read_timeout")
_WHOLE_NUMBERS = (*_WHOLE_SECONDS, "keep_alive_interval", "keep_alive_max_attempt")
_SIMILAR = 0.8


def parse(words: Sequence[str], *, ours: Sequence[str] = ()) -> argparse.Namespace:
    """Parse torchrun's flags, the script and its arguments, and refuse what cannot start.

    Args:
        words: The command line without the flags of `ntp run`.
        ours: The flags of `ntp run`, for a guess at a mistyped flag.

    Returns:
        The result of torchrun's own parser.

    Raises:
        ConfigError: A flag is unknown or has a wrong value, or the script does not exist.
    """
    parser = get_args_parser()
    parser.error = _refuse_words  # type: ignore[method-assign]
    found, unknown = parser.parse_known_args(list(words))
    if unknown:
        _refuse_flag(unknown[0], [*ours, *(flag for action in parser._actions for flag in action.option_strings)])
    for check in (_check_workers, _check_rendezvous, _check_running, _check_output, _check_script, _check_log_dir):
        check(found)
    return found


def most_hosts(arguments: argparse.Namespace) -> int:
    """Return the greatest number of hosts of the job.

    Raises:
        ConfigError: --nnodes is neither a number of hosts nor a range.
    """
    fix = "a number from 1 on, or MIN:MAX"
    try:
        least, most = parse_min_max_nnodes(arguments.nnodes)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"--nnodes={arguments.nnodes} is not a number of hosts", fix=fix) from error
    if not 0 < least <= most:
        raise ConfigError(f"--nnodes={arguments.nnodes}: {least} to {most} hosts is not a valid range", fix=fix)
    return int(most)


def rendezvous_configuration(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the settings of --rdzv-conf by name.

    Raises:
        ConfigError: It is no list of NAME=VALUE, or a value is not a number where torch expects one.
    """
    try:
        found = _parse_rendezvous_config(arguments.rdzv_conf)
    except ValueError as error:
        raise ConfigError(
            f"--rdzv-conf={arguments.rdzv_conf} is not a list of settings", fix="NAME=VALUE,NAME=VALUE"
        ) from error
    for name in _WHOLE_NUMBERS:
        if name in found and not found[name].isdecimal():
            raise ConfigError(f"--rdzv-conf {name}={found[name]} is not a whole number")
    return found


def store_in_rank_0() -> ConfigError:
    """Make the error for a rendezvous that `ntp run` cannot use."""
    return ConfigError(
        "with this rendezvous the store runs in rank 0, and is lost with it",
        fix="use --standalone, or --rdzv-backend c10d with --rdzv-endpoint",
    )


# ---------------------------------------------------------------- flags


def _refuse_words(message: str) -> NoReturn:
    raise ConfigError(message, fix="see ntp run --help, and torchrun --help")


def _refuse_flag(word: str, known: Sequence[str]) -> NoReturn:
    flag = word.partition("=")[0]
    close = difflib.get_close_matches(flag, known, n=1, cutoff=_SIMILAR)
    if close and flag not in schema.flags(TrainingPolicy, prefix="ntp-"):
        raise ConfigError(f"{flag} is not a known flag of ntp run", fix=f"did you mean {close[0]}")
    raise ConfigError(
        f"{flag} is not a flag of ntp run or of torchrun",
        fix=f"put flags of the script and of its framework after the script: ntp run SCRIPT {word}",
    )


def _check_workers(arguments: argparse.Namespace) -> None:
    given, fix = arguments.nproc_per_node, f"a number from 1 to {_MOST_WORKERS:,}, or auto, gpu or cpu"
    try:
        workers = determine_local_world_size(given)
    except ValueError as error:
        reason = str(error).rstrip(".")
        raise ConfigError(f"--nproc-per-node={given} is not a number of workers: {reason}", fix=fix) from None
    if not 1 <= workers <= _MOST_WORKERS:
        raise ConfigError(f"--nproc-per-node={given}: a host cannot start {workers:,} workers", fix=fix)


def _check_rendezvous(arguments: argparse.Namespace) -> None:
    hosts = most_hosts(arguments)
    rendezvous_configuration(arguments)
    if arguments.standalone:
        return
    backend, port = arguments.rdzv_backend, arguments.master_port
    if backend == "static" and not arguments.rdzv_endpoint and port is None and hosts == 1:
        return  # torch uses c10d on a free port
    if backend in _STORE_IN_RANK_0:
        raise store_in_rank_0()
    if backend not in rendezvous_handler_registry._registry or (
        backend == "etcd-v2" and importlib.util.find_spec("etcd") is None
    ):
        raise ConfigError(f"--rdzv-backend={backend} is not known here", fix="--rdzv-backend=c10d")
    _check_endpoint(arguments.rdzv_endpoint)


def _check_endpoint(endpoint: str) -> None:
    fix = "HOST or HOST:PORT with a port from 0 to 65535, an IPv6 address in brackets"
    try:
        host, _ = parse_rendezvous_endpoint(endpoint, DEFAULT_PORT)
    except ValueError as error:
        raise ConfigError(f"--rdzv-endpoint={endpoint} is not HOST:PORT", fix=fix) from error
    if ":" in host and "[" not in endpoint:  # torch reads everything before the last colon as the name
        raise ConfigError(f"--rdzv-endpoint={endpoint} has {endpoint.count(':')} colons", fix=fix)


def _check_running(arguments: argparse.Namespace) -> None:
    if arguments.max_restarts:
        raise ConfigError(
            f"--max-restarts = {arguments.max_restarts} would restart all workers after a failure",
            fix="leave it out; --ntp-respawn replaces single workers",
        )
    interval = arguments.monitor_interval
    if not (math.isfinite(interval) and 0 < interval <= _LONGEST_LOOK_S):
        raise ConfigError(f"--monitor-interval={interval} is not above 0 and up to {_LONGEST_LOOK_S:g} seconds")
    if (arguments.shutdown_timeout or 0) < 0:
        raise ConfigError(f"--shutdown-timeout={arguments.shutdown_timeout} must be 0 or more seconds")
    for name in arguments.signals_to_handle.split(","):
        if name not in signal.Signals.__members__:
            raise ConfigError(f"--signals-to-handle: {name!r} is not a signal", fix="names such as SIGTERM,SIGUSR1")


# ---------------------------------------------------------------- output


def _check_output(arguments: argparse.Namespace) -> None:
    for flag, text in (("redirects", arguments.redirects), ("tee", arguments.tee)):
        try:
            Std.from_str(text)
        except ValueError as error:
            raise ConfigError(
                f"--{flag}={text} is not a choice of streams", fix="0 to 3, or RANK:0 to RANK:3 with commas"
            ) from error
    ranks = arguments.local_ranks_filter
    if ranks and not all(rank.strip().isdecimal() for rank in ranks.split(",")):
        raise ConfigError(f"--local-ranks-filter={ranks} are not local ranks", fix="numbers from 0 on: 0,1,2")
    try:
        _get_logs_specs_class(arguments.logs_specs)
    except ValueError as error:
        raise ConfigError(f"--logs-specs={arguments.logs_specs} is not installed") from error
    try:
        get_logging_handler(arguments.event_log_handler)
    except KeyError as error:
        raise ConfigError(
            f"--event-log-handler={arguments.event_log_handler} is not known", fix="console or null"
        ) from error


def _check_log_dir(arguments: argparse.Namespace) -> None:
    """Make the folder, as torch would. It is the last check, so that no other mistake leaves the folder behind."""
    if arguments.log_dir is None:
        return
    try:
        Path(arguments.log_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--log-dir={arguments.log_dir}: the folder cannot be made: {error.strerror}") from error


# ---------------------------------------------------------------- the script


def _check_script(arguments: argparse.Namespace) -> None:
    script = arguments.training_script
    if arguments.run_path:
        raise ConfigError("--run-path starts no processes that ntp run can watch", fix="leave it out")
    if arguments.no_python and arguments.module:
        raise ConfigError("--no-python and --module are both given", fix="choose one")
    if arguments.no_python:
        _check_program(script)
    elif arguments.module:
        _check_module(script)
    else:
        _check_file(Path(script), script)


def _check_program(program: str) -> None:
    if shutil.which(program) is None:
        here = Path(program).is_file() and os.sep not in program
        raise ConfigError(
            f"{program!r} is not a program that can be started here",
            fix=f"./{program} names the one in this folder" if here else "name a file that is executable",
        )


def _check_module(module: str) -> None:
    """Look for the module's package without importing it. Another Python than this one may have other packages."""
    package = module.partition(".")[0]
    is_there = bool(package) and (
        PathFinder.find_spec(package, [str(Path.cwd())]) is not None or importlib.util.find_spec(package) is not None
    )
    if not is_there and os.environ.get("PYTHON_EXEC", sys.executable) == sys.executable:
        raise ConfigError(f"there is no module {module!r}", fix="install it, or set PYTHONPATH; -m takes a name")


def _check_file(path: Path, script: str) -> None:
    if not script or not path.exists():
        raise ConfigError(
            f"there is no script {script!r} in {Path.cwd()}",
            fix="name a file; put torchrun's flags before it, and its own flags after it",
        )
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise ConfigError(f"the script {script!r} is a folder without __main__.py", fix="name a file")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"the script {script!r} cannot be read by this user", fix=f"chmod u+r {script}")
