"""Kill what a supervisor has left behind that was itself killed.

`bound.py` takes care of the processes that the supervisor starts. Those have children of their own: the loaders of a
script, the Python that a shell script starts, the workers of a fork server. So each supervisor has one process more,
which waits on a pipe. Where the pipe closes before the supervisor has said that it ends, every process of this user
whose environment has the supervisor's mark is killed. A process that overwrites its environment (`setproctitle`) is not
recognized, and neither is one that was started with another environment.

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
"""The supervisor says that it ends by itself."""
_WAIT_S = 5.0
"""For the killed to be gone, before the next look."""
_LOOKS = 20
"""A process that the kernel cannot end is left to it."""


class Reaper:
    """The supervisor's side: from `__init__` on, its death ends all processes with the mark."""

    def __init__(self, name: str) -> None:
        """The mark is the variable `name` of this process's environment, with its value."""
        mark = f"{name}={os.environ[name]}"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(__file__), mark],  # noqa: PTH100
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # whatever is sent to the supervisor's group is not for it
        )

    def close(self) -> None:
        """The supervisor ends by itself: nothing is killed."""
        with contextlib.suppress(BrokenPipeError):  # somebody has killed it
            self._process.communicate(_ENDS)
        self._process.wait()


def marked(mark: bytes) -> Iterator[int]:
    """Open a pidfd for each running process that has the mark in its environment, but for this one.

    Args:
        mark: `NAME=value`, as in the environment that the process started with.

    Yields:
        A pidfd, for the caller to close. The process was checked after it was opened.
    """
    for name in os.listdir("/proc"):  # noqa: PTH208
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it ended, or is somebody else's
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
    """Kill all processes with the mark, also those that they start meanwhile; returns how many there were."""
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
        sys.stderr.write(f"ntp run: the supervisor was killed, and so were {killed} processes of it\n")


if __name__ == "__main__":
    _main(os.fsencode(sys.argv[1]))
