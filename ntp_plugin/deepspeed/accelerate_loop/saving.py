"""`Accelerator.save_state` through losses: all ranks save together, and again after a loss meanwhile."""

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ntp_plugin.deepspeed.accelerate_loop.user_loop import AccelerateLoop

_LOG = logging.getLogger(__name__)


def save_state(loop: AccelerateLoop, write: Callable[[Any], Any], folder: Any) -> Any:
    """Save until nobody is lost meanwhile: the first rank writes after the last section of a checkpoint, and the next
    one must know whether it has ended that.

    Args:
        loop: The loop of this rank.
        write: Accelerate's own, given a folder; with names that it counts itself, None at first.
        folder: What the script has given.

    Returns:
        Where the checkpoint is; `folder` if none is written, since it is written already or its step is lost.
    """
    naming = loop.accelerator.project_configuration
    counted, names_itself = naming.iteration, naming.automatic_checkpoint_naming
    if loop.passing:
        naming.iteration += names_itself
        return folder
    if not loop.section(lambda: True, lambda: False):
        _LOG.warning("no checkpoint was written: a loss has undone the step before it, which the loop takes again")
        return folder
    try:
        while True:
            epoch, found = loop.epoch, write(folder)
            if not loop.section(lambda: _is_spoiled(loop, epoch), lambda: False):  # noqa: B023  (it runs at once)
                return found
            folder, naming.automatic_checkpoint_naming = found, False
    finally:
        naming.iteration, naming.automatic_checkpoint_naming = counted + 1, names_itself


def _is_spoiled(loop: AccelerateLoop, epoch: int) -> bool:
    """Whether any rank has lost another one since; all ranks get the same answer."""
    spoiled = loop.epoch != epoch or loop.window.checkpoints.owes
    here = torch.tensor([float(spoiled)], device=loop.accelerator.device)
    dist.all_reduce(here)
    return bool(here[0])
