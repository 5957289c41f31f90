"""Ends this process without Python's teardown, once all that has to be done at its end is done.

A process that has imported torch needs 0.6 s of a processor to take its modules apart, and 1.8 s with `torch._dynamo`.
On a machine with 30 busy processes that is a minute, in which `ntp run` has said its last word and is still there, and
a worker is waited for that has nothing left to do.

What Python and libraries want done at the end is done as ever: threads are joined, `atexit` handlers are called, and
files are flushed. Only what follows is left out: finalizers of what modules still hold, and C++ destructors.

    quick_exit.arm()                           # before imports, whose handlers are then called first
    with quick_exit.on_errors_of_ours():       # or set_exit_code(code)
        main()
"""

import atexit
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator

from ntp_plugin.errors import NtpError


class _State:
    armed = False
    code: int | None = None
    """The exit code to end with; below 0: the signal. None: end as Python does."""


def arm() -> None:
    """Register the exit; what is registered later is called before it. Again in the same process it does nothing."""
    if not _State.armed:
        _State.armed = True
        atexit.register(_exit)


def set_exit_code(code: int) -> None:
    """End with this code when Python ends, and without its teardown, if this process is armed."""
    _State.code = code


@contextlib.contextmanager
def on_errors_of_ours() -> Iterator[None]:
    """Have the process end without teardown where it ends by Ctrl-C or with the exit code of one of our errors.

    A script that ends otherwise may rely on its finalizers: on those of files that it never closes, say.
    """
    try:
        yield
    except SystemExit as ending:
        if ending.code in NtpError.codes() - {1}:  # which any script may have meant
            set_exit_code(int(str(ending.code)))
        raise
    except KeyboardInterrupt:
        set_exit_code(-signal.SIGINT)
        raise


def _exit() -> None:
    if _State.code is None:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody reads, it is closed, or there is none
            stream.flush()
    ctypes.CDLL(None).fflush(None)  # what C code has printed
    if _State.code < 0:
        signal.signal(-_State.code, signal.SIG_DFL)
        os.kill(os.getpid(), -_State.code)
    os._exit(_State.code)
