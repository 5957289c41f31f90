"""What a Megatron rank's training depends on, compared with all other ranks (`recovery/same_settings.py`)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import megatron.core
import torch

from ntp_plugin.config.sections import TrainingPolicy
from ntp_plugin.planning.topology import Slot
from ntp_plugin.recovery import fingerprint as fp
from ntp_plugin.recovery import same_settings
from ntp_plugin.recovery.data_identity import identity_of_files
from ntp_plugin.recovery.fingerprint import Fingerprint

FREE: Mapping[str, str] = {
    **dict.fromkeys(("rank", "local_rank"), "the process's own place"),
    **dict.fromkeys(("tensorboard_dir", "wandb_save_dir", "wandb_exp_name"), "where a log goes"),
    **dict.fromkeys(("flight_recorder_dump_path", "result_rejected_tracker_filename"), "where a log goes"),
    **dict.fromkeys(("memory_snapshot_path", "rl_profile_dir", "profile_ranks"), "where a profile goes"),
    **dict.fromkeys(("data_cache_path", "object_storage_cache_path"), "a folder of this host, made from the data"),
    **dict.fromkeys(("num_workers", "num_dataset_builder_threads"), "how data are read, not which"),
    "iteration": "from the newest checkpoint, if arguments are read from it; a joining rank has the others' steps",
    "ntp_config": "the resulting policy is compared",
}
"""Arguments that may differ from rank to rank, and why. So may those of `_DATA`, whose files are compared."""
_DATA = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
_FILES = ("data_args_path", "per_split_data_args_path", "tokenizer_model", "vocab_file", "merge_file")
"""Arguments that name one file."""
_ENDINGS = (".idx", ".bin")
_OURS = "key_ntp_"
_FREE_POLICY = ("events",)


def settings(args: Any, policy: TrainingPolicy) -> Fingerprint:
    """Return the fingerprint of what is known once Megatron has checked its arguments, before it counts in them."""
    free = {*FREE, *_DATA, *_FILES}
    words = {name: value for name, value in vars(args).items() if not name.startswith(_OURS)}
    return same_settings.settings(
        fp.in_words(words, free=free),
        fp.in_words(dataclasses.asdict(policy), free=_FREE_POLICY),
        framework={"megatron-core": megatron.core.__version__},
    )


def training(args: Any, parameters: Mapping[str, torch.Tensor], slot: Slot) -> Fingerprint:
    """Return the fingerprint before the first step: the model of this pipeline stage and TP slot, and the data files on
    this host."""
    sections: dict[str, fp.Section] = {f"model of s{slot.stage}.t{slot.tp}": same_settings.described(parameters)}
    for name in (*_DATA, *_FILES):
        value = getattr(args, name, None)
        words = [value] if isinstance(value, str) else map(str, value or ())
        if files := identity_of_files(words, endings=_ENDINGS if name in _DATA else ()):
            sections[name] = files
    return Fingerprint(sections=sections)
