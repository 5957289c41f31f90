"""Gradients lane by lane where Megatron reduces its buckets; the exact scale; one norm for all.

Cut parameters go into the lanes of this rank, or over the cores of its group, as their buckets become complete
(`buckets.py`). Replicated ones wait until the TP group has added what only its slots together know (the norms of
queries and keys, all norms under sequence parallelism), and then are summed over the whole world, once for each
replica.

Scale. Without `calculate_per_token_loss` Megatron's gradient is the mean over micro-batches: a replica has divided
its own by how many it ran, and weighs as much as its part of them. With it, gradients are sums over tokens, to be
divided by the number of tokens in the global batch.

Norm. Each replica computes it from the same gradients, cut differently, so its last bits differ. The largest of them
is taken by all, and so all clip by the same bits.
"""

import copy
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.utils import get_attr_wrapped_model

from ntp_plugin.copies import digest
from ntp_plugin.errors import StateLost
from ntp_plugin.megatron.buckets import LaneBucketGroup, Sums, even_buckets, with_whole_buffers
from ntp_plugin.megatron.core_groups import make_crossing
from ntp_plugin.megatron.job import Job
from ntp_plugin.megatron.uneven_layers import describe
from ntp_plugin.planning.lanes import Lane
from ntp_plugin.planning.spans import Spans
from ntp_plugin.planning.units import Tensor
from ntp_plugin.training.core_lanes import CoreShards, CoreSums, Crossing
from ntp_plugin.training.cuts import WHOLE_UNITS, global_ranges, local_ranges
from ntp_plugin.training.gradient_lanes import GradientLane, GradientLanes, Slice, only
from ntp_plugin.training.sharded_optimizer import LaneShards


