"""The parser, and how an error becomes one line and an exit code."""

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from ntp_plugin import __version__
from ntp_plugin.cli import plan
from ntp_plugin.errors import ConfigError, NtpError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


class OneLineParser(argparse.ArgumentParser):
    """Complains by `ConfigError`, in one line, with a guess at what was meant."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and leaving."""
        raise ConfigError(message, way_out=f"see {self.prog} --help")

    def refuse_unknown(self, unknown: Sequence[str]) -> None:
        """Raise for the first of the words that no flag takes."""
        if not unknown:
            return
        flag = unknown[0].split("=")[0]
        known = [option for action in self._actions for option in action.option_strings]
        close = difflib.get_close_matches(flag, known, n=1)
        raise ConfigError(
            f"{flag} is not a known {'flag' if flag.startswith('-') else 'word'} of {self.prog}",
            way_out=f"did you mean {close[0]}" if close else f"see {self.prog} --help",
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    parser = OneLineParser(
        prog="ntp", description="Fault-tolerant training for Megatron and DeepSpeed.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"ntp_plugin {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    plan.add_command(commands)
    try:
        parsed, unknown = parser.parse_known_args(argv)
        parsed.parser.refuse_unknown(unknown)
        code: int = parsed.run(parsed)
        sys.stdout.flush()
    except NtpError as error:
        print(f"ntp: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


if __name__ == "__main__":
    sys.exit(main())
