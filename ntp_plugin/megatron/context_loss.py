"""Weighs the tokens of a sequence as with nobody lost, where fewer replicas of a context group share it.

Without `--calculate-per-token-loss` Megatron's loss of a sample is the mean over the parts of its sequence, each the
mean over its own tokens that count. Where a part has fewer of them, each weighs more. A replica that computes several
of the nominal parts has to take their means one by one.

A script's loss is opaque, but by Megatron's rule it is a sum over tokens. So its gradient has the weight of each token,
and one call is enough: scripts check and log their loss in it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from ntp_plugin.errors import Refused

_ENOUGH = 1e-3
"""How far a loss in low precision may be from the sum that its weights give."""


def by_nominal_parts(forward_step: Any, parts: int) -> Any:
    """Return a script's `forward_step` whose loss is the mean over `parts` nominal parts of what a replica has."""

    @functools.wraps(forward_step)
    def step(*args: Any, **kwargs: Any) -> Any:
        output, loss_func = forward_step(*args, **kwargs)
        return output, functools.partial(_loss, loss_func, parts)

    return step


def _loss(loss_func: Callable[..., Any], parts: int, output: torch.Tensor, **kwargs: Any) -> Any:
    if kwargs:  # what is no loss, or that of an evaluation
        return loss_func(output, **kwargs)
    values = output.detach().requires_grad_()
    loss, *rest = loss_func(values)
    if len(rest) < 2:  # a mean that the script has taken by itself
        return loss_func(output)
    (weights,) = torch.autograd.grad(loss, values)
    weighed = output * weights
    found, expected = weighed.detach().sum(), loss.detach().to(weighed.dtype)
    if not torch.isclose(found, expected, rtol=_ENOUGH, atol=_ENOUGH):
        raise Refused(
            f"the script's loss is {float(expected)}, and the sum over its tokens {float(found)}: "
            "without --calculate-per-token-loss their weights in a smaller context group are not known",
            fix="--calculate-per-token-loss, or a loss that is a sum over tokens",
        )
    tokens, reported = rest
    return tokens.clamp(min=1) * mean_of_parts(weighed, weights, parts), tokens, reported


def mean_of_parts(weighed: torch.Tensor, weights: torch.Tensor, parts: int) -> torch.Tensor:
    """Return the mean of the means over the nominal parts of [sample, position].

    A replica has its parts twice, once from the beginning of the sequence on and once, in reverse order, to its end.
    """
    sums, counts = (value.reshape(value.shape[0], 2 * parts, -1).sum(dim=(0, 2)) for value in (weighed, weights))
    sums, counts = (value[:parts] + value[parts:].flip(0) for value in (sums, counts))
    return (sums / counts.clamp(min=1)).mean()
