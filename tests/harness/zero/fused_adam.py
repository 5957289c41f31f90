"""DeepSpeed's FusedAdam, as a config without `torch_adam` has it, with a kernel that rounds no element by its place.

The class is DeepSpeed's own, with its state and its counts. Its GPU kernel treats each element alike; its CPU kernel
does not, and is refused, so that torch does the arithmetic here.
"""

from typing import Any

import torch


@torch.no_grad()
def multi_tensor_adam(  # noqa: PLR0917  (as it is called)
    _chunk: int,
    _skip: Any,
    tensors: Any,
    rate: float,
    beta: float,
    beta_sq: float,
    eps: float,
    step: int,
    decoupled: int,
    corrected: int,
    decay: float,
) -> None:
    """Like `csrc/adam/multi_tensor_adam.cu`: gradients, parameters, and the two moments."""
    corrections = (1 - beta**step, 1 - beta_sq**step) if corrected else (1.0, 1.0)
    for given, parameter, average, average_sq in zip(*tensors, strict=True):
        gradient = given.to(average.dtype) if decoupled else given + decay * parameter
        average.mul_(beta).add_(gradient, alpha=1 - beta)
        average_sq.mul_(beta_sq).addcmul_(gradient, gradient, value=1 - beta_sq)
        change = (average / corrections[0]) / ((average_sq / corrections[1]).sqrt_() + eps)
        parameter.sub_(rate * (change.add_(decay * parameter) if decoupled else change))


class Builder:
    """In the place of what compiles it."""

    multi_tensor_adam = staticmethod(multi_tensor_adam)

    def load(self) -> "Builder":
        """Return the kernel that DeepSpeed asks for."""
        return self


def install(*, refused: bool) -> None:
    """From now on; whether it is `refused` because it is on a CPU."""
    from deepspeed.ops.adam import fused_adam  # noqa: PLC0415  (only ranks have DeepSpeed)

    from ntp_plugin.deepspeed import unsupported  # noqa: PLC0415

    fused_adam.FusedAdamBuilder = Builder
    if not refused:
        setattr(unsupported, "rounds_by_place", lambda _: False)  # noqa: B010
