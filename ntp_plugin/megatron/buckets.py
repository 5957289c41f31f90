"""Megatron's buckets, reduced in lanes.

DDP tells a bucket group when its gradients are complete, and waits for it when the step ends. The bucket groups of a
hurt job are ours in these two places, and Megatron's in all others.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup


class Reduction(Protocol):
    """Sums that are under way."""

    def finish(self) -> None:
        """Have them in place."""


class LaneBucketGroup(_ParamAndGradBucketGroup):  # type: ignore[misc]
    """A bucket group whose gradients go into lanes. Made of Megatron's own by `take_over`."""

    begin: Callable[[Mapping[str, torch.Tensor]], Reduction]
    names: Mapping[Any, str]
    grad_reduce_handle: Reduction | None
    grad_reduce_finished: bool

    @classmethod
    def take_over(cls, group: Any, begin: Callable[..., Reduction], names: Mapping[Any, str], scale: float) -> None:
        """Have a bucket group of Megatron's be one of ours: `begin` starts to sum its gradients."""
        group.__class__ = cls
        group.begin = begin
        group.names = {parameter: names[parameter] for bucket in group.buckets for parameter in bucket.params_list}
        for bucket in group.buckets:
            bucket.gradient_scaling_factor = scale

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:  # noqa: ARG002
        """Begin to sum; a second call in the same step is Megatron's first-batch habit, and does nothing."""
        if self.grad_reduce_handle is not None:
            return
        if self.ddp_config.check_for_nan_in_grad or self.ddp_config.check_for_large_grads:
            self.check_grads(
                check_for_nan_or_inf=self.ddp_config.check_for_nan_in_grad,
                check_for_large=self.ddp_config.check_for_large_grads,
            )
        with torch.no_grad():
            for bucket in self.buckets:
                if bucket.gradient_scaling_factor != 1.0:
                    bucket.grad_data *= bucket.gradient_scaling_factor
            self.grad_reduce_handle = self.begin({name: parameter.main_grad for parameter, name in self.names.items()})

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:  # noqa: ARG002
        """Have the sums in place."""
        self.param_gather_dispatched = False
        if self.grad_reduce_finished:
            return
        self.start_grad_sync()
        assert self.grad_reduce_handle is not None, "it was begun"
        with torch.no_grad():
            self.grad_reduce_handle.finish()
        self.grad_reduce_handle, self.grad_reduce_finished = None, True
