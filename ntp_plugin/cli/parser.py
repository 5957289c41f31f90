"""The argument parser of all commands: reports a mistake in one line."""

import argparse
import contextlib
import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ntp_plugin.config.schema import LARGEST_NUMBER
from ntp_plugin.errors import ConfigError


class OneLineParser(argparse.ArgumentParser):
    """Raises `ConfigError` with one line and a guess at what was meant, instead of printing the usage.

    A parser with `takes_command` puts all words after the first `--` unchanged into `command`.
    """

    takes_command = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; with `takes_command` only the words before `--`."""
        if not self.takes_command:
            return super().parse_known_args(args, namespace)
        words = list(args)
        at = words.index("--") if "--" in words else len(words)
        found, unknown = super().parse_known_args(words[:at], namespace)
        found.command = words[at + 1 :]
        return found, unknown

    @property
    def flags(self) -> list[str]:
        """All flags of this parser."""
        return [flag for action in self._actions for flag in action.option_strings]

    def error(self, message: str) -> NoReturn:
        """Raise `ConfigError`, where argparse prints the usage and exits."""
        raise ConfigError(message, fix=f"see {self.prog} --help")

    def refuse_unknown(self, unknown: Sequence[str]) -> None:
        """Raise `ConfigError` for the first word that the parser did not know."""
        if not unknown:
            return
        flag = unknown[0].split("=")[0]
        close = difflib.get_close_matches(flag, self.flags, n=1)
        raise ConfigError(
            f"{flag} is not a known {'flag' if flag.startswith('-') else 'word'} of {self.prog}",
            fix=f"did you mean {close[0]}" if close else f"see {self.prog} --help",
        )


def number[Kind: (int, float)](kind: type[Kind], *, least: Kind, most: float = LARGEST_NUMBER) -> Callable[[str], Kind]:
    """Return the `type` of a flag that takes a number within these bounds; NaN is within none."""

    def read(text: str) -> Kind:
        with contextlib.suppress(ValueError):
            if least <= (value := kind(text)) <= most:
                return value
        words = "a whole number" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"{text!r} is not {words} from {least:,} to {most:,}")

    return read


def add_run(parser: OneLineParser) -> None:
    """Add the folder of a run to a parser; without it the command takes the newest run."""
    parser.add_argument(
        "folder",
        metavar="RUN_DIR",
        type=Path,
        nargs="?",
        help="the folder of ntp run --ntp-run-dir (default: the newest run here that was started without it)",
    )
