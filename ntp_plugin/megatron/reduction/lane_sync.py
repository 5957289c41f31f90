"""Sums gradients lane by lane, with the exact scale and one norm for all ranks.

Cut parameters go into the lanes of this rank, or over the cores of its group, as their buckets become complete
(`buckets.py`). Replicated ones wait until the TP group has added what only its slots together know (the norms of
queries and keys, and all norms under sequence parallelism); then they are summed over the whole stage, once for each
replica.

Each pipeline stage has lanes of its own. Only a word embedding that is also the output layer is in both the first and
the last stage. Its rows go into lanes over both stages, late, when both have ended their backward.

Scale. Without `calculate_per_token_loss` Megatron's gradient is the mean over micro-batches: a replica has divided its
own by how many it ran, and its weight is its share of all micro-batches. In fp16 it has divided by how many a
full-width replica runs (`batch_share.py`), and all replicas weigh the same. With `calculate_per_token_loss`, gradients
are sums over tokens, to be divided by the number of tokens in the global batch.

Norm. Each replica computes it from the same gradients, cut differently, so its last bits differ. All ranks take the
largest of them, and so all clip by the same bits.
"""

import copy
import functools
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.utils import get_attr_wrapped_model

from ntp_plugin.copies import digest
from ntp_plugin.copies.runs import MODULUS, runs_of
from ntp_plugin.errors import StateLost
from ntp_plugin.megatron.fp8_scales import StageScales, is_delayed
from ntp_plugin.megatron.job import JobPlan
from ntp_plugin.megatron.layers.uneven_layers import describe
from ntp_plugin.megatron.layout import SHARED, Layout
from ntp_plugin.megatron.reduction.buckets import (
    LaneBucketGroup,
    Sums,
    bucket_groups,
    even_buckets,
    with_whole_buffers,
)
from ntp_plugin.megatron.reduction.core_groups import find_core_exchange
from ntp_plugin.megatron.reduction.lane_groups import Made, wanted_groups
from ntp_plugin.megatron.reduction.logged_numbers import norm_of, zeros_in
from ntp_plugin.planning.expert_groups import plan_expert_lanes
from ntp_plugin.planning.lanes import plan_shared_lanes
from ntp_plugin.planning.spans import Spans
from ntp_plugin.planning.units import Family, StageUnits, Tensor
from ntp_plugin.reduction.core_lanes import CoreExchange, CoreShards, CoreSums
from ntp_plugin.reduction.gradient_lanes import GradientLane, GradientLanes, Slice, only, pack, unpack
from ntp_plugin.reduction.sharded_optimizer import LaneShard, LaneShards
from ntp_plugin.resharding.cuts import WHOLE_UNITS, global_ranges, local_ranges

_SUMMED_TOGETHER = 1 << 13
"""Elements of a gradient that are summed together for the norm."""


