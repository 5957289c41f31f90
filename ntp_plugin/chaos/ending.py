"""End a fault-injecting command on SIGINT, SIGTERM or SIGHUP, but only while it waits.

The command undoes its faults as it ends: it continues paused processes, and ends what it started. So no signal may
interrupt it between a fault and the note of how to undo it, nor during the undo.
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
"""SIGHUP comes when a terminal is closed, or its connection is lost."""

type Wait = Callable[[float], None]
"""Waits like `time.sleep`."""


@contextlib.contextmanager
def ending_in_waits() -> Iterator[Wait]:
    """Yield a wait function in which ending signals take effect, or else at exit. Main thread only."""
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
