"""A step in a degraded layout by an optimizer whose state is sharded lane by lane, in the place of a framework's own.

An optimizer has groups of parameters, each with its own settings; in the place of the parameters of a group it is given
the shards of them that this member has of its lanes (`sharded_optimizer.py`). A step is then: the gradients are summed,
whoever has to clip takes the norm of all shards, the optimizer steps what it was given, and everybody has the weights
of all shards.

Every element of the job is in one shard of one member, so the norm is one sum over all, and the same number everywhere.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from ntp_plugin.reduction.gradient_lanes import GradientLane
from ntp_plugin.reduction.sharded_optimizer import LaneShard, LaneShards


class ShardedStep:
    """Of one member, in one layout."""

    def __init__(
        self,
        lanes: Sequence[GradientLane],
        groups: Sequence[Mapping[str, torch.nn.Parameter]],
        *,
        replicas: int,
        dtype: torch.dtype,
    ) -> None:
        """The shards are of `dtype`, and the gradient is the mean over so many `replicas`."""
        self._replicas, self._dtype, self._shards = replicas, dtype, LaneShards(lanes)
        self._parameters = {name: parameter for group in groups for name, parameter in group.items()}
        values = {name: parameter.data for name, parameter in self._parameters.items()}
        self.groups = [
            [shard.parameter for shard in self._shards.shard(group, values, dtype=dtype)] for group in groups
        ]
        """What the optimizer is given, group by group."""

    def __iter__(self) -> Iterator[LaneShard]:
        """The shards."""
        return iter(self._shards)

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Of the shards."""
        return [shard.gradient for shard in self._shards]

    @torch.no_grad()
    def sum(self) -> None:
        """Have them, of the gradients that the parameters have, which are let go of."""
        self._shards.begin({name: self._taken(parameter) for name, parameter in self._parameters.items()}).finish()
        self._shards.scale_gradients(1 / self._replicas)

    def _taken(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        gradient, parameter.grad = parameter.grad, None
        return torch.zeros_like(parameter, dtype=self._dtype) if gradient is None else gradient.to(self._dtype)

    @torch.no_grad()
    def norm(self) -> torch.Tensor:
        """Of the whole gradient; all members come together."""
        squares = [torch.linalg.vector_norm(gradient, dtype=torch.float64).square() for gradient in self.gradients]
        whole = torch.stack(squares).sum()
        dist.all_reduce(whole)
        return whole.sqrt()

    def step(self, apply: Callable[[], None]) -> None:
        """The optimizer's own, with the gradients of the shards."""
        for shard in self._shards:
            shard.parameter.grad = shard.gradient
        apply()
        for shard in self._shards:
            shard.parameter.grad = None

    @torch.no_grad()
    def spread(self) -> None:
        """Have the weights of what all have stepped; the members of each lane come together."""
        self._shards.begin_spread()
        self._shards.finish_spread()
