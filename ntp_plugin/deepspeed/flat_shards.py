"""DeepSpeed's three sharded optimizers, as flat shards: those of ZeRO-1 and ZeRO-2, of ZeRO-3, and `BF16_Optimizer`
for ZeRO-1 in bf16 with gradients that are added up in float32.

ZeRO-1 and ZeRO-2 flatten each group of parameters, cut it evenly over the slots that hold it, and have torch's
optimizer step this rank's part. ZeRO-3 cuts each parameter, and has the slices of a group stepped together
(`sharded_weights.py`). This module knows what they call that and how the engine makes them; `zero_state.py` uses it.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ntp_plugin.deepspeed import sharded_weights
from ntp_plugin.patching import Replacement

type Groups = list[list[torch.nn.Parameter]]


class Shard(Protocol):
    """What this rank steps as one flat tensor."""

    @property
    def values(self) -> torch.Tensor:
        """The flat tensor."""

    def overlaps(self) -> Iterator[tuple[torch.nn.Parameter, int, int, int]]:
        """Yield the parameters with elements in the shard: the first and last element of theirs, and where these begin
        in the shard."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FlatShard:
    """The part of a parameter group that this rank steps: where it begins in the group, and where each parameter
    does."""

    values: torch.Tensor
    begin: int
    parameters: tuple[tuple[torch.nn.Parameter, int], ...]

    def overlaps(self) -> Iterator[tuple[torch.nn.Parameter, int, int, int]]:
        """As `Shard` has it."""
        end = self.begin + self.values.numel()
        for parameter, offset in self.parameters:
            start, stop = max(self.begin, offset), min(end, offset + parameter.numel())
            if start < stop:
                yield parameter, start - offset, stop - offset, start - self.begin


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FlatShardKind:
    """One of the three optimizers."""

    module: str
    """Where the engine looks its class up."""
    name: str
    make: Callable[[Any, Any], Any]
    """Build it, with an engine, around an optimizer of torch."""
    parameters: Callable[[Any], Groups]
    shards: Callable[[Any], Sequence[Shard]]
    spread: Callable[[Any], None]
    """Get the weights from what is stepped, on every rank that holds them; all of these take part."""
    dismantle: Callable[[Any], None] = lambda zero: zero.destroy()
    """Remove what it has put into the model, before it is built again."""
    gathers_when_built: bool = False
    """Whether its constructor gathers the weights, which are restored later anyway: it then runs without the others."""

    def make_again(self, zero: Any, engine: Any, init: Callable[..., None]) -> None:
        """Build the optimizer again in the existing object, which the script and the scheduler hold."""

        def in_place(_: Any) -> Callable[..., Any]:
            def build(*args: Any, **kwargs: Any) -> Any:
                init(*args, **kwargs)
                return zero

            return build

        take_back = Replacement(
            target=f"{self.module}:{self.name}",
            why="the script and the scheduler hold the existing object",
            make=in_place,
        ).apply()
        try:
            self.make(engine, engine.basic_optimizer)
        finally:
            take_back()


def kind_of(zero: Any) -> FlatShardKind:
    """Return the kind, by the class that the engine has made."""
    return next((kind for kind in (_IN_FLOAT32, _STAGE_3) if type(zero).__name__ == kind.name), _ZERO)


def _shards_of_zero(zero: Any) -> Sequence[Shard]:
    in_order = zip(zero.round_robin_bit16_groups, zero.round_robin_bit16_offsets, strict=True)
    parameters = [tuple(zip(group, offsets, strict=True)) for group, offsets in in_order]
    return _shards(zero, zero.single_partition_of_fp32_groups, parameters)


def _shards_in_float32(zero: Any) -> Sequence[Shard]:
    return _shards(zero, zero.fp32_groups_flat_partition, [tuple(_one_after_another(one)) for one in zero.bf16_groups])


def _one_after_another(group: Iterable[torch.nn.Parameter]) -> Iterator[tuple[torch.nn.Parameter, int]]:
    offset = 0
    for parameter in group:
        yield parameter, offset
        offset += parameter.numel()


def _shards(zero: Any, values: Iterable[torch.Tensor], parameters: Iterable[Any]) -> Sequence[Shard]:
    ranks = (dist.get_rank(group=group) for group in zero.real_dp_process_group)
    return [
        FlatShard(values=shard, begin=rank * shard.numel(), parameters=of_group)
        for rank, shard, of_group in zip(ranks, values, parameters, strict=True)
    ]


def _spread_by_zero(zero: Any) -> None:
    zero.update_lp_params()
    for number in range(len(zero.bit16_groups)):
        zero._update_model_bit16_weights(number)


_ENGINE = "deepspeed.runtime.engine"
_ZERO = FlatShardKind(
    module=_ENGINE,
    name="DeepSpeedZeroOptimizer",
    make=lambda engine, optimizer: engine._configure_zero_optimizer(optimizer),
    parameters=lambda zero: [list(group) for group in zero.bit16_groups],
    shards=_shards_of_zero,
    spread=_spread_by_zero,
)
_IN_FLOAT32 = FlatShardKind(
    module=_ENGINE,
    name="BF16_Optimizer",
    make=lambda engine, optimizer: engine._configure_bf16_optimizer(optimizer),
    parameters=lambda zero: [list(group) for group in zero.bf16_groups],
    shards=_shards_in_float32,
    spread=lambda zero: zero.update_lp_params(),
)
_STAGE_3 = FlatShardKind(
    module="deepspeed.runtime.zero.stage3",
    name="DeepSpeedZeroOptimizer_Stage3",
    make=_ZERO.make,
    parameters=sharded_weights.groups_stepped,
    shards=sharded_weights.slices_stepped,
    spread=sharded_weights.spread,
    dismantle=sharded_weights.dismantle,
    gathers_when_built=True,
)
