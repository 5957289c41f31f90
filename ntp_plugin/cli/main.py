"""The `ntp` command: runs a subcommand, and turns an error into one line and an exit code."""

import os
import sys
from collections.abc import Sequence

from ntp_plugin import __version__
from ntp_plugin.cli import chaos, chaos_outside, check, copies, plan, report, run, simulate, status, store
from ntp_plugin.cli.parser import OneLineParser
from ntp_plugin.errors import NtpError
from ntp_plugin.launch import quick_exit
from ntp_plugin.telemetry.printable import printable

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    parser = OneLineParser(
        prog="ntp", description="Fault-tolerant training for Megatron and DeepSpeed.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"ntp_plugin {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    check.add_command(commands)
    plan.add_command(commands)
    simulate.add_command(commands)
    store.add_command(commands)
    copies.add_command(commands)
    chaos.add_command(commands)
    status.add_command(commands)
    report.add_command(commands)
    commands.add_parser("run", help="run a job as torchrun does, and keep it running when a worker dies")
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(parser, words)
        if words[:1] != ["run"]:
            sys.stdout.flush()
    except NtpError as error:
        print(f"ntp: {printable(error)}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        if words[:1] == ["run"]:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _run(parser: OneLineParser, words: Sequence[str]) -> int:
    if words[:1] == ["run"]:  # the rest is torchrun's, which this parser must not see
        return run.run(words[1:])
    if words[:1] == ["check"]:  # the rest may be a script's
        return check.run(words[1:])
    if words[:2] == ["chaos", "outside"]:  # after -- comes a command line of its own
        return chaos_outside.run(words[2:])
    parsed, unknown = parser.parse_known_args(words)
    parsed.parser.refuse_unknown(unknown)
    code: int = parsed.run(parsed)
    return code


def console() -> int:
    """Run one command as the entry point of the process, which then exits without Python's teardown."""
    quick_exit.arm()
    code = main()
    quick_exit.set_exit_code(code)
    return code


if __name__ == "__main__":
    sys.exit(console())
