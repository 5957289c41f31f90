"""A run that is there only to write what another has left in memory as a checkpoint of Megatron's.

It is the job's own script, started once more. When the model is built its state is put in from the copies, as in a job
that resumes; Megatron's own function saves it, in the format that the job's arguments ask for; and the process ends
where Megatron would go on to the data sets. Nothing is read but the copies, and no step is taken.

A loss meanwhile ends it: the copies are as they were, so it can be started again. Megatron writes last of all which
step a folder has (`latest_checkpointed_iteration.txt`), and without that nobody takes what is there for a checkpoint.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

from megatron.training import training
from torch.distributed.checkpoint.api import CheckpointException

from ntp_plugin.errors import NtpError, PeerLost
from ntp_plugin.megatron.live.anatomy import Anatomy
from ntp_plugin.recovery.driver import Driver
from ntp_plugin.telemetry import Exported, Teller

_FOR_WHO_TRAINS = {
    "load": None,
    "pretrained_checkpoint": None,
    "tensorboard_dir": None,
    "wandb_project": "",
    "enable_one_logger": False,
    "log_progress": False,
    "save_retain_interval": None,
}
"""What a job's arguments ask for that would be read in vain, or written where the job itself writes."""
_FULL = 1 << 20
"""Bytes: with less left, that is what was wrong; Megatron's own message names the kind of the error only."""


class NotWritten(NtpError):
    """There was no room for a checkpoint, or its folder could not be written to."""


def only_to_save(args: Any, folder: Path) -> None:
    """Have the arguments be those of a run that only saves there."""
    vars(args).update(_FOR_WHO_TRAINS)
    args.save = str(folder)


def save(args: Any, anatomy: Anatomy, driver: Driver, folder: Path, teller: Teller) -> None:
    """The state of now, into a folder that is empty; all ranks come together."""
    try:
        saved = driver.let_go(lambda: _save(args, anatomy))
    except (Exception, CheckpointException) as error:
        failed = _said_by_the_disk(error)
        if failed is None:
            raise
        if not failed:
            sys.exit(NotWritten.exit_code)
        teller.tell(Exported(step=args.iteration, folder=str(folder), failed=failed))
        raise NotWritten(
            f"the checkpoint of step {args.iteration} cannot be written to {folder}, {_room(folder)}: {failed}",
            way_out="export to another folder; the copies are as they were",
        ) from error
    if saved is None:
        raise PeerLost("another process of this export is lost", way_out="start it again; the copies are as they were")
    if args.rank == 0:
        teller.tell(Exported(step=args.iteration, folder=str(folder), failed=""))


def _save(args: Any, anatomy: Anatomy) -> None:
    training.save_checkpoint(
        args.iteration,
        anatomy.chunks,
        anatomy.optimizer,
        anatomy.scheduler,
        args.num_floating_point_operations_so_far,
        {},
        preprocess_common_state_dict_fn=training.preprocess_common_state_dict,
    )


def _room(folder: Path) -> str:
    disk = shutil.disk_usage(folder)
    full = "which is full" if disk.free < _FULL else "which is not full"
    return f"{full} ({disk.free / 1e6:.1f} of {disk.total / 1e6:.1f} MB are free)"


def _said_by_the_disk(error: BaseException) -> str | None:
    """In a line, if that is what it was; empty where another process has it, which gathers it from all who write."""
    if isinstance(error, CheckpointException):
        return "; ".join(sorted({str(failure) for failure, _ in error.failures.values()}))
    if isinstance(error, OSError) or "PytorchStreamWriter" in str(error):
        return str(error).splitlines()[0]
    return None
