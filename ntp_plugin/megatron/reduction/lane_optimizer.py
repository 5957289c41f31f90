"""Megatron's optimizer on lane shards: `--use-distributed-optimizer` in a degraded layout.

Megatron's distributed optimizer cuts its buffers evenly over a data-parallel group. Here each lane has its own shards
(`reduction/sharded_optimizer.py`): Megatron's ordinary float32 optimizer is built for these instead of the parameters,
with Megatron's own parameter groups (which have weight decay, which learning rate), and after its step the shards are
spread. Every element of the model is in one shard of one rank, so the norm is a sum over the world.

With `--overlap-param-gather` nothing waits for the parameters here: those of the first layers come first, and DDP's
hooks have the forward wait for each bucket group when it gets there (`buckets.py`).
"""

import copy
import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from ntp_plugin.megatron.checkpoint.lane_checkpoints import LaneCheckpoints
from ntp_plugin.megatron.reduction.lane_sync import LaneSync
from ntp_plugin.reduction.sharded_optimizer import LaneShards
from ntp_plugin.training.optimizers import element_wise


class LaneOptimizer:
    """Replaces the function by which Megatron builds an optimizer for groups of parameters."""

    def __init__(self, sync: LaneSync) -> None:
        self._sync = sync

    def build(self, original: Any) -> Any:
        """`_get_megatron_optimizer_based_on_param_groups`."""

        @functools.wraps(original)
        def build(*, config: Any, param_groups: list[dict[str, Any]], **kwargs: Any) -> Any:
            if not self._sync.shards:
                return _known(original(config=config, param_groups=param_groups, **kwargs))
            plain = copy.copy(config)
            plain.use_distributed_optimizer = plain.bf16 = False  # in fp16 it has a loss scale for its float32 shards
            before = [len(list(lanes)) for lanes in self._sync.shards]
            groups = [{**group, "params": self._shards_of(group["params"])} for group in param_groups]
            mine = [lanes for lanes, had in zip(self._sync.shards, before, strict=True) if len(list(lanes)) > had]
            kwargs["model_parallel_group"] = dist.group.WORLD
            optimizer = _known(original(config=plain, param_groups=groups, **kwargs))
            optimizer.step_with_ready_grads = self._and_spread(optimizer.step_with_ready_grads, mine)
            stepped = {parameter for group in param_groups for parameter in group["params"]}
            parameters = {name: one for name, one in self._sync.parameters.items() if one in stepped}
            LaneCheckpoints(parameters, mine, optimizer).into()
            return optimizer

        return build

    def _shards_of(self, parameters: Iterable[Any]) -> list[torch.nn.Parameter]:
        wanted = set(parameters)
        named = self._sync.parameters
        names = {name for name, parameter in named.items() if parameter in wanted}
        values = {name: parameter.data for name, parameter in named.items()}
        shards = [shard for lanes in self._sync.shards for shard in lanes.shard(names, values, dtype=torch.float32)]
        for shard in shards:
            counted: Any = shard.parameter
            counted.tensor_model_parallel = True  # in the norm, on every rank
            counted.main_grad = shard.gradient
        return [shard.parameter for shard in shards]

    def _and_spread(self, step: Any, mine: list[LaneShards]) -> Any:
        """`step_with_ready_grads`, followed by spreading the lanes that the optimizer steps: those of experts have one
        of their own."""

        @functools.wraps(step)
        def step_and_spread() -> Any:
            self._finish()  # a replica without micro-batches has had no forward that waited
            done = step()
            late, *buckets = self._sync.shards
            with torch.no_grad():
                for lanes in (late, *reversed(buckets)):  # the last bucket has what the forward begins with
                    if lanes in mine:
                        lanes.begin_spread()
            if not self._sync.waits_in_forward:
                self._finish()
            return done

        return step_and_spread

    @torch.no_grad()
    def _finish(self) -> None:
        for lanes in self._sync.shards:
            lanes.finish_spread()


def _known(optimizer: Any) -> Any:
    """Return Megatron's optimizer, or raise if what it wraps is not element-wise."""
    if optimizer.optimizer is not None:
        element_wise(optimizer.optimizer)
    return optimizer
