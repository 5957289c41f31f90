"""The state of now as a checkpoint of Megatron's, by a run that is there only to write it (`recovery/exporting.py`).

The process ends where Megatron would go on to the data sets. Megatron writes last of all which step a folder has
(`latest_checkpointed_iteration.txt`), and without that nobody takes what is there for a checkpoint.
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
}
"""What a job's arguments ask for that would be read in vain, or written where the job itself writes."""


def only_to_save(args: Any, folder: Path) -> None:
    """Have the arguments be those of a run that only saves there."""
    vars(args).update(_FOR_WHO_TRAINS)
    args.save = str(folder)


def save(args: Any, model_rebuild: ModelRebuild) -> None:
    """Where the arguments say; all ranks come together."""
    training.save_checkpoint(
        args.iteration,
        model_rebuild.chunks,
        model_rebuild.optimizer,
        model_rebuild.scheduler,
        args.num_floating_point_operations_so_far,
        {},
        preprocess_common_state_dict_fn=training.preprocess_common_state_dict,
    )
