"""DeepSpeed's FusedLion and FusedLamb, with torch's arithmetic in place of their kernels, which exist for GPUs alone.

The classes are DeepSpeed's own, with their state and their counts.
"""

from typing import Any

import torch


@torch.no_grad()
def multi_tensor_lion(
    _chunk: int,
    _skip: Any,
    tensors: Any,
    rate: float,
    beta: float,
    beta_later: float,
    _step: int,
    decay: float,
) -> None:
    """Like `csrc/lion/multi_tensor_lion.cu`: gradients, parameters, and the average."""
    for gradient, parameter, average in zip(*tensors, strict=True):
        direction = torch.sign(beta * average + (1 - beta) * gradient)
        parameter.mul_(1 - rate * decay).sub_(rate * direction)
        average.mul_(beta_later).add_(gradient, alpha=1 - beta_later)


@torch.no_grad()
def lamb(  # noqa: PLR0917  (as it is called)
    parameter: torch.Tensor,
    _rounded: torch.Tensor,
    average: torch.Tensor,
    average_sq: torch.Tensor,
    gradient: torch.Tensor,
    rate: float,
    beta: float,
    beta_sq: float,
    most: float,
    least: float,
    eps: float,
    scale: float,
    step: int,
    mode: int,
    corrected: int,
    decay: float,
) -> torch.Tensor:
    """Like `csrc/lamb/fused_lamb_cuda_kernel.cu`: the size of a step follows from the norms of the whole tensor."""
    gradient = gradient / scale
    average.mul_(beta).add_(gradient, alpha=1 - beta)
    average_sq.mul_(beta_sq).addcmul_(gradient, gradient, value=1 - beta_sq)
    size = rate * ((1 - beta_sq**step) ** 0.5 / (1 - beta**step) if corrected else 1.0)
    change = average / (average_sq.sqrt() + eps if mode else (average_sq + eps).sqrt()) + decay * parameter
    of_parameter, of_change = parameter.norm(), change.norm()
    trust = torch.clamp(of_parameter / of_change, least, most) if of_parameter and of_change else torch.ones(())
    parameter.sub_(size * trust * change)
    return trust


class Builder:
    """In the place of what compiles them."""

    multi_tensor_lion, lamb = staticmethod(multi_tensor_lion), staticmethod(lamb)

    def load(self) -> "Builder":
        """Return the kernels that DeepSpeed asks for."""
        return self


def install() -> None:
    """From now on, in this process."""
    from deepspeed.ops.lamb import fused_lamb  # noqa: PLC0415  (only ranks have DeepSpeed)
    from deepspeed.ops.lion import fused_lion  # noqa: PLC0415

    fused_lion.FusedLionBuilder = fused_lamb.FusedLambBuilder = Builder
