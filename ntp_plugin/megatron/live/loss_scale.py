"""The dynamic loss scale of `--fp16` in a live job: the same on all ranks, and changed once for each step that is over.

Megatron changes it before its optimizer knows whether to step: down when a gradient has overflowed, up after many steps
without one. A loss may undo the step that it has just counted. So a live job changes it where the vote of the step
says that the step is over, and idle ranks do as well.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ntp_plugin.megatron.chained import parts_of


class LossScale:
    """Replaces the update of Megatron's loss scaler."""

    def __init__(self) -> None:
        self.has_overflowed = False
        """Whether the last gradients of this rank did not fit."""
        self._update: Callable[[Any, bool], None] | None = None

    def deferred(self, original: Any) -> Any:
        """`DynamicGradScaler.update`: only remember whether gradients have overflowed."""
        self._update = original

        @functools.wraps(original)
        def update(_: Any, found_inf: bool) -> None:
            self.has_overflowed = found_inf

        return update

    def step_is_over(self, optimizer: Any, *, overflowed: bool) -> None:
        """Change the scale of a step that all ranks have voted on."""
        for scaler in _scalers(optimizer):
            if scaler.state_dict():  # a constant scale has no state
                assert self._update is not None, "the update of a dynamic scale is replaced"
                self._update(scaler, overflowed)


def numbers_of(optimizer: Any) -> dict[str, float]:
    """Return the loss scale and its counters; nothing if it is constant, or there is none."""
    return {key: float(value) for scaler in _scalers(optimizer) for key, value in scaler.state_dict().items()}


def set_numbers(optimizer: Any, numbers: Mapping[str, float]) -> None:
    """Set the loss scale and its counters."""
    for scaler in _scalers(optimizer) if numbers else ():
        like = scaler.state_dict()
        scaler.load_state_dict(
            {
                key: like[key].new_tensor([value]) if isinstance(like[key], torch.Tensor) else int(value)
                for key, value in numbers.items()
            }
        )


def _scalers(optimizer: Any) -> Iterator[Any]:
    """Yield the loss scalers of Megatron's optimizers."""
    for part in parts_of(optimizer):
        if getattr(part, "grad_scaler", None) is not None:
            yield part.grad_scaler
