"""Collectives of accelerate that a loop calls between its steps or within them, and what they return to a rank alone.

`Accelerator.gather`, `gather_for_metrics`, `reduce`, `pad_across_processes` and `wait_for_everyone`, and the functions
of `accelerate.utils`, come down to a few functions. Each of these is a voted section (`user_loop.py`).
"""

from collections.abc import Callable
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import recursively_apply

from ntp_plugin.patching import Replacement

type Function = Callable[..., Any]
type ThroughLosses = Callable[[Function, Function], Function]
"""Makes a function of accelerate's, and of what it returns to a rank alone, one that survives a loss."""


def table(through: ThroughLosses) -> tuple[Replacement, ...]:
    """Return the replacements.

    Args:
        through: Makes each function survive a loss.
    """

    def one(target: str, alone: Function) -> Replacement:
        return Replacement(
            target=target, why="its collective must survive a loss", make=lambda original: through(original, alone)
        )

    operations = "accelerate.utils.operations"
    by_name = (operations, "accelerate.utils", "accelerate.accelerator")
    return (
        one(f"{operations}:_gpu_gather", _gathered),
        one(f"{operations}:_gpu_gather_object", _gathered_object),
        one(f"{operations}:_gpu_broadcast", _sent),
        *(one(f"{module}:reduce", _reduced) for module in by_name),
        *(one(f"{module}:broadcast_object_list", _sent) for module in by_name[:2]),
        one("accelerate.data_loader:synchronize_rng_states", _nothing),
        one("accelerate.state:PartialState.wait_for_everyone", _nothing),
    )


def _ranks() -> int:
    return int(PartialState().num_processes)


def _gathered(tensor: Any) -> Any:
    """As if all ranks had the same."""

    def repeated(one: torch.Tensor) -> torch.Tensor:
        return torch.cat([one[None] if one.ndim == 0 else one] * _ranks())

    return recursively_apply(repeated, tensor, error_on_other_type=True)


def _gathered_object(data: Any) -> Any:
    return list(data) * _ranks()


def _reduced(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    del scale  # of another backend
    factor = _ranks() if reduction == "sum" else 1
    return recursively_apply(lambda one: one.clone() * factor, tensor, error_on_other_type=True)


def _sent(data: Any, *_: Any, **__: Any) -> Any:
    return data


def _nothing(*_: Any, **__: Any) -> None:
    return None
