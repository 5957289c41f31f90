"""Muon (`--optimizer muon`), whose step depends on a whole matrix.

Its state moves with the elements, as that of other optimizers does. But no matrix may be cut anew, so a job in which a
loss could narrow a replica is refused (`option_checks.py`). One parameter holds several matrices: that of a slot that
has experts of a lost slot beside its own, one after the other. Each of them is stepped by itself.
"""

import functools
from typing import Any

import torch

from ntp_plugin.megatron.layers.uneven_layers import cut_of
from ntp_plugin.megatron.reduction.lane_sync import LaneSync
from ntp_plugin.patching import Replacement


def hooks(args: Any, sync: LaneSync) -> tuple[Replacement, ...]:
    """Return the hooks of `--optimizer muon`."""
    if args.optimizer != "muon" or not args.num_experts:
        return ()
    return (
        Replacement(
            target="megatron.core.optimizer.emerging_optimizers:TensorParallelMuon.orthogonalize",
            why="it takes the experts that a slot has one after the other for one matrix",
            make=functools.partial(each_by_itself, sync),
        ),
    )


def each_by_itself(sync: LaneSync, original: Any) -> Any:
    """`TensorParallelMuon.orthogonalize`, matrix by matrix."""
    rows_of_experts = functools.cache(functools.partial(_rows_of_experts, sync))  # a layout steps the same ones

    @functools.wraps(original)
    def orthogonalize(optimizer: Any, parameter: torch.Tensor, gradient: torch.Tensor, **kwargs: Any) -> Any:
        rows = rows_of_experts().get(parameter, gradient.shape[0])
        parts = [original(optimizer, parameter, part, **kwargs) for part in torch.split(gradient, rows)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return orthogonalize


def _rows_of_experts(sync: LaneSync) -> dict[torch.Tensor, int]:
    """Return the rows of an expert, by what is stepped: a parameter of experts, or its float32 copy."""
    cuts = {parameter: cut_of(parameter) for parameter in sync.parameters.values()}
    return {
        getattr(parameter, "main_param", parameter): cut[0].runs[0].unit_size
        for parameter, cut in cuts.items()
        if cut is not None and cut[1].is_experts
    }
