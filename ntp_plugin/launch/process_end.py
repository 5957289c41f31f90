"""Sends a signal to a worker and its process group: without this a script behind a shell would survive the shell."""

import os
from typing import Any


def end(process: Any, number: int) -> None:
    """Send a signal to a worker, and to its process group where it leads one.

    Args:
        process: The worker, with `pid` and `send_signal`, which has not been waited for.
        number: The number of the signal.
    """
    try:
        leads = os.getpgid(process.pid) == process.pid
        if leads:
            os.killpg(process.pid, number)
    except ProcessLookupError:
        leads = False
    if not leads:
        process.send_signal(number)
