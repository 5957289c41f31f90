"""`ntp check`: says before a job runs whether it is accepted, which losses it survives, and what a loss changes.

Reads a Megatron command line, a recipe of Megatron-LM's functional tests, or a DeepSpeed configuration. It builds no
model and starts nothing; most of its time goes into importing the framework.
"""

import argparse
import contextlib
import io
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ntp_plugin.cli.check_tables import print_check
from ntp_plugin.cli.parser import OneLineParser, number
from ntp_plugin.config.files import read_file
from ntp_plugin.errors import ConfigError
from ntp_plugin.planning.job_check import JobCheck, StartedRanks
from ntp_plugin.tested_versions.comparison import refusal

ACCEPTED, NOT_ACCEPTED = 0, 1
PIPED_WIDTH = 140
_MOST_RANKS = 4_194_304
_USUAL_HOST = 8
_MOST_PARAMETERS = 1e15
_RECIPES, _CONFIGURATIONS = (".yaml", ".yml"), (".json",)
_FILES = (*_RECIPES, *_CONFIGURATIONS)

_USAGE = """\
ntp check [--json] [--world-size N | --nnodes N --nproc-per-node N] SCRIPT ARGUMENTS
       ntp check [...] RECIPE.yaml [MORE ARGUMENTS]
       ntp check [...] [--tp N] [--parameters N] [--trainer hf|accelerate|loop] DS_CONFIG.json"""
_EXAMPLE = """\
The flags of ntp check stand before a script; beside a file they stand anywhere.

examples:
  ntp check --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4 ... --ntp-enable
  ntp check model_config.yaml --ntp-copies-mode near
  ntp check ds_config.json --world-size 8 --parameters 7e9
  ntp check ds_config.json --trainer accelerate

exit code: 0 the job is accepted, 1 it is not, 2 bad input
"""


def add_command(commands: "argparse._SubParsersAction[OneLineParser]") -> None:
    """Add `check` to the commands of `ntp`; `run` parses its words, since a script's flags are not its own."""
    commands.add_parser("check", help="say whether a job is accepted, and which losses it survives")


def run(words: Sequence[str]) -> int:
    """Check the job that these words name, print the result, and return the exit code."""
    parsed = _parsed(words)
    with _quiet():
        check = _check(parsed)
    if parsed.json:
        print(check.to_json())
    else:
        print_check(check, Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False))
    return ACCEPTED if check.accepted else NOT_ACCEPTED


# ---------------------------------------------------------------- the command line


def _parsed(words: Sequence[str]) -> Any:
    parser = _parser()
    parser.add_argument("job", metavar="SCRIPT|RECIPE.yaml|DS_CONFIG.json", help="what to check")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="the script's arguments")
    parsed, unknown = parser.parse_known_args(words)
    parser.refuse_unknown(unknown)
    if Path(parsed.job).suffix in _FILES:
        parsed, more = _parser().parse_known_args(parsed.words, parsed)
        parsed.words = more
    if parsed.world_size is not None and parsed.nnodes is not None:
        raise ConfigError("--world-size and --nnodes are both given", fix="--nnodes with --nproc-per-node")
    return parsed


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="ntp check",
        usage=_USAGE,
        description="Say whether a job is accepted with ntp_plugin, which losses it survives, and what a loss changes.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    ranks, count = number(int, least=1, most=_MOST_RANKS), number(float, least=1.0, most=_MOST_PARAMETERS)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--world-size", type=ranks, metavar="N", help="processes of the job")
    parser.add_argument("--nnodes", type=ranks, metavar="N", help="hosts (default: 1, with --nproc-per-node)")
    parser.add_argument("--nproc-per-node", type=ranks, metavar="N", help="processes of each host (default: 8)")
    parser.add_argument("--tp", type=ranks, metavar="N", help="DeepSpeed: tensor-parallel degree of the script's mpu")
    parser.add_argument(
        "--parameters", type=count, metavar="N", help="DeepSpeed: parameters of the model, for the memory of its copies"
    )
    parser.add_argument(
        "--trainer",
        choices=("hf", "accelerate", "loop"),
        help='DeepSpeed: who fills in values that are "auto" (default: the HF Trainer)',
    )
    return parser


