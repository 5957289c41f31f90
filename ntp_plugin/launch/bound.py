"""Starts a program that the kernel kills when the process that started it dies.

    python -I -S bound.py PARENT PROGRAM ARGUMENTS

This file runs as a script, asks the kernel for the signal (`PR_SET_PDEATHSIG`, which outlives `exec`), and becomes the
program by `exec`. The kernel does not notice a parent that died before it was asked, so the script compares the
parent's pid afterwards. It works for any program: Python, another Python, a shell script. It imports only the standard
library, without `site`, because every worker starts through it.

The kernel sends the signal when the *thread* that started the process ends: call from the main thread.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_NO_SUCH_PROGRAM = 127
"""The exit code of a shell for a command that it cannot find."""


def bound(words: Sequence[str]) -> list[str]:
    """Return a command line for the same program that ties its life to this process.

    Args:
        words: The program and its arguments.

    Returns:
        The command line to start in its place, from this process's main thread.
    """
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), *words]  # noqa: PTH100


def _main(parent: int, words: Sequence[str]) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        sys.exit(f"ntp run: {words[0]} is not started: prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        sys.exit(f"ntp run: {words[0]} is not started: its supervisor (pid {parent}) is dead")
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them in this process; `exec` would keep that
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvp(words[0], list(words))
    except OSError as error:
        sys.stderr.write(f"ntp run: {words[0]} cannot be started: {error.strerror}\n")
        sys.exit(_NO_SUCH_PROGRAM)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2:])
