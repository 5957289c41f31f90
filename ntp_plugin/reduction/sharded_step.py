"""A step of an optimizer whose state is sharded by lane, in a degraded layout; it replaces a framework's own step.

An optimizer has groups of parameters, each with its own settings. Instead of the parameters of a group it gets this
member's shards of them (`sharded_optimizer.py`). A step is then: sum the gradients, take the norm of all shards to
clip, step the shards, and give all members the weights of all shards.

Every element of the job is in one shard of one member, so the norm is one sum over all members, and the same
everywhere.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from ntp_plugin.reduction.gradient_lanes import GradientLane
from ntp_plugin.reduction.sharded_optimizer import LaneShard, LaneShards


class ShardedStep:
    """The step of one member, in one layout."""

    def __init__(
        self,
        lanes: Sequence[GradientLane],
        groups: Sequence[Mapping[str, torch.nn.Parameter]],
        *,
        replicas: int,
        dtype: torch.dtype,
    ) -> None:
        """Make the shards, of `dtype`; the gradient is the mean over this number of `replicas`."""
        self._replicas, self._dtype, self._shards = replicas, dtype, LaneShards(lanes)
        self._parameters = {name: parameter for group in groups for name, parameter in group.items()}
        values = {name: parameter.data for name, parameter in self._parameters.items()}
        self.groups = [
            [shard.parameter for shard in self._shards.shard(group, values, dtype=dtype)] for group in groups
        ]
        """The parameters that the optimizer gets, group by group."""

    def __iter__(self) -> Iterator[LaneShard]:
        """Iterate over the shards."""
        return iter(self._shards)

    @property
    def gradients(self) -> list[torch.Tensor]:
        """The gradients of the shards."""
        return [shard.gradient for shard in self._shards]

    @torch.no_grad()
    def sum(self) -> None:
        """Sum the gradients of the parameters into those of the shards, and release the former."""
        self._shards.begin({name: self._taken(parameter) for name, parameter in self._parameters.items()}).finish()
        self._shards.scale_gradients(1 / self._replicas)

    def _taken(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        gradient, parameter.grad = parameter.grad, None
        return torch.zeros_like(parameter, dtype=self._dtype) if gradient is None else gradient.to(self._dtype)

    @torch.no_grad()
    def norm(self) -> torch.Tensor:
        """The norm of the full gradient; all members call this together."""
        squares = [torch.linalg.vector_norm(gradient, dtype=torch.float64).square() for gradient in self.gradients]
        whole = torch.stack(squares).sum()
        dist.all_reduce(whole)
        return whole.sqrt()

    def step(self, apply: Callable[[], None]) -> None:
        """Run the optimizer's own step, with the gradients of the shards."""
        for shard in self._shards:
            shard.parameter.grad = shard.gradient
        apply()
        for shard in self._shards:
            shard.parameter.grad = None

    @torch.no_grad()
    def spread(self) -> None:
        """Give all members the stepped weights; the members of each lane call this together."""
        self._shards.begin_spread()
        self._shards.finish_spread()
