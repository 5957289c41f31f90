"""Tensor parallelism of a script's own: an mpu with its groups, and layers that are cut over them."""

from typing import Any

import torch
import torch.distributed as dist

from tests.harness.zero.models import FEATURES


class Mpu:
    """Replicas of consecutive ranks. It counts them once, as many mpus do: DeepSpeed gets that count later, too."""

    def __init__(self, tp: int) -> None:
        # The process group is there as soon as an mpu is asked for; scripts do that before their model.
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        replicas = [dist.new_group(list(range(first, first + tp))) for first in range(0, size, tp)]
        lanes = [dist.new_group(list(range(slot, size, tp))) for slot in range(tp)]
        self._group, self._lane = replicas[rank // tp], lanes[rank % tp]
        self._sizes, self._ranks = (tp, size // tp), (rank % tp, rank // tp)

    def get_model_parallel_group(self) -> Any:
        return self._group

    def get_model_parallel_world_size(self) -> int:
        return self._sizes[0]

    def get_model_parallel_rank(self) -> int:
        return self._ranks[0]

    def get_data_parallel_group(self) -> Any:
        return self._lane

    def get_data_parallel_world_size(self) -> int:
        return self._sizes[1]

    def get_data_parallel_rank(self) -> int:
        return self._ranks[1]


class _Enter(torch.autograd.Function):
    """Into what is cut: gradients of all parts are summed."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        context.group = group
        return x

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=context.group)
        return gradient, None


class _Sum(torch.autograd.Function):
    """Leave the cut region: sum all parts."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class _Gather(torch.autograd.Function):
    """Leave the cut region: concatenate all parts."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        context.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        size, rank = dist.get_world_size(context.group), dist.get_rank(context.group)
        return gradient.chunk(size, dim=-1)[rank].contiguous(), None


class Column(torch.nn.Module):
    """Some rows of a weight: some of what comes out, unless that is gathered."""

    def __init__(self, features: int, out: int, mpu: Mpu, *, gathers: bool = False) -> None:
        super().__init__()
        self._group, self._gathers = mpu.get_model_parallel_group(), gathers
        whole, rank, size = torch.nn.Linear(features, out), mpu.get_model_parallel_rank(), len_of(mpu)
        self.weight = _part(whole.weight.chunk(size)[rank])
        self.bias = _part(whole.bias.chunk(size)[rank])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.nn.functional.linear(_Enter.apply(x, self._group), self.weight, self.bias)
        return _Gather.apply(found, self._group) if self._gathers else found


class Row(torch.nn.Module):
    """Some columns of a weight: a part of a sum."""

    def __init__(self, features: int, out: int, mpu: Mpu) -> None:
        super().__init__()
        self._group = mpu.get_model_parallel_group()
        whole = torch.nn.Linear(features, out)
        self.weight = _part(whole.weight.chunk(len_of(mpu), dim=1)[mpu.get_model_parallel_rank()])
        self.bias = whole.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _Sum.apply(torch.nn.functional.linear(x, self.weight), self._group) + self.bias
        return found


class Own(torch.nn.Module):
    """A pair of layers, one that gathers what it gives, and others that all slots have."""

    def __init__(self, mpu: Mpu) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.enter, self.up, self.down = torch.nn.Linear(FEATURES, 12), Column(12, 24, mpu), Row(24, 12, mpu)
        self.norm, self.side = torch.nn.LayerNorm(12), Column(12, 12, mpu, gathers=True)
        self.out = torch.nn.Linear(12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        x = self.norm(x + self.down(self.up(x).tanh()))
        found: torch.Tensor = self.out(self.side(x).tanh())
        return found


def len_of(mpu: Mpu) -> int:
    """Slots of a replica."""
    return mpu.get_model_parallel_world_size()


def _part(values: torch.Tensor) -> torch.nn.Parameter:
    """Mark the parameter for DeepSpeed's norm: each slot has another part of it."""
    parameter = torch.nn.Parameter(values.detach().clone())
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    return parameter
