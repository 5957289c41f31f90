"""A parser that complains in one line."""

import argparse
import contextlib
import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ntp_plugin.config.schema import LARGEST_NUMBER
from ntp_plugin.errors import ConfigError


class OneLineParser(argparse.ArgumentParser):
    """Complains by `ConfigError`, in one line, with a guess at what was meant.

    A parser that `takes_command` puts all words after the first `--` into `command`, as they are.
    """

    takes_command = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does it, for the words before the command."""
        if not self.takes_command:
            return super().parse_known_args(args, namespace)
        words = list(args)
        at = words.index("--") if "--" in words else len(words)
        found, unknown = super().parse_known_args(words[:at], namespace)
        found.command = words[at + 1 :]
        return found, unknown

    @property
    def flags(self) -> list[str]:
        """All that it knows."""
        return [flag for action in self._actions for flag in action.option_strings]

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and leaving."""
        raise ConfigError(message, way_out=f"see {self.prog} --help")

    def refuse_unknown(self, unknown: Sequence[str]) -> None:
        """Raise for the first of the words that no flag takes."""
        if not unknown:
            return
        flag = unknown[0].split("=")[0]
        close = difflib.get_close_matches(flag, self.flags, n=1)
        raise ConfigError(
            f"{flag} is not a known {'flag' if flag.startswith('-') else 'word'} of {self.prog}",
            way_out=f"did you mean {close[0]}" if close else f"see {self.prog} --help",
        )


def number[Kind: (int, float)](kind: type[Kind], *, least: Kind, most: float = LARGEST_NUMBER) -> Callable[[str], Kind]:
    """Make the `type` of a flag that takes a number in these bounds; what is no number is in none."""

    def read(text: str) -> Kind:
        with contextlib.suppress(ValueError):
            if least <= (value := kind(text)) <= most:
                return value
        words = "a whole number" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"{text!r} is not {words} from {least:,} to {most:,}")

    return read


def add_run(parser: OneLineParser) -> None:
    """The run that a command is about."""
    parser.add_argument(
        "folder",
        metavar="RUN_DIR",
        type=Path,
        nargs="?",
        help="what ntp run --ntp-run-dir was told (default: the newest run on this machine that was told none)",
    )
