"""A run that only writes the copies that another run left in memory, as a checkpoint of its framework.

It is the job's own script, started once more. When the model is built, its state is restored from the copies, as in a
job that resumes. The framework's own function saves it, and the process ends where the script would go on. The run
reads only the copies and takes no step. A loss ends it; the copies are unchanged, so it can be started again.
"""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ntp_plugin.errors import NtpError, PeerLost
from ntp_plugin.recovery.driver import Driver
from ntp_plugin.telemetry import EventWriter, Exported

_FULL = 1 << 20
"""Bytes: with less left the disk was full. A framework's own message names only the kind of the error."""


class NotWritten(NtpError):
    """There was no room for a checkpoint, or its folder could not be written."""


def write(save: Callable[[], object], driver: Driver, folder: Path, *, step: int, event_writer: EventWriter) -> None:
    """Write the current state into an empty folder; all ranks call this together."""
    try:
        saved = driver.run_or_skip(save)
    except (Exception, CheckpointException) as error:
        failed = _disk_error(error)
        if failed is None:
            raise
        if not failed:
            sys.exit(NotWritten.exit_code)
        event_writer.write(Exported(step=step, folder=str(folder), failed=failed))
        raise NotWritten(
            f"the checkpoint of step {step} cannot be written to {folder}, {_room(folder)}: {failed}",
            fix="export to another folder; the copies are as they were",
        ) from error
    if saved is None:
        raise PeerLost("another process of this export is lost", fix="start it again; the copies are as they were")
    if dist.get_rank() == 0:
        event_writer.write(Exported(step=step, folder=str(folder), failed=""))


def _room(folder: Path) -> str:
    disk = shutil.disk_usage(folder)
    full = "which is full" if disk.free < _FULL else "which is not full"
    return f"{full} ({disk.free / 1e6:.1f} of {disk.total / 1e6:.1f} MB are free)"


def _disk_error(error: BaseException) -> str | None:
    """The disk's error in one line, None for any other error; empty if another process has the error and reports it."""
    if isinstance(error, CheckpointException):
        return "; ".join(sorted({str(failure) for failure, _ in error.failures.values()}))
    if isinstance(error, OSError) or "PytorchStreamWriter" in str(error):
        return str(error).splitlines()[0]
    return None
