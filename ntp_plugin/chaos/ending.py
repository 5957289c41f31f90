"""Where a command that breaks jobs ends, if it is asked to: where it waits, and nowhere else.

What it has done is undone as it ends: whom it paused is woken, what it started is ended. So no signal may come between
a deed and the note of what undoes it, nor into the undoing.
"""

import contextlib
import functools
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType

_LOOK_S = 0.05
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The last one comes where a terminal is closed, or a connection to it is lost."""

type Wait = Callable[[float], None]
"""As `time.sleep` does."""


@contextlib.contextmanager
def ending_in_waits() -> Iterator[Wait]:
    """What ends a process raises in the wait that this gives, or else when it is over. For a main thread."""
    came = list[int]()

    def note(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    with contextlib.ExitStack() as in_the_end:
        for number in _ENDS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup, or in the background of a script
                in_the_end.callback(signal.signal, number, signal.signal(number, note))
        yield functools.partial(_wait, came)
    _end_for(came)


def _wait(came: list[int], seconds: float) -> None:
    until = time.monotonic() + seconds
    _end_for(came)
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, _LOOK_S))
        _end_for(came)


def _end_for(came: list[int]) -> None:
    if signal.SIGINT in came:
        raise KeyboardInterrupt
    if came:
        sys.exit(128 + came[0])
