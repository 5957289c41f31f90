"""The end of a worker, with whatever it has started: a script behind a shell would go on without the shell."""

import os
from typing import Any


def end(process: Any, number: int) -> None:
    """Send a signal to a worker, and to its process group where it leads one.

    Args:
        process: One that has not been waited for, with `pid` and `send_signal`.
        number: The signal's.
    """
    try:
        leads = os.getpgid(process.pid) == process.pid
        if leads:
            os.killpg(process.pid, number)
    except ProcessLookupError:
        leads = False
    if not leads:
        process.send_signal(number)
