"""Runs a script with signal handlers that misbehave, as a user's own handlers may.

    ntp run ... -m ntp_plugin.testing.signal_handlers train.py ARGUMENTS

Python runs a handler in the main thread, between two of its operations: also while that thread waits in a collective.
`ntp chaos outside` sends these signals.

    SIGUSR1       never returns
    SIGUSR2       raises an exception
    SIGRTMIN + 1  calls sys.exit(3)
    SIGRTMIN + 2  stands in C code and holds the interpreter lock
"""

import signal
import sys
from collections.abc import Sequence
from types import FrameType

from ntp_plugin.launch.script import run
from ntp_plugin.testing import harm


def install() -> None:
    """Set the handlers in this process."""
    signal.signal(signal.SIGUSR1, _hang)
    signal.signal(signal.SIGUSR2, _raise)
    signal.signal(signal.SIGRTMIN + 1, _exit)
    signal.signal(signal.SIGRTMIN + 2, _hold_lock)


def _hang(_number: int, _frame: FrameType | None) -> None:
    harm.hang()


def _raise(number: int, _frame: FrameType | None) -> None:
    raise RuntimeError(f"the script's handler of signal {number} raises")


def _exit(_number: int, _frame: FrameType | None) -> None:
    sys.exit(3)


def _hold_lock(_number: int, _frame: FrameType | None) -> None:
    harm.hold_lock()


def main(words: Sequence[str]) -> None:
    """Set the handlers, and run the script as Python would."""
    if not words:
        print("usage: -m ntp_plugin.testing.signal_handlers SCRIPT ARGUMENTS", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    install()
    run(words)


if __name__ == "__main__":
    main(sys.argv[1:])
