"""Micro-batches that weigh nothing, so that all replicas of an expert group run alike many.

A layer of experts is an exchange among replicas, in which each has to take part. After a loss the replicas of a group
may have different numbers of micro-batches, and those with fewer run one of theirs again. Its loss is multiplied by
zero, its numbers are not reported, and what the router adds to the loss or counts is left out (`without_padding`).

The router does both in the forward, which recomputation repeats in the backward. So the result of each micro-batch
says, when its backward begins, whether that is padding.
"""

import collections
import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch


class _InFlight:
    """Whether this rank computes what weighs nothing."""

    is_padding = False


@contextlib.contextmanager
def padded(kwargs: dict[str, Any], own: int, runs: int) -> Iterator[None]:
    """Have a schedule run more micro-batches than the replica has.

    Args:
        kwargs: The arguments of Megatron's schedule, which are changed.
        own: The replica's own micro-batches.
        runs: Those that it runs.
    """
    if runs > own:
        assert own, "a replica that trains has a micro-batch to repeat"
        iterators = kwargs["data_iterator"]
        several = isinstance(iterators, list)
        kwargs["data_iterator"] = [_endless(one, own) for one in iterators] if several else _endless(iterators, own)
        kwargs["forward_step_func"] = _around(kwargs["forward_step_func"], own)
    try:
        yield
    finally:
        _InFlight.is_padding = False  # it was, in the last backward


def _endless(iterator: Any, own: int) -> Any:
    """Return an iterator that repeats the last of this step's micro-batches; None is a rank that loads nothing."""
    return None if iterator is None else _repeating_the_last(iterator, own)


def _around(forward_step: Any, own: int) -> Any:
    """Wrap the script's forward step: what lies beyond the replica's own micro-batches weighs nothing."""
    begun: collections.Counter[int] = collections.Counter()

    @functools.wraps(forward_step)
    def step(data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        is_padding = begun[id(model)] >= own
        begun[id(model)] += 1
        _InFlight.is_padding = is_padding
        output, loss_of = forward_step(data_iterator, model, *args, **kwargs)
        _say_in_backward(output, is_padding)
        return output, (_weightless(loss_of) if is_padding else loss_of)

    return step


def _repeating_the_last(iterator: Any, own: int) -> Iterator[Any]:
    for _ in range(own):
        last = next(iterator)
        yield last
    while True:
        yield last


def _say_in_backward(output: Any, is_padding: bool) -> None:
    def begins(gradient: torch.Tensor) -> torch.Tensor:
        _InFlight.is_padding = is_padding
        return gradient

    for tensor in output if isinstance(output, list | tuple) else [output]:
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(begins)  # type: ignore[no-untyped-call]


def _weightless(loss_of: Any) -> Any:
    """Return a loss function whose results are zeros."""

    def zero(*args: Any, **kwargs: Any) -> Any:
        loss, *rest, report = loss_of(*args, **kwargs)
        counts = [torch.zeros_like(count) for count in rest]
        return loss * 0, *counts, {name: torch.zeros_like(value) for name, value in report.items()}

    return zero


# ---------------------------------------------------------------- what a router adds and counts


def without_padding(original: Any) -> Any:
    """`MoEAuxLossAutoScaler.apply`: padding adds nothing to the loss."""

    def apply(output: torch.Tensor, loss: torch.Tensor) -> Any:
        return output if _InFlight.is_padding else original(output, loss)

    return apply


def uncounted(original: Any) -> Any:
    """`TopKRouter._apply_expert_bias` and `MoEMetricsTracker.record`: padding is not counted."""

    @functools.wraps(original)
    def count(*args: Any, **kwargs: Any) -> Any:
        return None if _InFlight.is_padding else original(*args, **kwargs)

    return count
