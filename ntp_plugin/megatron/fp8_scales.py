"""FP8's delayed scaling where replicas run different numbers of micro-batches.

TransformerEngine scales a tensor by the largest absolute values that it has seen of it: a history of *amaxes*, and the
scale that follows from them. It takes the maximum over all ranks of a pipeline stage after each forward and each
backward of a micro-batch. In a degraded layout replicas have different numbers of these, so such a collective would
wait for ever, or pair one micro-batch with another. There

- a replica takes the maximum among its own slots after each micro-batch, as with Megatron's `--tp-only-amax-red`. Slots
  need one scale, because with sequence parallelism they gather rows that are quantized already;
- at the end of a step's backward all replicas of a stage take the largest history and the smallest scale of any.

So all ranks of a stage begin each step with the same scales, as in the nominal layout. A replica that ran no
micro-batch takes the others'. A maximum stays in a long history for as long as in that of the replica with the fewest
micro-batches.

Current scaling (`--fp8-recipe tensorwise`) keeps nothing, and needs none of this.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.utils import get_model_config

from ntp_plugin.megatron.unsupported import fp8_recipe, is_fp8
from ntp_plugin.patching import Replacement

_PARTS = {"scale": 1.0, "amax_history": 0.0}
"""What TransformerEngine keeps of the tensors of a layer in one direction -> with which value it begins."""
_DIRECTIONS = ("scaling_fwd", "scaling_bwd")
_QUANTIZERS_OF_A_PRODUCT = 3
"""How many tensors a matrix product quantizes in the forward."""

type Scales = dict[str, torch.Tensor]
"""Scales and histories by `MODULE DIRECTION PART`."""


def is_delayed(args: Any) -> bool:
    """Whether the job keeps scales from micro-batch to micro-batch."""
    return is_fp8(args) and fp8_recipe(args) == "delayed"


def hooks(args: Any) -> tuple[Replacement, ...]:
    """Return the hooks that a degraded layout needs for them."""
    if not is_delayed(args):
        return ()
    return (
        Replacement(
            target="transformer_engine.pytorch.quantization:FP8GlobalStateManager.reduce_tensor_across_group_op_max",
            why="it asks all replicas after each micro-batch, and they have different numbers of them",
            make=_among_own_slots,
        ),
    )


def _among_own_slots(_: Any) -> Any:
    """`FP8GlobalStateManager.reduce_tensor_across_group_op_max`, over this replica's TP group."""

    def reduce(amaxes: torch.Tensor, group: Any) -> None:  # noqa: ARG001  (TransformerEngine's)
        dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=parallel_state.get_tensor_model_parallel_group())

    return reduce


# ---------------------------------------------------------------- what there is


def scales_of(chunks: Sequence[Any]) -> Scales:
    """Return the scales and histories of a model: the tensors that TransformerEngine itself uses.

    A layer has some once it has run; then they stay the same tensors.
    """
    return {
        f"{name} {direction} {part}": getattr(meta[direction], part)
        for name, meta in _layers(chunks)
        for direction in _DIRECTIONS
        if hasattr(meta.get(direction), "amax_history")
        for part in _PARTS
    }


def copy_of(chunks: Sequence[Any]) -> Scales:
    """Return their values."""
    return {name: tensor.detach().clone() for name, tensor in scales_of(chunks).items()}


def set_scales(chunks: Sequence[Any], values: Mapping[str, torch.Tensor]) -> None:
    """Set all scales and histories to these values. What has no value here begins anew."""
    for name, tensor in scales_of(chunks).items():
        if name in values:
            tensor.copy_(values[name])
        else:
            tensor.fill_(_PARTS[name.rpartition(" ")[2]])


def make_room(chunks: Sequence[Any], sizes: Mapping[str, int]) -> None:
    """Have layers that have not run here keep scales, as they do on the rank that reports these sizes.

    TransformerEngine adds a layer to its list of scales to be reduced when the layer first runs, in the order of the
    forward; that is left to it.
    """
    missing = sizes.keys() - scales_of(chunks).keys()
    by_layer = {name.split(" ")[0]: size for name, size in sizes.items() if name.endswith("scaling_fwd scale")}
    wanted = {name.split(" ")[0] for name in missing} & by_layer.keys()
    if not wanted:
        return
    modules = dict(_modules(chunks))
    with torch.no_grad(), get_fp8_context(get_model_config(chunks[0])):  # without gradients it reduces nothing
        for name in sorted(wanted):
            modules[name].init_fp8_metadata(num_gemms=by_layer[name] // _QUANTIZERS_OF_A_PRODUCT)


def forget_recomputations() -> None:
    """Drop the scales that a forward has kept for its recomputation, which a loss may have prevented."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager  # noqa: PLC0415  (only with FP8)

    for kept in FP8GlobalStateManager.quantization_state.fp8_tensors_recompute_buffer:
        kept.clear()


def _modules(chunks: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for number, chunk in enumerate(chunks):
        for name, module in chunk.named_modules():
            if hasattr(module, "fp8_meta"):
                yield f"{number}.{name}", module


def _layers(chunks: Sequence[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, module in _modules(chunks):
        yield name, module.fp8_meta


# ---------------------------------------------------------------- the end of a step's backward


class StageScales:
    """The scales of a pipeline stage, which are the same on all of its ranks when a step ends."""

    def __init__(self, chunks: Sequence[Any], group: Any) -> None:
        self._chunks, self._group = chunks, group
        self._sizes: Mapping[str, int] = {}

    def even_out(self, *, ran: bool) -> None:
        """Take the largest history and the smallest scale of any replica; all ranks of the stage call this together.

        Args:
            ran: Whether this replica has run a micro-batch in this step. If not, it takes what the others have.
        """
        if not self._sizes:
            self._agree_on_sizes()
        scales = scales_of(self._chunks)
        for part, neutral, choice in (
            ("scale", torch.inf, dist.ReduceOp.MIN),
            ("amax_history", 0.0, dist.ReduceOp.MAX),
        ):
            tensors = [scales[name] for name in self._sizes if name.endswith(part)]
            if not tensors:
                continue
            values = torch.cat([tensor.flatten() for tensor in tensors])
            if not ran:
                values.fill_(neutral)
            dist.all_reduce(values, op=choice, group=self._group)
            for tensor, value in zip(tensors, torch.split(values, [tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(value.view(tensor.shape))

    def _agree_on_sizes(self) -> None:
        """Learn what the others keep: a replica that has never run a micro-batch keeps nothing."""
        mine = {name: tensor.numel() for name, tensor in scales_of(self._chunks).items()}
        gathered: list[dict[str, int]] = [{}] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, mine, group=self._group)
        self._sizes = dict(sorted(pair for sizes in gathered for pair in sizes.items()))
        make_room(self._chunks, self._sizes)
