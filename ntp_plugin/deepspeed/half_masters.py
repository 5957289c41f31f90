"""Half precision without ZeRO: what DeepSpeed's unfused optimizer steps are masters in float32, one for each parameter.

So what a slot holds of a tensor is the parameter, its master, and what the optimizer keeps for that.

The norm by which it clips, and by which a step is skipped, it takes of gradients, which unlike parameters do not say
that they are cut. So it counts those of the first slot of each replica alone. While somebody is lost other slots hold
what that one held: it is looked for there, so that all clip by the number by which the undisturbed run does.
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
"""Of this slot's parameters, each with the dim that is cut."""


def masters_of(engine: Any) -> dict[str, torch.nn.Parameter]:
    """Of the parameters, by their names; none where there are no masters, or ZeRO has them."""
    optimizer = engine.optimizer
    if not isinstance(optimizer, FP16_UnfusedOptimizer):
        return {}
    parameters, masters = (itertools.chain(*groups) for groups in (optimizer.fp16_groups, optimizer.fp32_groups))
    return {engine.param_names[one]: master for one, master in zip(parameters, masters, strict=True)}


def norm_of_first_slots(
    gradients: Callable[[], Gradients], places: Callable[[str], Spans], group: Callable[[], Any]
) -> Replacement:
    """`places`: of a parameter here, what of it the first slot of its replica holds when nobody is lost. `group`: the
    slots of a replica."""

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
        why="gradients do not say that they are cut, and the first slot of a replica is not what it was",
        make=lambda _: norm,
    )
