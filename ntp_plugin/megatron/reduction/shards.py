"""What this rank's optimizer steps, as slices of tensors.

    without the distributed optimizer       each parameter of this slot, or its float32 copy, whole
    with it, and nobody lost                Megatron's own shards: a range of each parameter, flattened
    with it, in a degraded layout           lane shards: ranges of several parameters, one after the other

Described as slices of whole tensors (`copies/slices.py`), all three look the same to the code that copies them and
restores them in another layout. The weights themselves are not described: they are what is stepped, rounded, and are
computed from it.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch

from ntp_plugin.copies.slices import TensorSlice
from ntp_plugin.megatron.layout import SHARED, Layout
from ntp_plugin.megatron.reduction.lane_sync import LaneSync
from ntp_plugin.planning.spans import Spans
from ntp_plugin.planning.units import StageUnits, Tensor
from ntp_plugin.reduction import stepped
from ntp_plugin.reduction.stepped import Stepped
from ntp_plugin.resharding.cuts import WHOLE_UNITS, global_ranges


class Naming:
    """The tensors of one stage, under names that are unique in the job."""

    def __init__(self, layout: Layout, segments: Mapping[int, StageUnits]) -> None:
        """`segments` are those of the stage; the stage itself, if no layer may move."""
        self.layout = layout
        self.tensors = {tensor.name: tensor for units in segments.values() for tensor, _ in units.tensors}
        self._families = {
            family.name: family for units in segments.values() for family in (*units.families, *units.experts)
        }
        self._segments = {tensor.name: number for number, units in segments.items() for tensor, _ in units.tensors}
        # Each copy asks for them, and they stay the same for this layout.
        self.tensor_slice, self.places = functools.cache(self._tensor_slice), functools.cache(self._places)

    def _tensor_slice(self, name: str, places: Spans, start: int, stop: int, whole: str) -> TensorSlice:
        """Return a slice of a tensor, by its name on this rank."""
        tensor, stage = self.tensors[name], self.layout.slot.stage
        # Layers that may move have names that are unique in the model.
        title = f"s{stage}.{name}" if self.layout.topology.pp > 1 and self.layout.layers is None else name
        return TensorSlice(
            tensor="the shared word embedding" if tensor.family == SHARED else title,
            shape=tensor.shape,
            dim=tensor.dim,
            ranges=places,
            start=start,
            stop=stop,
            whole=whole,
        )

    def part(self, name: str) -> str:
        """Return a name for the part of the model that a tensor is in, which a group of each replica has."""
        return f"{'stage' if self.layout.surviving.is_nominally_cut else 'segment'} {self._segments[name]}"

    def units(self, tensor: Tensor) -> Spans:
        """Return the units of a tensor that this slot holds, in storage order."""
        return self.layout.held(self._families[tensor.family]) if tensor.family else WHOLE_UNITS

    def _places(self, name: str) -> Spans:
        """Return the places of this slot's part in the whole tensor."""
        tensor = self.tensors[name]
        return global_ranges(tensor, self.units(tensor))

    def holder(self, name: str) -> str:
        """Return a name for the slots that together hold a whole of a tensor that is cut: a replica, or an expert
        group."""
        if self.is_of_experts(name):
            return f"g{self.layout.expert_place.replica}"
        return f"r{self.layout.slot.replica}{self.stage(name)}"

    def is_of_experts(self, name: str) -> bool:
        """Whether an expert group holds the whole of a tensor, and not a replica."""
        family = self._families.get(self.tensors[name].family)
        return family is not None and family.is_experts

    def stage(self, name: str) -> str:
        """Return a name for the stage if several stages have the same tensor, to keep their replica digests apart."""
        return f"s{self.layout.slot.stage}" if self.tensors[name].family == SHARED else ""


# ---------------------------------------------------------------- three kinds


def whole_parameters(stepped: Mapping[str, torch.Tensor], naming: Naming, layout: Layout) -> list[Stepped]:
    """Return the slices of whole parameters. `stepped`: name -> what is stepped for it."""
    found = []
    for name, parameter in stepped.items():
        slot = layout.slot
        whole = naming.holder(name) + f"t{slot.tp}" * (not naming.tensors[name].family)
        tensor_slice = naming.tensor_slice(name, naming.places(name), 0, parameter.numel(), whole)
        found.append(Stepped(parameter=parameter, tensor_slices=((tensor_slice, 0),)))
    return found


def megatrons_shards(optimizer: Any, names: Mapping[Any, str], naming: Naming, layout: Layout) -> list[Stepped]:
    """Return the slices of `DistributedOptimizer`. Each slot of a TP group has a whole of replicated tensors, and each
    instance of the optimizer (`--num-distributed-optimizer-instances`) a whole of all."""
    found, instance = [], f"i{optimizer.distributed_optimizer_instance_id}" * (_instances_of(optimizer) > 1)
    pairs = [
        *zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True),
        *zip(optimizer.model_fp32_groups, optimizer.shard_fp32_groups, strict=True),
    ]
    for parameters, shards in pairs:
        for parameter, shard in zip(parameters, shards, strict=True):
            name, places = names[parameter], optimizer._get_model_param_range_map(parameter)["param"]
            whole = instance + naming.stage(name) + f"t{layout.slot.tp}" * (not naming.tensors[name].family)
            tensor_slice = naming.tensor_slice(name, naming.places(name), places.start, places.end, whole)
            found.append(Stepped(parameter=shard, tensor_slices=((tensor_slice, 0),)))
    return found


def _instances_of(optimizer: Any) -> int:
    return int(optimizer.ddp_config.num_distributed_optimizer_instances)


def shards_of_lanes(sync: LaneSync, naming: Naming) -> list[Stepped]:
    """Return the slices of lane shards; every element of the job is in one of them, once."""

    def slice_of(name: str, places: Spans, start: int, stop: int) -> TensorSlice:
        return naming.tensor_slice(name, places, start, stop, "")

    return stepped.shards_of_lanes([shard for lanes in sync.shards for shard in lanes], slice_of)
