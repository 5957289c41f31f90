"""Reads the arguments that Megatron takes from a checkpoint (`--use-checkpoint-args`), for a check without a job.

In a job Megatron reads them before it checks its arguments, so the plugin sees the result. Here the same function of
Megatron is called.
"""

import contextlib
import io
from collections.abc import Iterator
from typing import Any

from ntp_plugin.errors import ConfigError

_FLAG = "--use-checkpoint-args"


def read_checkpoint_arguments(args: Any) -> str | None:
    """Set the arguments that Megatron would take from the checkpoint, if it is asked to.

    Args:
        args: What Megatron's parser returned; changed in place.

    Returns:
        A note on what was read; None without `--use-checkpoint-args`.

    Raises:
        ConfigError: Megatron would not start with these flags, or it cannot read the checkpoint.
    """
    if not args.use_checkpoint_args:
        return None
    folders = [folder for folder in (args.pretrained_checkpoint, args.load) if folder]
    if not folders:
        raise ConfigError(f"{_FLAG} without a checkpoint: Megatron would not start", fix="--load FOLDER")
    if args.non_persistent_ckpt_type == "local":
        raise ConfigError(
            f"{_FLAG} with --non-persistent-ckpt-type local: Megatron would not start", fix=f"leave {_FLAG} out"
        )
    found = [folder for folder, has_arguments in _read(args) if has_arguments]
    if not found:
        return f"there is no checkpoint in {' or '.join(folders)}, so {_FLAG} changes nothing"
    return f"{_FLAG}: read from the checkpoint in {' and '.join(found)}"


def _read(args: Any) -> Iterator[tuple[str, bool]]:
    """Read both checkpoints in Megatron's order; yield each folder, and whether it has arguments."""
    from megatron.training.checkpointing import load_args_from_checkpoint  # noqa: PLC0415  (after the emulation)

    for name in ("pretrained_checkpoint", "load"):
        folder = getattr(args, name)
        if not folder:
            continue
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output):
                result = load_args_from_checkpoint(args, load_arg=name)
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"{_FLAG}: Megatron cannot read the checkpoint in {folder}: {error or output.getvalue().strip()}",
                fix="name a checkpoint that this host can read",
            ) from error
        yield folder, isinstance(result, tuple)  # the arguments alone are returned where there is no checkpoint