class LaneSync:
    """What is put in place of DDP's constructor and of the norm."""

    def __init__(self, job: Job) -> None:
        self._job, self._layout = job, job.layout
        self.model: Any = None
        """The wrapped model, once there is one."""
        self.tensors: dict[str, Tensor] = {}
        """Its parameters as planning knows them."""
        self.shards: list[LaneShards] = []
        """With the distributed optimizer: all that this rank has to keep state for. What is replicated comes first."""
        self._sharded = False
        self._crossing: Crossing | None = None
        self._sum_replicated: Sums

    def model_wrapper(self, original: Any) -> Any:
        """`DistributedDataParallel.__init__`: plan, make the lanes, check the weights, and take the buckets over."""

        @functools.wraps(original)
        def init(ddp: Any, config: Any, ddp_config: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            assert self.model is None, "one model chunk"
            named = dict(module.named_parameters())
            units = describe(named, sequence=self._job.args.seq_length, last=True)
            self.tensors = {tensor.name: tensor for tensor, _ in units.tensors}
            self._sharded = ddp_config.use_distributed_optimizer
            kwargs["full_param_layout"] = None
            if ddp_config.overlap_grad_reduce and not kwargs.get("disable_bucketing"):
                sizes = {parameter: self.tensors[name].elements for name, parameter in named.items()}
                kwargs["full_param_layout"] = even_buckets(self._job.args, ddp_config, sizes, self._layout.topology)
            original(ddp, config, with_whole_buffers(ddp_config), module, *args, **kwargs)
            self.model = ddp
            plan = self._job.agree(units)
            self.require_equal_units()
            self._crossing = make_crossing(self._layout, plan)
            lanes = self._make_lanes([] if self._crossing else plan.routes[0].lanes.lanes)
            names = {parameter: name for name, parameter in named.items()}
            replicated = tuple(self.shards)
            for group in ddp.bucket_groups:
                begin = self._sums_of(lanes, {names[parameter] for parameter in group.params})
                gathered = (*replicated, *self.shards[-1:])
                LaneBucketGroup.take_over(group, begin, names, self.scale, gathered)
            config.finalize_model_grads_func = self.finalize
            _sum_losses_alone(ddp)

        return init

    @property
    def scale(self) -> float:
        """What this replica's gradients weigh in the sum."""
        if self._job.args.calculate_per_token_loss:
            return 1.0
        return self._job.share.count * self._job.share.size / (self._job.batch.total * self._job.batch.micro_batch)

    def held(self) -> dict[str, Spans]:
        """The units of every tensor that this slot holds, in storage order."""
        families = {family.name: family for family in self._job.plan.nominal.units.stages[0].families}
        return {
            name: self._layout.held(families[tensor.family]) if tensor.family else WHOLE_UNITS
            for name, tensor in self.tensors.items()
        }

    def require_equal_units(self) -> None:
        """Raise unless the weights are the same in all replicas, bit for bit; all ranks call this together."""
        parameters = dict(self.model.module.named_parameters())
        replicas = [slot.replica for slot in self._layout.slots]
        _require_equal(self.tensors, self.held(), parameters, replicas)

    # ------------------------------------------------ lanes

    def _make_lanes(self, lanes: Sequence[Lane]) -> list[GradientLane]:
        """The lanes of this rank; every rank makes all groups, in one order."""
        mine = []
        for lane in lanes:
            members = lane.members(self._layout.standing)
            group: Any = dist.new_group([self._layout.ranks[slot] for slot in members])
            if self._layout.slot in members:
                mine.append(GradientLane(group=group, slices=self._slices(dict(lane.units))))
        whole = tuple(
            Slice(name=name, dim=0, ranges=((0, tensor.shape[0]),))
            for name, tensor in self.tensors.items()
            if not tensor.family
        )
        everybody = GradientLane(group=dist.group.WORLD, slices=whole, counted=self._layout.speaks)
        self._sum_replicated = self._sums([everybody])
        return mine

    def _sums(self, lanes: list[GradientLane]) -> Sums:
        """How the gradients of some lanes are summed: whole, or each rank its shard of them."""
        if not self._sharded:
            return functools.partial(GradientLanes, lanes)
        self.shards.append(LaneShards(lanes))
        return self.shards[-1].begin

    def _sums_of(self, lanes: list[GradientLane], names: Collection[str]) -> Sums:
        """How the gradients of these parameters are summed, by the route that was planned."""
        if self._crossing is None:
            return self._sums(only(lanes, names))
        crossing = self._crossing.only(names)
        if not self._sharded:
            return CoreSums(crossing).begin
        self.shards.append(CoreShards(crossing))
        return self.shards[-1].begin

    def _slices(self, units: Mapping[str, Spans]) -> tuple[Slice, ...]:
        held = self.held()
        return tuple(
            Slice(name=name, dim=tensor.dim, ranges=local_ranges(tensor, held[name], units[tensor.family]))
            for name, tensor in self.tensors.items()
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
        """`finalize_model_grads`, with the replicated gradients and the tokens summed over all replicas."""
        finalize_model_grads(model, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)
        gradients = {name: parameter.main_grad for name, parameter in self.model.module.named_parameters()}
        with torch.no_grad():
            self._sum_replicated(gradients).finish()
            if num_tokens is not None:
                tokens = self.over_replicas(num_tokens.to(torch.int64))
                for part in (*model, *self.shards):
                    part.scale_gradients(1.0 / max(int(tokens), 1))

    def over_replicas(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over the replicas of what all slots of a replica say alike."""
        value = value.clone() if self._layout.speaks else torch.zeros_like(value)
        dist.all_reduce(value)
        return value

    def norm(self, original: Any) -> Any:
        """`get_grad_norm_fp32`."""

        @functools.wraps(original)
        def norm(*args: Any, **kwargs: Any) -> float:
            return self.agreed_norm(float(original(*args, **kwargs)))

        return norm

    def agreed_norm(self, found: float) -> float:
        """The largest of what the replicas found."""
        norm = torch.tensor([found], dtype=torch.float64, device=self.device)
        dist.all_reduce(norm, op=dist.ReduceOp.MAX)
        return float(norm)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        device: torch.device = next(self.model.module.parameters()).device
        return device


def _sum_losses_alone(model: Any) -> None:
    """What Megatron would sum over this model's data-parallel group is the global batch's already."""
    owner = get_attr_wrapped_model(model, "pg_collection", return_model_obj=True)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    owner.pg_collection = copy.copy(owner.pg_collection)
    owner.pg_collection.dp_cp = owner.pg_collection.dp_cp_gtp_remat = alone


def _require_equal(
    tensors: Mapping[str, Tensor],
    held: Mapping[str, Spans],
    parameters: Mapping[str, torch.nn.Parameter],
    replica_of_rank: Sequence[int],
) -> None:
    mine = []
    for name, tensor in tensors.items():
        index = torch.cat([torch.arange(start, stop) for start, stop in global_ranges(tensor, held[name])])
        part = parameters[name].detach().cpu()
        mine.append(digest.digest(part, index=index, shape=tensor.shape, dim=tensor.dim, salt=name))
    told: list[list[int]] = [[]] * len(replica_of_rank)
    dist.all_gather_object(told, mine)
    for number, (name, tensor) in enumerate(tensors.items()):
        wholes: dict[int, int] = {}
        for rank, replica in enumerate(replica_of_rank):
            whole = replica if tensor.family else rank
            wholes[whole] = (wholes.get(whole, 0) + told[rank][number]) % digest.MODULUS
        if len(set(wholes.values())) > 1:
            words = "replica" if tensor.family else "rank"
            found = ", ".join(f"{words} {whole} {value:016x}" for whole, value in wholes.items())
            raise StateLost(
                f"{name} is not the same in all replicas: {found}",
                way_out="start all replicas with the same seed and arguments",
            )