# ---------------------------------------------------------------- what is checked


def _check(parsed: Any) -> JobCheck:
    path = Path(parsed.job)
    if path.suffix in _CONFIGURATIONS:
        return _deepspeed(parsed, path)
    for flag in ("tp", "parameters", "trainer"):
        if getattr(parsed, flag) is not None:
            raise ConfigError(f"--{flag} is for a DeepSpeed configuration", fix="leave it out")
    return _recipe(parsed, path) if path.suffix in _RECIPES else _megatron(_with_files(parsed.words), _ranks(parsed))


def _megatron(words: Sequence[str], ranks: StartedRanks) -> JobCheck:
    with _framework("Megatron", "megatron-core"):
        from ntp_plugin.megatron import job_check  # noqa: PLC0415  (imports torch)

        return job_check.check_job(words, ranks)


def _recipe(parsed: Any, path: Path) -> JobCheck:
    from ntp_plugin.megatron import recipe_file  # noqa: PLC0415

    words = recipe_file.words_of(_yaml(path), str(path))
    ranks, hosts = _ranks(parsed), recipe_file.hosts_in(str(path.absolute()))
    if ranks.size is None and hosts is not None:
        ranks = StartedRanks(size=hosts[0] * hosts[1], per_host=ranks.per_host or hosts[1])
    return _megatron([*words, *_with_files(parsed.words)], ranks)


def _deepspeed(parsed: Any, path: Path) -> JobCheck:
    _parser().refuse_unknown(parsed.words)
    config = read_file(path, least='write at least {"ntp": {"enabled": true}, "train_batch_size": 64}')
    with _framework("DeepSpeed", "deepspeed"):
        from ntp_plugin.deepspeed import job_check  # noqa: PLC0415  (imports deepspeed)

        parameters = None if parsed.parameters is None else int(parsed.parameters)
        return job_check.check_job(
            config, _ranks(parsed), tp=parsed.tp or 1, parameters=parameters, trainer=parsed.trainer
        )


def _ranks(parsed: Any) -> StartedRanks:
    """Return the processes that the flags name."""
    each = parsed.nproc_per_node
    if parsed.world_size is not None:
        return StartedRanks(size=parsed.world_size, per_host=each)
    if parsed.nnodes is None and each is None:
        return StartedRanks()
    each = each or _USUAL_HOST
    return StartedRanks(size=(parsed.nnodes or 1) * each, per_host=each)


def _with_files(words: Sequence[str]) -> list[str]:
    """Replace each `@FILE`, as recipes of this repository have it, by the words in the file."""
    found: list[str] = []
    for word in words:
        try:
            found += Path(word[1:]).read_text().split() if word.startswith("@") else [word]
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"{word} cannot be read: {reason}", fix="name a file of arguments") from None
    return found


def _yaml(path: Path) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]  # noqa: PLC0415  (comes with Megatron)
    except ImportError:
        raise ConfigError("PyYAML is not installed", fix="pip install pyyaml") from None
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError(f"{path} cannot be read: {reason}", fix="name a recipe with MODEL_ARGS") from None


@contextlib.contextmanager
def _framework(name: str, package: str) -> Iterator[None]:
    """Raise `ConfigError` where the framework is not installed, and `Refused` where it lacks a function."""
    try:
        yield
    except ImportError as error:
        if (changed := refusal(name.lower())) is not None:
            raise changed from None
        if error.name is None or error.name.split(".")[0] not in ("torch", "megatron", "deepspeed"):
            raise
        raise ConfigError(
            f"{name} is not installed here: {error}", fix=f"pip install {package}, as for the job"
        ) from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what frameworks print and warn of while they are imported from the result."""
    nowhere = io.StringIO()
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
