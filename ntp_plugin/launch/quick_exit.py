"""Ends this process without Python's teardown, but after all `atexit` handlers.

A process that has imported torch needs 0.6 s of a processor for the teardown of its modules, and 1.8 s with
`torch._dynamo`. On a machine with 30 busy processes that is a minute, in which `ntp run` has printed its last line but
does not exit, or waits for a worker that has nothing left to do.

Threads are joined, `atexit` handlers are called, and files are flushed, as in any Python process. Only the last part is
skipped: finalizers of objects that modules still hold, and C++ destructors.

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
    """Register the exit with `atexit`. Handlers that are registered later run before it. A second call does nothing."""
    if not _State.armed:
        _State.armed = True
        atexit.register(_exit)


def set_exit_code(code: int) -> None:
    """Exit with this code, and without teardown, when Python ends. It needs `arm`."""
    _State.code = code


@contextlib.contextmanager
def on_errors_of_ours() -> Iterator[None]:
    """Skip the teardown where the block ends by Ctrl-C or with the exit code of one of our errors.

    A script that ends otherwise may rely on its finalizers, for example on those of files that it never closes.
    """
    try:
        yield
    except SystemExit as ending:
        if ending.code in NtpError.codes() - {1}:  # 1 may be the script's own code
            set_exit_code(int(str(ending.code)))
        raise
    except KeyboardInterrupt:
        set_exit_code(-signal.SIGINT)
        raise


def _exit() -> None:
    if _State.code is None:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # the pipe or the stream is closed, or None
            stream.flush()
    ctypes.CDLL(None).fflush(None)  # output of C code
    if _State.code < 0:
        signal.signal(-_State.code, signal.SIG_DFL)
        os.kill(os.getpid(), -_State.code)
    os._exit(_State.code)