class LaneSync:
    """Replaces DDP's constructor, and what is computed from all gradients or parameters together."""

    def __init__(self, job: JobPlan) -> None:
        self._job, self._layout = job, job.layout
        self.parameters: dict[str, Any] = {}
        """The parameters of all chunks of this rank's model, once there is one."""
        self.tensors: dict[str, Tensor] = {}
        """The same as planning describes them."""
        self.shards: list[LaneShards] = []
        """With the distributed optimizer, all shards that this rank keeps state for. What is summed late comes
        first."""
        self.everybody: Any = None
        """The group of all ranks that train; None if that is the world."""
        self.stage: Any = None
        """The group of the ranks that train in this rank's stage; None where layers have moved."""
        self.dispatch: Any = None
        """The ranks that are left of this rank's expert group, if it has lost some."""
        self._expert_column: Any = None
        """The same over all stages."""
        self._sharded = False
        self._core_exchange: CoreExchange | None = None
        self._sum_late: Sums
        self._scales: StageScales | None = None
        """FP8's scales, if they are kept from micro-batch to micro-batch."""
        self._chunks: list[Any] = []

    @property
    def layout(self) -> Layout:
        """The layout whose replicas these sums are over."""
        return self._layout

    def model_wrapper(self, original: Any) -> Any:
        """`DistributedDataParallel.__init__`: whole buffers, even buckets, and with the last chunk the lanes.

        As in Megatron, only the first chunk of the first stage has more than one bucket.
        """

        @functools.wraps(original)
        def init(ddp: Any, config: Any, ddp_config: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            kwargs["full_param_layout"] = None
            if not self._layout.surviving.is_nominally_cut:  # first stages have other layers in other replicas
                kwargs["disable_bucketing"] = True
            if ddp_config.overlap_grad_reduce and not kwargs.get("disable_bucketing") and not self._layout.slot.stage:
                chunk = dict(module.named_parameters())
                sizes = {chunk[tensor.name]: tensor.elements for tensor, _ in self._units_of(chunk).tensors}
                kwargs["full_param_layout"] = even_buckets(self._job.args, ddp_config, sizes, self._layout.topology)
            original(ddp, config, with_whole_buffers(ddp_config), module, *args, **kwargs)
            self._chunks.append(ddp)
            if len(self._chunks) == (self._job.args.virtual_pipeline_model_parallel_size or 1):
                self._sharded = ddp_config.use_distributed_optimizer
                self._take_over()

        return init

    def _take_over(self) -> None:
        """Plan, make the lanes, compare the weights, and connect the buckets to the lanes."""
        self.parameters = dict(named(self._chunks))
        self.tensors = {tensor.name: tensor for tensor, _ in self._units_of(self.parameters).tensors}
        at_start = not self._job.planned  # later, weights have been moved and compared
        sequence = self._job.args.seq_length
        plan = self._job.agree(described(self.parameters, self._layout, sequence)) if at_start else self._job.plan
        wanted = wanted_groups(self._layout, plan)
        made = dict(zip(wanted, self._job.make_groups(list(wanted.values())), strict=True))
        self.everybody = made.get(("all", 0, 0))
        if self._layout.surviving.is_nominally_cut:
            self.stage = made["segment", self._layout.slot.stage, 0]
        if self._layout.sends_experts_elsewhere:
            place = self._layout.expert_place
            self.dispatch = made["dispatch", place.stage, place.replica] or self._job.alone()
            self._expert_column = made["column", 0, place.replica] or self._job.alone()
        self._core_exchange = find_core_exchange(self._layout, plan, wanted, made)
        lanes, replicated = self._make_lanes(made), self._replicated_lanes(made)
        if at_start and not self._layout.surviving.is_nominally_cut:
            self._draw_nominally([*lanes, *replicated])
        late = [*replicated, *self._shared_lanes(made, even_out=at_start)]
        if at_start:
            self.require_equal_units()
        if is_delayed(self._job.args):
            self._scales = StageScales(self._chunks, self.stage)
        names = {parameter: name for name, parameter in self.parameters.items()}
        self._sum_late = self._sums(late)
        summed_late = tuple(self.shards)
        for groups in [groups for chunk in self._chunks for groups in bucket_groups(chunk)]:
            for before, group in itertools.pairwise([None, *groups]):
                begin = self._sums_of(lanes, {names[parameter] for parameter in group.params})
                gathered = (*summed_late, *self.shards[-1:])
                LaneBucketGroup.take_over(group, begin, names, lambda: self.scale, gathered, before=before)
        for chunk in self._chunks:
            chunk.config.finalize_model_grads_func = self.finalize
        _sum_losses_alone(self._chunks, self._job.alone())

    def _units_of(self, parameters: Mapping[str, Any]) -> StageUnits:
        return describe(parameters, sequence=self._job.args.seq_length, last=self._layout.last)

    @property
    def scale(self) -> float:
        """The weight of this replica's gradients in the sum, in the step under way."""
        if self._job.args.calculate_per_token_loss:
            return 1.0
        shared_by = self._layout.context_degree  # each replica of a context group has the mean over its own tokens
        if self.weighs_nominally:
            return 1.0 / (self._job.batch.replicas * shared_by)
        samples = self._job.batch.total * self._job.batch.micro_batch
        return self._job.runs * self._job.share.size / (samples * shared_by)

    @property
    def weighs_nominally(self) -> bool:
        """Whether a micro-batch weighs as much in this replica's gradients as in those of a full-width one."""
        args = self._job.args
        return bool(args.fp16) and not args.calculate_per_token_loss

    def held(self) -> dict[str, Spans]:
        """Return the units of every tensor that this slot holds, in storage order."""
        parts = self._job.segments.values()
        families = {family.name: family for part in parts for family in (*part.families, *part.experts)}
        return {
            name: self._layout.held(families[tensor.family]) if tensor.family else WHOLE_UNITS
            for name, tensor in self.tensors.items()
        }

    def require_equal_units(self) -> None:
        """Raise unless the weights are the same in all replicas, bit for bit; all ranks call this together."""
        held = self.held()
        mine = {
            self._title(name): (self._holder(tensor), _digest(tensor, held[name], self.parameters[name]))
            for name, tensor in self.tensors.items()
        }
        gathered: list[dict[str, tuple[str, int]]] = [{}] * len(self._layout.slots)
        dist.all_gather_object(gathered, mine)
        _require_equal(gathered)

    def same_weights(self, _: Any) -> Any:
        """`check_param_hashes_across_dp_replicas`: raises where Megatron returns False, and names the tensor."""

        def compare(*_: Any, **__: Any) -> bool:
            self.require_equal_units()
            return True

        return compare

    def _title(self, name: str) -> str:
        """Return a tensor's name, unique among all stages."""
        if self.tensors[name].family == SHARED:
            return "the shared word embedding"
        has_stages = self._layout.topology.pp > 1 and self._layout.surviving.is_nominally_cut
        return f"{name} of stage {self._layout.slot.stage}" if has_stages else name

    def _holder(self, tensor: Tensor) -> str:
        """Return the name of the ranks that hold the whole tensor together."""
        if not tensor.family:
            return f"rank {self._layout.rank}"
        slot = self._layout.slot
        if tensor.family in self._experts:
            return f"expert group {self._layout.expert_place.replica}"
        return f"replica {slot.replica}" + f" stage {slot.stage}" * (tensor.family == SHARED)

    @property
    def _experts(self) -> dict[str, Family]:
        """The families of experts in this rank's stage, by name."""
        return {family.name: family for part in self._job.segments.values() for family in part.experts}

    # ------------------------------------------------ lanes

    def _make_lanes(self, made: Made) -> list[GradientLane]:
        """Return the lanes of this rank, segment by segment."""
        mine, surviving = [], self._layout.surviving
        for segment, units_of_segment in self._job.segments.items():
            route = self._job.plan.routes[segment]
            for number, lane in enumerate(route.lanes.lanes if route.cores is None else ()):
                if self._layout.slot in lane.members(surviving):
                    units = {name: spans for name, spans in lane.units if name != SHARED}
                    slices = self._slices(units, units_of_segment)
                    mine.append(GradientLane(group=made["lane", segment, number], slices=slices))
            experts = plan_expert_lanes(surviving, units_of_segment.experts, segment)
            for number, of_experts in enumerate(experts):
                if self._layout.slot in of_experts.members:
                    slices = self._slices(dict(of_experts.units), units_of_segment)
                    mine.append(GradientLane(group=made["expert", segment, number], slices=slices))
        return mine

    def _replicated_lanes(self, made: Made) -> list[GradientLane]:
        """Return the lanes of replicated parameters, each over all ranks with a segment that this rank has."""
        return [
            GradientLane(
                group=made["segment", segment, 0],
                slices=tuple(
                    Slice(name=tensor.name, dim=0, ranges=((0, tensor.shape[0]),), places=((0, tensor.shape[0]),))
                    for tensor, _ in units.tensors
                    if not tensor.family
                ),
                counted=self._layout.is_replica_leader,
            )
            for segment, units in self._job.segments.items()
        ]

    def _draw_nominally(self, lanes: Iterable[GradientLane]) -> None:
        """Take the weights of a replica whose layers have not moved: each stage draws its own, one after the other. If
        there is none, a checkpoint is about to be loaded."""
        layout, values = self._layout, {name: parameter.data for name, parameter in self.parameters.items()}
        moved = layout.surviving.placement.moved if layout.surviving.placement else {}
        for lane in lanes:
            members = [layout.present[rank] for rank in dist.get_process_group_ranks(lane.group)]
            source = next((slot for slot in members if slot.replica not in moved), members[0])
            packed = pack(lane.slices, values)
            dist.broadcast(packed, layout.ranks[source], group=lane.group)
            unpack(lane.slices, values, packed)

    def _shared_lanes(self, made: Made, *, even_out: bool) -> list[GradientLane]:
        """Return the lanes of rows that are in the first and the last stage; the last stage begins with zeros, and gets
        them here."""
        mine, values = [], {name: parameter.data for name, parameter in self.parameters.items()}
        surviving = self._layout.surviving
        shared = plan_shared_lanes(surviving, self._job.plan.nominal.segments(surviving), SHARED)
        for number, (members, units) in enumerate(shared):
            if self._layout.slot in members:
                group = made["shared", 0, number]
                lane = GradientLane(group=group, slices=self._slices({SHARED: units}))
                mine.append(lane)
                if even_out:
                    rows = pack(lane.slices, values)
                    dist.broadcast(rows, self._layout.ranks[members[0]], group=group)
                    if self._layout.slot.stage != members[0].stage:
                        unpack(lane.slices, values, rows)
        return mine

    def _sums(self, lanes: list[GradientLane]) -> Sums:
        """Return how the gradients of some lanes are summed: whole, or each rank its shard."""
        if not self._sharded:
            return functools.partial(GradientLanes, lanes)
        self.shards.append(LaneShards(lanes))
        return self.shards[-1].begin

    def _sums_of(self, lanes: list[GradientLane], names: Collection[str]) -> Sums:
        """Return how the gradients of these parameters are summed, by the planned route."""
        if self._core_exchange is None:
            return self._sums(only(lanes, names))
        core_exchange = self._core_exchange.only({name for name in names if self.tensors[name].family != SHARED})
        if not self._sharded:
            return CoreSums(core_exchange).begin
        self.shards.append(CoreShards(core_exchange))
        return self.shards[-1].begin

    def _slices(self, units: Mapping[str, Spans], part: StageUnits | None = None) -> tuple[Slice, ...]:
        """Return what these units are of the tensors of a part of the model, or of all that this rank has."""
        held = self.held()
        return tuple(
            Slice(
                name=tensor.name,
                dim=tensor.dim,
                ranges=local_ranges(tensor, held[tensor.name], units[tensor.family]),
                places=tensor.local_index(units[tensor.family]),
            )
            for tensor in (self.tensors.values() if part is None else [tensor for tensor, _ in part.tensors])
            if tensor.family in units
        )

    # ------------------------------------------------ the end of a step's backward

    def finalize(
        self,
        model: list[Any],
        num_tokens: torch.Tensor | None = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
    ) -> None:
        """`finalize_model_grads`, with the replicated gradients and the tokens summed over all replicas, and FP8's
        scales evened out."""
        finalize_model_grads(model, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)
        gradients = {name: parameter.main_grad for name, parameter in self.parameters.items()}
        with torch.no_grad():
            self._sum_late(gradients).finish()
            if num_tokens is not None:
                tokens = self.over_replicas(num_tokens.to(torch.int64))
                for part in (*model, *self.shards):
                    part.scale_gradients(1.0 / max(int(tokens), 1))
            if self._scales is not None:
                self._scales.even_out(ran=bool(self._job.share.count))

    def over_replicas(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum over the replicas of a value that all slots of a replica's last stage share."""
        value = value.clone() if self._layout.is_replica_leader and self._layout.last else torch.zeros_like(value)
        dist.all_reduce(value, group=self.everybody)
        return value

    def norm(self, original: Any) -> Any:
        """`get_grad_norm_fp32`."""

        @functools.wraps(original)
        def norm(gradients: Any, norm_type: Any = 2, grad_stats_parallel_group: Any = None) -> float:
            return self.agreed_norm(float(original(_split(gradients), norm_type, grad_stats_parallel_group)))

        return norm

    def of_those_who_train(self, original: Any) -> Any:
        """`MegatronOptimizer.get_grad_stats_parallel_group`: over which a model's norm, zeros and overflows are summed.
        That of experts also has ranks that are idle now."""

        @functools.wraps(original)
        def group_of(optimizer: Any) -> Any:
            group = original(optimizer)
            whole = parallel_state.get_expert_tensor_model_pipeline_parallel_group(
                check_initialized=False, with_egtp_remat=True
            )
            return self._expert_column if self._expert_column is not None and group is whole else group

        return group_of

    def agreed_norm(self, found: float) -> float:
        """Return the largest norm of all replicas."""
        norm = torch.tensor([found], dtype=torch.float64, device=self.device)
        dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=self.everybody)
        return float(norm)

    def zeros(self, original: Any) -> Any:
        """`count_zeros_fp32`."""

        @functools.wraps(original)
        def count(*args: Any, **kwargs: Any) -> int:
            if not self._sharded:  # a replica counts its own, and all gradients are the same in all replicas
                return int(original(*args, **kwargs))
            return zeros_in(self._all_shards(), device=self.device, everybody=self.everybody)

        return count

    def parameters_norm(self, original: Any) -> Any:
        """`calc_params_l2_norm`."""

        @functools.wraps(original)
        def norm(*_: Any, **__: Any) -> float:
            return norm_of(self._counted_once(), device=self.device, everybody=self.everybody)

        return norm

    def _counted_once(self) -> Iterator[torch.Tensor]:
        """Yield what this rank has of the model, in the optimizer's precision, so that all ranks together have each
        element once."""
        if self._sharded:
            yield from (shard.parameter.detach()[: shard.own_elements] for shard in self._all_shards())
            return
        layout = self._layout
        for name, tensor in self.tensors.items() if layout.slot.replica == layout.surviving.replicas[0] else ():
            is_second = tensor.family == SHARED and not layout.first
            if not is_second and (tensor.family or layout.is_replica_leader):
                yield getattr(self.parameters[name], "main_param", self.parameters[name]).detach()

    def _all_shards(self) -> list[LaneShard]:
        return [shard for lanes in self.shards for shard in lanes]

    def any_of_all(self, _: Any) -> Any:
        """`RerunStateMachine._reduce_any`."""

        def any_of_all(_: Any, flags: bool | list[bool]) -> bool | tuple[bool, ...]:
            summed = torch.tensor(flags if isinstance(flags, list) else [flags], dtype=torch.int32, device=self.device)
            dist.all_reduce(summed, group=self.everybody)
            answers = tuple(bool(answer) for answer in summed.tolist())
            return answers if isinstance(flags, list) else answers[0]

        return any_of_all

    @property
    def waits_in_forward(self) -> bool:
        """Whether DDP has the forward wait for parameters that are on their way."""
        return bool(self._chunks[0].use_forward_hook)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        device: torch.device = next(iter(self.parameters.values())).device
        return device


def named(chunks: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the parameters of all chunks of a model, without wrappers; with the chunk's number if there are several.

    Layers have the numbers that they have in the whole model.
    """
    for number, chunk in enumerate(chunks):
        model = bare(chunk)
        places = _places_of_layers(model)
        for local, parameter in model.named_parameters():
            layer = _LAYER.match(local)
            name = places[layer[0]] + local.removeprefix(layer[0]) if layer and layer[0] in places else local
            yield f"{number}.{name}" if len(chunks) > 1 else name, parameter


def described(parameters: Mapping[str, Any], layout: Layout, sequence: int) -> dict[int, StageUnits]:
    """Return the units of this rank's stage by its number; if layers may move, those of each of its layers."""
    if layout.layers is None:
        return {layout.slot.stage: describe(parameters, sequence=sequence, last=layout.last)}
    layer, of_layers = 0, dict[int, dict[str, Any]]()
    for name, parameter in parameters.items():  # what has no number moves with the layer before it
        found = _LAYER.match(name)
        layer = int(found[1]) if found else layer
        of_layers.setdefault(layer, {})[name] = parameter
    last = sum(layout.layers.depths) - 1
    return {layer: describe(these, sequence=sequence, last=layer == last) for layer, these in sorted(of_layers.items())}


_LAYER = re.compile(r"[^0-9]*\.(\d+)(?=\.)")
"""The beginning of the name of a layer's parameter, as far as its number: decoder.layers.3."""


def _places_of_layers(model: torch.nn.Module) -> dict[str, str]:
    """Return the names of a model's numbered layers: that in the model -> that in the whole model."""
    found = {}
    for name, layers in model.named_modules():
        if isinstance(layers, torch.nn.ModuleList):
            for place, layer in enumerate(layers):
                if isinstance(number := getattr(layer, "layer_number", None), int):
                    found[f"{name}.{place}"] = f"{name}.{number - 1}"
    return found


def bare(chunk: Any) -> torch.nn.Module:
    """Return the model inside of the wrappers of Megatron."""
    while isinstance(inner := getattr(chunk, "module", None), torch.nn.Module):
        chunk = inner
    module: torch.nn.Module = chunk
    return module


def _split(gradients: Sequence[torch.Tensor] | torch.Tensor) -> list[torch.Tensor]:
    """Split gradients for the norm. A lane shard is as long as many parameters, and a longer sum in float32 loses more
    to rounding: 1e-6 of the norm of the test model."""
    each = [gradients] if isinstance(gradients, torch.Tensor) else gradients
    return [part for gradient in each for part in torch.split(gradient.reshape(-1), _SUMMED_TOGETHER)]


def _sum_losses_alone(chunks: list[Any], alone: Any) -> None:
    """Keep Megatron from summing losses over this model's data-parallel group: they are the global batch's already."""
    for chunk in chunks:
        owner = get_attr_wrapped_model(chunk, "pg_collection", return_model_obj=True)
        owner.pg_collection = copy.copy(owner.pg_collection)
        owner.pg_collection.dp_cp = owner.pg_collection.dp_cp_gtp_remat = alone


def _digest(tensor: Tensor, held: Spans, parameter: torch.nn.Parameter) -> int:
    """Return the digest of the held part; the digests of all parts add up to that of the whole, for any cut."""
    runs = runs_of(tensor.shape, tensor.dim, global_ranges(tensor, held))
    return digest.digest(parameter.detach(), runs, salt=tensor.family if tensor.family == SHARED else tensor.name)


def _require_equal(digests_of_ranks: Iterable[Mapping[str, tuple[str, int]]]) -> None:
    """Raise unless replicas agree. Takes for each rank: tensor -> the holders of the whole, and the digest of this
    rank's part."""
    tensors: dict[str, dict[str, int]] = {}
    for digests in digests_of_ranks:
        for title, (holder, value) in digests.items():
            replica_digests = tensors.setdefault(title, {})
            replica_digests[holder] = (replica_digests.get(holder, 0) + value) % MODULUS
    for title, replica_digests in tensors.items():
        if len(set(replica_digests.values())) > 1:
            found = ", ".join(f"{holder} {value:016x}" for holder, value in replica_digests.items())
            raise StateLost(
                f"{title} is not the same in all replicas: {found}",
                fix="start all replicas with the same seed and arguments",
            )
