"""ZeRO-1 and ZeRO-2: a rank steps its shard of the flattened parameters, and nobody else holds it.

Told as pieces: the flat shard of a group of parameters is runs of these, with padding that is nobody's. After a change
of the membership DeepSpeed's own constructor builds the optimizer for those who are there, in the object that the
script and the scheduler hold; then the shards are filled from copies, and the weights are had from them.

Where AutoTP has cut the model a parameter is a part of a tensor, and DeepSpeed shards over the slots that have the same
part. While somebody is lost there are parts of other sizes, sharded lane by lane: that object is another then
(`lane_zero.py`), and is DeepSpeed's own again when all are there.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ntp_plugin.copies.pieces import Piece
from ntp_plugin.copies.replicator import Part
from ntp_plugin.deepspeed.cut_replicas import CutReplicas
from ntp_plugin.deepspeed.lane_zero import Groups, LaneZero
from ntp_plugin.deepspeed.whole_replicas import WholeReplicas
from ntp_plugin.replacements import Replacement
from ntp_plugin.training.optimizers import element_wise
from ntp_plugin.training.sharded_step import ShardedStep
from ntp_plugin.training.stepped import Stepped, make_room, parts, shards_of_lanes


class ZeroState:
    """Of a rank, in a job with ZeRO."""

    def __init__(self, engine: Any, replicas: CutReplicas | WholeReplicas) -> None:
        self._engine, self._replicas = engine, replicas
        self._cut = replicas if isinstance(replicas, CutReplicas) else None
        element_wise(engine.basic_optimizer)
        zero = engine.optimizer
        self._kind, self._dtype = type(zero), zero.single_partition_of_fp32_groups[0].dtype
        self._parameters: list[list[Any]] = [list(group) for group in zero.bit16_groups]
        self._groups = engine.basic_optimizer.param_groups
        """All of them: within a step ZeRO has the optimizer see one at a time, and a loss may come there."""

    @property
    def _zero(self) -> Any:
        return self._engine.optimizer

    # ------------------------------------------------ told

    def parts(self) -> list[Part]:
        """What is to be copied, where it lives."""
        return parts(self._stepped(), self._engine.basic_optimizer)

    def _stepped(self) -> list[Stepped]:
        zero = self._zero
        if self._cut is not None and self._cut.lanes:
            return shards_of_lanes(zero.shards, self._cut.piece_of)
        ranks = [dist.get_rank(group=group) for group in zero.real_dp_process_group]
        return [
            Stepped(parameter=shard, pieces=tuple(self._pieces(number, rank * shard.numel(), shard.numel())))
            for number, (rank, shard) in enumerate(zip(ranks, zero.single_partition_of_fp32_groups, strict=True))
        ]

    def _pieces(self, number: int, begin: int, size: int) -> Iterator[tuple[Piece, int]]:
        """Of the flat group, those in the shard that begins there; and where each begins in it."""
        zero = self._zero
        for parameter, meta, offset in zip(
            zero.round_robin_bit16_groups[number],
            zero.round_robin_bit16_meta[number],
            zero.round_robin_bit16_offsets[number],
            strict=True,
        ):
            start, stop = max(begin, offset), min(begin + size, offset + meta.numel())
            if start < stop:
                piece = dataclasses.replace(self._part(parameter), start=start - offset, stop=stop - offset)
                yield piece, start - begin

    def _part(self, parameter: torch.nn.Parameter) -> Piece:
        """What this rank's parameter is of its tensor."""
        return self._replicas.part(self._engine.param_names[parameter])

    # ------------------------------------------------ built anew

    def build_again(self) -> None:
        """For the members of now; whatever the shards held is of no use."""
        engine, zero = self._engine, self._zero
        basic = engine.basic_optimizer
        basic.param_groups = self._groups
        zero.destroy()
        for group, parameters in zip(basic.param_groups, self._parameters, strict=True):
            group["params"] = list(parameters)
            for parameter in parameters:
                parameter.grad = parameter.grad_accum = None
        basic.state.clear()
        vars(zero).clear()
        in_lanes = self._cut is not None and bool(self._cut.lanes)
        zero.__class__ = LaneZero if in_lanes else self._kind
        init = functools.partial(zero.__init__, shards=self._shards) if in_lanes else zero.__init__

        def in_place(_: Any) -> Callable[..., Any]:
            def build(*args: Any, **kwargs: Any) -> Any:
                init(*args, **kwargs)
                return zero

            return build

        take_back = Replacement(
            target="deepspeed.runtime.engine:DeepSpeedZeroOptimizer",
            why="the script and the scheduler hold the object that there is",
            make=in_place,
        ).apply()
        try:
            engine._configure_zero_optimizer(basic)
        finally:
            take_back()
        if engine._support_torch_style_backward:
            zero.register_grad_acc_post_hook(engine._backward_post_hook)

    def _shards(self, groups: Groups) -> ShardedStep:
        assert self._cut is not None, "somebody is lost from replicas that are cut"
        names = self._engine.param_names
        return ShardedStep(
            self._cut.lanes,
            [{names[parameter]: parameter for parameter in group} for group in groups],
            replicas=self._cut.replicas,
            dtype=self._dtype,
        )

    def make_room(self, kinds: Mapping[str, Any]) -> list[Part]:
        """Where what the copies have is to be put."""
        return make_room(self._stepped(), self._engine.basic_optimizer, kinds)

    @torch.no_grad()
    def have_weights(self, giver: int) -> None:
        """Of the shards, and what nobody steps from the rank `giver` of this lane; all members come together."""
        zero, module = self._zero, self._engine.module
        if isinstance(zero, LaneZero):
            zero.shards.spread()
        else:
            zero.update_lp_params()
            for number in range(len(zero.bit16_groups)):
                zero._update_model_bit16_weights(number)
        stepped = {id(parameter) for group in self._parameters for parameter in group}
        for tensor in (*module.parameters(), *module.buffers()):
            if id(tensor) not in stepped:
                dist.broadcast(tensor.data, src=giver, group=self._replicas.lane)
