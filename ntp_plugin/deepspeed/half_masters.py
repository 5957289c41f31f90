"""Half precision without ZeRO: DeepSpeed's unfused optimizer steps float32 masters, one for each parameter.

So what a slot holds of a tensor is the parameter, its master, and what the optimizer keeps for the master.

The optimizer clips, and skips steps, by a norm of gradients, which unlike parameters are not marked as cut. So it
counts only the gradients of the first slot of each replica. While a rank is lost, other slots hold what that slot held,
and the norm is taken from them. So all ranks clip by the same number as an undisturbed run.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

from ntp_plugin.patching import Replacement
from ntp_plugin.planning.spans import Spans

type Gradients = Mapping[str, tuple[torch.Tensor, int]]
"""This slot's gradients by parameter name, each with the dim that is cut."""


def masters_of(engine: Any) -> dict[str, torch.nn.Parameter]:
    """Return the masters by parameter name; empty if there are none, or ZeRO has them."""
    optimizer = engine.optimizer
    if not isinstance(optimizer, FP16_UnfusedOptimizer):
        return {}
    parameters, masters = (itertools.chain(*groups) for groups in (optimizer.fp16_groups, optimizer.fp32_groups))
    return {engine.param_names[one]: master for one, master in zip(parameters, masters, strict=True)}


def norm_of_first_slots(
    gradients: Callable[[], Gradients], places: Callable[[str], Spans], group: Callable[[], Any]
) -> Replacement:
    """Return the replacement of the optimizer's norm. `places` says which part of a local parameter the first slot of
    its replica holds when nobody is lost; `group` is the slots of a replica."""

    @torch.no_grad()
    def norm(of: Iterable[torch.Tensor], norm_type: float = 2, mpu: Any = None) -> float:
        assert norm_type == 2 and mpu is not None, "as the optimizer asks for it"
        asked = {id(gradient) for gradient in of}
        mine = [
            gradient.narrow(dim, start, stop - start).float().norm()
            for name, (gradient, dim) in gradients().items()
            if id(gradient) in asked
            for start, stop in places(name)
        ]
        squares = torch.stack(mine).square().sum() if mine else torch.zeros(())
        dist.all_reduce(squares, group=group())
        dist.all_reduce(squares, op=dist.ReduceOp.MAX)  # replicas differ by rounding
        found = math.sqrt(squares.item())
        return found if math.isfinite(found) else -1.0

    return Replacement(
        target="deepspeed.runtime.fp16.unfused_optimizer:get_weight_norm",
        why="gradients are not marked as cut, and the first slot of a replica may hold other units than before",
        make=lambda _: norm,
    )
