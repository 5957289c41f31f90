"""Reports a checkpoint of a live job that could not be written, and ends a job whose newest one is missing."""

import logging
from pathlib import Path
from typing import Any

from megatron.training import checkpointing

from ntp_plugin.errors import NotSaved
from ntp_plugin.telemetry import EventWriter, SaveFailed

_LOG = logging.getLogger(__name__)


def folder_of(args: Any, *, non_persistent: bool) -> str:
    """Return the folder of the checkpoints of a kind."""
    if not non_persistent:
        return str(args.save)
    below = checkpointing._NON_PERSISTENT_CKPT_SUBDIR
    return str(args.non_persistent_global_ckpt_dir or Path(args.save) / below)


def newest_in(folder: str) -> str | None:
    """Return the step of the newest checkpoint in a folder, as Megatron has written it down; None if there is none."""
    try:
        return Path(checkpointing.get_checkpoint_tracker_filename(folder)).read_text(encoding="utf-8").strip()
    except OSError:
        return None


def _newest_in_words(folder: str) -> str:
    newest = newest_in(folder)
    return "no checkpoint is there" if newest is None else f"the newest checkpoint there is that of step {newest}"


def report(step: int, folder: str, why: str, *, removed: bool, event_writer: EventWriter) -> None:
    """Log and record a checkpoint that could not be written.

    Args:
        step: The step behind which it was to be written.
        folder: Where.
        why: The errors, each with the slot that had it.
        removed: Whether what was written of it has been removed.
        event_writer: This rank's record.
    """
    _LOG.error(
        "the checkpoint of step %d was not saved in %s: %s. The training goes on, and the next one is saved when it is"
        " due; %s%s",
        step,
        folder,
        why,
        _newest_in_words(folder),
        "" if removed else "; what was written of this one is no checkpoint, and may be removed",
    )
    event_writer.write(SaveFailed(step=step, folder=folder, why=why, removed=removed))


def require_saved(failed_after: int, args: Any, *, has_copies: bool) -> None:
    """Raise `NotSaved` at the end of a job if no checkpoint was written after one that has failed.

    Args:
        failed_after: The step of that one; 0 if there is none.
        args: Megatron's arguments.
        has_copies: Whether the job's copies in memory can be written elsewhere.
    """
    if not failed_after:
        return
    copies = "; or write the copies in memory to another folder: ntp copies export latest --to FOLDER -- COMMAND"
    raise NotSaved(
        f"the training is over, and the checkpoint of step {failed_after} could not be saved in {args.save};"
        f" {_newest_in_words(args.save)}",
        fix=f"make {args.save} writable, with enough room, and train the rest again from the newest checkpoint"
        + (copies if has_copies else ""),
    )
