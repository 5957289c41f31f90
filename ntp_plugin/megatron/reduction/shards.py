"""What the optimizer of this rank steps, and which elements of which tensors that is.

    without the distributed optimizer    each parameter of this slot, or its copy of more digits, whole
    with it, and everybody there         Megatron's own shards: a range of each parameter, made flat
    with it, in a degraded layout            shards of lanes: ranges of several parameters, one after the other

RecordedEvent as pieces of whole tensors (`copies/slices.py`), all three are the same to whoever copies them and brings
them back into another layout. The weights themselves are not told: they are what is stepped, rounded, and are had from
it.
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
    """Tensors of one stage, as the whole job calls them."""

    def __init__(self, layout: Layout, units: StageUnits) -> None:
        self.layout = layout
        self.tensors = {tensor.name: tensor for tensor, _ in units.tensors}
        self._families = {family.name: family for family in units.families}
        # They are asked for with each copy, and are the same for as long as there is this layout.
        self.piece, self.places = functools.cache(self._piece), functools.cache(self._places)

    def _piece(self, name: str, places: Spans, start: int, stop: int, whole: str) -> TensorSlice:
        """Of a tensor, by its name on this rank."""
        tensor, stage = self.tensors[name], self.layout.slot.stage
        title = f"s{stage}.{name}" if self.layout.topology.pp > 1 else name
        return TensorSlice(
            tensor="the shared word embedding" if tensor.family == SHARED else title,
            shape=tensor.shape,
            dim=tensor.dim,
            ranges=places,
            start=start,
            stop=stop,
            whole=whole,
        )

    def units(self, tensor: Tensor) -> Spans:
        """That this slot has, in storage order."""
        return self.layout.held(self._families[tensor.family]) if tensor.family else WHOLE_UNITS

    def _places(self, name: str) -> Spans:
        """Of this slot's part."""
        tensor = self.tensors[name]
        return global_ranges(tensor, self.units(tensor))

    def stage(self, name: str) -> str:
        """What tells replica digests of several stages apart, where they have the same tensor."""
        return f"s{self.layout.slot.stage}" if self.tensors[name].family == SHARED else ""


# ---------------------------------------------------------------- three kinds


def whole_parameters(stepped: Mapping[str, torch.Tensor], naming: Naming, layout: Layout) -> list[Stepped]:
    """Name -> what is stepped for it."""
    found = []
    for name, parameter in stepped.items():
        slot = layout.slot
        whole = f"r{slot.replica}{naming.stage(name)}" + f"t{slot.tp}" * (not naming.tensors[name].family)
        piece = naming.piece(name, naming.places(name), 0, parameter.numel(), whole)
        found.append(Stepped(parameter=parameter, pieces=((piece, 0),)))
    return found


def megatrons_shards(optimizer: Any, names: Mapping[Any, str], naming: Naming, layout: Layout) -> list[Stepped]:
    """Of `DistributedOptimizer`. What is replicated over a TP group has a whole in each of its slots."""
    found = []
    pairs = [
        *zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True),
        *zip(optimizer.model_fp32_groups, optimizer.shard_fp32_groups, strict=True),
    ]
    for parameters, shards in pairs:
        for parameter, shard in zip(parameters, shards, strict=True):
            name, places = names[parameter], optimizer._get_model_param_range_map(parameter)["param"]
            whole = naming.stage(name) + f"t{layout.slot.tp}" * (not naming.tensors[name].family)
            piece = naming.piece(name, naming.places(name), places.start, places.end, whole)
            found.append(Stepped(parameter=shard, pieces=((piece, 0),)))
    return found


def shards_of_lanes(sync: LaneSync, naming: Naming) -> list[Stepped]:
    """Every element of the job is in one of these, once."""

    def piece_of(name: str, places: Spans, start: int, stop: int) -> TensorSlice:
        return naming.piece(name, places, start, stop, "")

    return stepped.shards_of_lanes([shard for lanes in sync.shards for shard in lanes], piece_of)
