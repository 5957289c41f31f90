"""Writes a recovery to Megatron's own logs, TensorBoard and wandb, on the rank that has their writers."""

from typing import Any

from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

from ntp_plugin.telemetry import Recovered


def into_logs(event: Recovered, step: int) -> None:
    """Log a recovery, if this rank has a writer."""
    tensorboard: Any = get_tensorboard_writer()
    wandb: Any = get_wandb_writer()
    numbers = {
        "ntp/epoch": float(event.epoch),
        "ntp/recovery_s": event.seconds,
        "ntp/lost": float(len(event.lost)),
        **{f"ntp/width/r{number}": float(min(stages)) for number, stages in enumerate(event.widths)},
    }
    if tensorboard:
        for name, value in numbers.items():
            tensorboard.add_scalar(name, value, step)
    if wandb:
        wandb.log(numbers, step)
