"""Kills the descendants of workers after their supervisor was killed.

`bound.py` takes care of the processes that the supervisor starts. These have children of their own: the data loaders of
a script, the Python that a shell script starts, the workers of a fork server. So each supervisor starts one more
process, which waits on a pipe. If the pipe closes without a message that the supervisor ends by itself, that process
kills every process of this user whose environment has the supervisor's mark. It does not recognize a process that
overwrites its environment (`setproctitle`), or one that was started with another environment.

`Reaper` is the supervisor's side. The other side is this file as a script: `python -I -S reaper.py MARK`.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

_ENDS = b"."
"""The message that the supervisor ends by itself."""
_WAIT_S = 5.0
"""How long to wait for each killed process before the next look."""
_LOOKS = 20
"""How often to look for processes. One that the kernel cannot end is left running."""


class Reaper:
    """The supervisor's side: while it is open, the death of this process ends all processes with the mark."""

    def __init__(self, name: str) -> None:
        """The mark is the variable `name` of this process's environment, with its value."""
        mark = f"{name}={os.environ[name]}"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(__file__), mark],  # noqa: PTH100
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # signals to the supervisor's process group must not reach it
        )

    def close(self) -> None:
        """Report that the supervisor ends by itself, so that nothing is killed."""
        with contextlib.suppress(BrokenPipeError):  # the reaper was killed
            self._process.communicate(_ENDS)
        self._process.wait()


def marked(mark: bytes) -> Iterator[int]:
    """Open a pidfd for each running process that has the mark in its environment, except this one.

    Args:
        mark: `NAME=value`, as in the environment that the process started with.

    Yields:
        A pidfd, for the caller to close. The process was checked after it was opened.
    """
    for name in os.listdir("/proc"):  # noqa: PTH208
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            pidfd = os.pidfd_open(int(name))
            try:
                with open(f"/proc/{name}/environ", "rb") as environment:  # noqa: PTH123
                    is_marked = mark in environment.read().split(b"\0")
            except OSError:
                is_marked = False
            if is_marked:
                yield pidfd
            else:
                os.close(pidfd)


def kill_all(mark: bytes) -> int:
    """Kill all processes with the mark, and those that they start meanwhile; return how many were killed."""
    killed = 0
    for _ in range(_LOOKS):
        found = list(marked(mark))
        if not found:
            break
        for pidfd in found:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                killed += 1
        for pidfd in found:
            select.select([pidfd], [], [], _WAIT_S)
            os.close(pidfd)
    return killed


def _main(mark: bytes) -> None:
    if os.read(0, 1) == _ENDS:
        return
    if killed := kill_all(mark):
        sys.stderr.write(f"ntp run: the supervisor was killed, so its {killed} remaining processes were killed\n")


if __name__ == "__main__":
    _main(os.fsencode(sys.argv[1]))
