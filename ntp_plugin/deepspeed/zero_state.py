"""ZeRO: shards as slices of tensors, rebuilt for the members, filled from copies.

A rank steps its shard of the flattened parameters, and nobody else holds it. A flat shard is described as slices of
whole tensors, with padding that belongs to none. After a change of the membership, DeepSpeed's own constructor rebuilds
the optimizer for the members, in the object that the script and the scheduler hold; then the shards are filled from
copies, and the weights are computed from them. With ZeRO-3 the weights are sharded as well, and a parameter that nobody
steps is in the copies too, because each of its slices is held once.

If AutoTP has cut the model, a parameter is a part of a tensor, and DeepSpeed shards over the slots that hold the same
part. While a rank is lost the parts have other sizes and are sharded lane by lane: the object then has another class
(`lane_zero.py`), and is DeepSpeed's own again when all ranks are back.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from ntp_plugin.copies.replicator import Part
from ntp_plugin.copies.slices import TensorSlice
from ntp_plugin.deepspeed.autotp_replicas import CutReplicas
from ntp_plugin.deepspeed.flat_shards import Groups, kind_of
from ntp_plugin.deepspeed.full_width_replicas import FullWidthReplicas
from ntp_plugin.deepspeed.lane_zero import LaneZero
from ntp_plugin.deepspeed.sharded_weights import external_parameters, forget_found_parameters
from ntp_plugin.reduction.sharded_step import ShardedStep
from ntp_plugin.reduction.stepped import Stepped, make_room, parts, shards_of_lanes
from ntp_plugin.training.optimizers import accept_rounding_by_place, element_wise


class ZeroState:
    """One rank's state in a job with ZeRO."""

    def __init__(
        self,
        engine: Any,
        replicas: CutReplicas | FullWidthReplicas,
        *,
        built_alone: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`built_alone`: a context in which the collectives of all ranks are answered without them."""
        self._engine, self._replicas, self._built_alone = engine, replicas, built_alone
        self._cut = replicas if isinstance(replicas, CutReplicas) else None
        accept_rounding_by_place(engine.basic_optimizer)
        element_wise(engine.basic_optimizer)
        zero = engine.optimizer
        self._kind, self._nominal = kind_of(zero), type(zero)
        self._dtype = self._kind.shards(zero)[0].values.dtype
        self._parameters: list[list[Any]] = [*self._kind.parameters(zero)]
        self._external = external_parameters(engine.module)
        self._groups = engine.basic_optimizer.param_groups
        """All parameter groups: within a step ZeRO shows the optimizer one at a time, and a loss may come then."""

    @property
    def _zero(self) -> Any:
        return self._engine.optimizer

    # ------------------------------------------------ slices of tensors

    def parts(self) -> list[Part]:
        """Return what is to be copied, in place."""
        return parts(self._stepped(), self._engine.basic_optimizer)

    def _stepped(self) -> list[Stepped]:
        zero = self._zero
        if self._cut is not None and self._cut.lanes:
            return shards_of_lanes(zero.shards, self._cut.slice_of)
        return [
            Stepped(
                parameter=shard.values,
                tensor_slices=tuple(
                    (dataclasses.replace(self._part(parameter), start=start, stop=stop), at)
                    for parameter, start, stop, at in shard.overlaps()
                ),
            )
            for shard in self._kind.shards(zero)
        ]

    def _part(self, parameter: torch.nn.Parameter) -> TensorSlice:
        """Return which slice of its tensor this rank's parameter is."""
        return self._replicas.part(self._engine.param_names[parameter])

    # ------------------------------------------------ rebuilt

    def build_again(self) -> None:
        """Rebuild the optimizer for the current members; what the shards held is discarded."""
        engine, zero = self._engine, self._zero
        basic = engine.basic_optimizer
        basic.param_groups = self._groups
        self._kind.dismantle(zero)
        forget_found_parameters(self._external)
        for group, parameters in zip(basic.param_groups, self._parameters, strict=True):
            group["params"] = list(parameters)
            for parameter in parameters:
                parameter.grad = parameter.grad_accum = None
        basic.state.clear()
        vars(zero).clear()
        in_lanes = self._cut is not None and bool(self._cut.lanes)
        zero.__class__ = LaneZero if in_lanes else self._nominal
        init = functools.partial(zero.__init__, shards=self._shards) if in_lanes else zero.__init__
        with self._built_alone() if self._kind.gathers_when_built else contextlib.nullcontext():
            self._kind.make_again(zero, engine, init)
        if engine._support_torch_style_backward:
            zero.register_grad_acc_post_hook(engine._backward_post_hook)

    def _shards(self, groups: Groups) -> ShardedStep:
        assert self._cut is not None, "somebody is lost from replicas that are cut"
        names = self._engine.param_names
        return ShardedStep(
            self._cut.lanes,
            [{names[parameter]: parameter for parameter in group} for group in groups],
            replicas=self._cut.divisor,
            dtype=self._dtype,
        )

    def make_room(self, kinds: Mapping[str, Any]) -> list[Part]:
        """Return the places into which the copies are restored."""
        return make_room(self._stepped(), self._engine.basic_optimizer, kinds)

    @torch.no_grad()
    def have_weights(self, giver: int) -> None:
        """Compute the weights from the shards, and get the rest from the rank `giver` of this lane; all members take
        part."""
        zero, module = self._zero, self._engine.module
        if isinstance(zero, LaneZero):
            zero.shards.spread()
        else:
            self._kind.spread(zero)
        stepped = {id(parameter) for group in self._parameters for parameter in group}
        for tensor in (*module.parameters(), *module.buffers()):
            if id(tensor) not in stepped:
                dist.broadcast(tensor.data, src=giver, group=self._replicas.lane)
