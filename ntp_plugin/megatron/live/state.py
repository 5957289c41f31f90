"""This rank's weights and optimizer state, moved from peers or restored from copies.

State that is moved from peers keeps its objects, tensor by tensor (`resharding/sharded_state.py`). From copies all of
it is rebuilt: first every parameter gets its new size, then Megatron's model, DDP and optimizer become those of the new
layout, then what the optimizer steps is filled in, and last the weights are computed from it.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ntp_plugin.copies.replicator import Part
from ntp_plugin.copies.slices import TensorSlice
from ntp_plugin.megatron import hooks
from ntp_plugin.megatron.chained import of_torch, parts_of
from ntp_plugin.megatron.layout import SHARED, Layout
from ntp_plugin.megatron.live.model_rebuild import ModelRebuild
from ntp_plugin.megatron.reduction.buckets import bucket_groups
from ntp_plugin.megatron.reduction.lane_sync import LaneSync, named
from ntp_plugin.megatron.reduction.shards import Naming, megatrons_shards, shards_of_lanes, whole_parameters
from ntp_plugin.patching import apply_all
from ntp_plugin.planning.recovery_plan import Nominal
from ntp_plugin.planning.units import Tensor
from ntp_plugin.reduction.stepped import Stepped, make_room, parts
from ntp_plugin.resharding.cuts import local_shape
from ntp_plugin.resharding.rebuild import MAIN, WEIGHT
from ntp_plugin.resharding.sharded_state import ShardedState

type AmongThoseWhoTrain = Callable[[Callable[[], None]], None]


class TrainedState:
    """The trained state of one rank."""

    def __init__(
        self,
        model_rebuild: ModelRebuild,
        parameters: Mapping[str, Any],
        nominal: Nominal,
        *,
        sharded: bool,
        joiner: bool,
    ) -> None:
        self._model_rebuild, self._nominal, self._sharded = model_rebuild, nominal, sharded
        mains = _mains(model_rebuild.optimizer, parameters)
        self.live = ShardedState(parameters, of_torch(model_rebuild.optimizer), mains=mains, joiner=joiner)
        self.live.refuse_what_cannot_be_cut()
        self.sync: LaneSync | None = None
        """Set in a degraded layout."""
        self._named: Naming | None = None
        """Names in the layout of the last call."""

    # ------------------------------------------------ slices of tensors

    def parts(self, layout: Layout) -> list[Part]:
        """Return what is to be copied, in place."""
        return parts(self._stepped(layout), of_torch(self._model_rebuild.optimizer))

    def replicated_state(self, layout: Layout) -> Iterator[tuple[str, str, TensorSlice, dict[str, torch.Tensor]]]:
        """Yield what every replica has: its name, among which replica digests it is, and the slice that this rank has
        of it. What is replicated over a TP group is compared with the same slot in other replicas: only these sum their
        gradients together, bit for bit."""
        naming = self._naming(layout)
        for tensor, tensor_slice in self.slices(layout):
            entries, of_slot = self.live.entries(tensor.name), f" of TP slot {layout.slot.tp}" * (not tensor.family)
            among = tensor_slice.tensor if tensor.family == SHARED else f"{naming.part(tensor.name)}{of_slot}"
            yield (
                tensor_slice.tensor + of_slot,
                among,
                tensor_slice,
                {WEIGHT: entries[WEIGHT]} if self._sharded else entries,
            )

    def slices(self, layout: Layout) -> Iterator[tuple[Tensor, TensorSlice]]:
        """Yield what this rank has of each tensor; its replica has the whole."""
        naming = self._naming(layout)
        for name, tensor in naming.tensors.items() if not layout.is_idle else ():
            size = self.live.parameters[name].numel()
            yield tensor, naming.tensor_slice(name, naming.places(name), 0, size, naming.holder(name))

    def expert_group(self, tensor: Tensor, layout: Layout) -> str:
        """Return the name of the expert group that holds the whole of a tensor, or "" if a replica does."""
        return f"expert group {layout.expert_place.replica}" if self._naming(layout).is_of_experts(tensor.name) else ""

    # ------------------------------------------------ from copies

    def lose(self, layout: Layout, version: int) -> None:
        """Allocate the parameters in their new sizes; their current values are discarded. A parameter that is another
        stage's now has no size."""
        naming = self._naming(layout)
        for name in self.live.parameters:
            tensor = None if layout.is_idle else naming.tensors.get(name)
            shape = (0,) if tensor is None else local_shape(tensor, naming.units(tensor))
            entries = {
                entry: torch.empty(shape, dtype=values.dtype, device=values.device)
                for entry, values in self.live.entries(name).items()
                if entry in (WEIGHT, MAIN)
            }
            self.live.build(name, version, entries, {})
        self.live.switch()

    def have_model(self, version: int) -> None:
        """Take the parameters of the model, whose layers may be others than before."""
        self.live.have_parameters(dict(named(self._model_rebuild.chunks)), version)

    def shard_again(self, layout: Layout, among_those_who_train: AmongThoseWhoTrain) -> None:
        """With the distributed optimizer, rebuild it as Megatron does for the current shards."""
        if not self._sharded:
            return
        take_back = apply_all(hooks.of_the_optimizer(self.sync), offered=False) if self.sync else None
        try:
            among_those_who_train(self._model_rebuild.build_optimizer_again)
        finally:
            if take_back is not None:
                take_back()
        if not layout.is_idle:
            self.live.have_optimizer(of_torch(self._model_rebuild.optimizer))

    def make_room(self, layout: Layout, kinds: Mapping[str, Any]) -> list[Part]:
        """Return the places into which the copies are restored."""
        if layout.is_idle:
            return []
        return make_room(self._stepped(layout), of_torch(self._model_rebuild.optimizer), kinds)

    @torch.no_grad()
    def have_weights(self) -> None:
        """Compute the weights from what is stepped; all ranks that train take part."""
        if not self._sharded:
            for name, main in _mains(self._model_rebuild.optimizer, self.live.parameters).items():
                self.live.parameters[name].data.copy_(main)
        elif self.sync is not None:
            for lanes in self.sync.shards:
                lanes.begin_spread()
                lanes.finish_spread()
        else:
            for optimizer in parts_of(self._model_rebuild.optimizer):
                optimizer._copy_main_params_to_model_params()
            for chunk in self._model_rebuild.chunks:
                chunk.start_param_sync(force_sync=True)

    @torch.no_grad()
    def wait_for_weights(self) -> None:
        """Wait for weights that are on their way when a step ends, with `--overlap-param-gather`."""
        for chunk in self._model_rebuild.chunks if self._sharded else ():
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def weights_are_in_place(self) -> None:
        """After a skipped step, have the next one gather nothing with `--overlap-param-gather`.

        Megatron gathers nothing in a process until a step has changed weights there. So a joining rank whose first step
        is skipped does not gather in its second step either, and ranks that do would wait for it forever.
        """
        for chunk in self._model_rebuild.chunks if self._sharded else ():
            if chunk.ddp_config.overlap_param_gather:
                for group in itertools.chain(*bucket_groups(chunk)):
                    group.param_gather_dispatched = True

    def _stepped(self, layout: Layout) -> list[Stepped]:
        naming, parameters = self._naming(layout), self.live.parameters
        if not self._sharded:
            mains = _mains(self._model_rebuild.optimizer, parameters)
            return whole_parameters({name: mains.get(name, parameters[name]) for name in parameters}, naming, layout)
        if self.sync is not None:
            return shards_of_lanes(self.sync, naming)
        names = {value: name for name, value in parameters.items()}
        return [
            shard
            for optimizer in parts_of(self._model_rebuild.optimizer)
            for shard in megatrons_shards(optimizer, names, naming, layout)
        ]

    def _naming(self, layout: Layout) -> Naming:
        if self._named is None or self._named.layout is not layout:
            self._named = Naming(layout, self._nominal.segments_of(layout.surviving, layout.slot))
        return self._named


def _mains(optimizer: Any, parameters: Mapping[str, Any]) -> dict[str, torch.nn.Parameter]:
    """Return the float32 copies that are stepped instead of bf16 parameters, by the parameters' names."""
    names = {parameter: name for name, parameter in parameters.items()}
    pairs = [
        pair
        for one in parts_of(optimizer)
        for halves, mains in zip(
            getattr(one, "float16_groups", ()), getattr(one, "fp32_from_float16_groups", ()), strict=True
        )
        for pair in zip(halves, mains, strict=True)
    ]
    return {names[half]: main for half, main in pairs}
