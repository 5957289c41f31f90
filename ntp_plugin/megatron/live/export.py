"""Writes copies as a Megatron checkpoint, in a run that does nothing else (`recovery/exporting.py`).

The process ends where Megatron would go on to the data sets. Megatron writes the step of a folder last
(`latest_checkpointed_iteration.txt`); without that file nobody takes the folder for a checkpoint.
"""

from pathlib import Path
from typing import Any

from megatron.training import training

from ntp_plugin.megatron.live.model_rebuild import ModelRebuild

_FOR_WHO_TRAINS = {
    "load": None,
    "pretrained_checkpoint": None,
    "tensorboard_dir": None,
    "wandb_project": "",
    "enable_one_logger": False,
    "log_progress": False,
    "save_retain_interval": None,
    "async_save": False,
}
"""Arguments of a job that an export would read in vain, or that would make it write where the job writes."""


def only_to_save(args: Any, folder: Path) -> None:
    """Change the arguments to those of a run that only saves to `folder`."""
    vars(args).update(_FOR_WHO_TRAINS)
    args.save = str(folder)


def save(args: Any, model_rebuild: ModelRebuild) -> None:
    """Save a checkpoint where the arguments say; all ranks take part."""
    training.save_checkpoint(
        args.iteration,
        model_rebuild.chunks,
        model_rebuild.optimizer,
        model_rebuild.scheduler,
        args.num_floating_point_operations_so_far,
        {},
        preprocess_common_state_dict_fn=training.preprocess_common_state_dict,
    )
