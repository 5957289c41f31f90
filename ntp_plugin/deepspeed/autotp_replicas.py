"""Replicas that AutoTP has cut: who holds what, and how degraded replicas sum gradients.

When a slot is lost its replica goes on narrower. The surviving slots keep their units and take over the lost slot's.
The replica gets fewer micro-batches, in proportion to its width. A replica without slots is dropped, and its samples go
to the others. With nobody lost, everything is DeepSpeed's own again.

Without ZeRO the lost units come, with their optimizer state, from another replica (`resharding/reshard.py`). While a
rank is lost, lanes sum the gradients in place of DeepSpeed's all-reduce, divided by the nominal number of replicas.
Each replica computes a norm: each slot adds the parts that it holds, the first slot those that all slots hold. All
ranks take the largest norm, which differs from the others by rounding, so that all clip alike. In half precision the
parameters' masters move with them (`half_masters.py`).

With ZeRO the state is sharded over all replicas, and a lost slot's shard is only in copies. So the whole state is
restored from copies (`zero_state.py`), including the weights, which follow from it: here parameters only get their new
sizes.

A step needs all replicas, and a loop that draws from its loader draws at least once: the narrowest replica computes one
micro-batch, however slow it is.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from ntp_plugin.config.sections import Batch, CopyPolicy, Hardware, Policy, State, TrainingPolicy
from ntp_plugin.copies.slices import TensorSlice
from ntp_plugin.deepspeed.autotp_layers import CutLayers
from ntp_plugin.deepspeed.half_masters import Gradients, masters_of, norm_of_first_slots
from ntp_plugin.errors import BelowMinimum, Refused, StateLost
from ntp_plugin.membership.agreement import Agreed
from ntp_plugin.patching import TakeBack
from ntp_plugin.planning import spans as sp
from ntp_plugin.planning.batch_split import one_for_each
from ntp_plugin.planning.recovery_plan import Nominal, plan_recovery
from ntp_plugin.planning.spans import Spans
from ntp_plugin.planning.topology import Topology
from ntp_plugin.recovery.elastic_rank import ElasticRank
from ntp_plugin.recovery.replica_comparison import ReplicatedState
from ntp_plugin.reduction.direct_lanes import DirectLanes, is_replica_leader
from ntp_plugin.reduction.gradient_lanes import GradientLane, GradientLanes, only
from ntp_plugin.resharding.cuts import global_ranges, local_ranges, local_shape
from ntp_plugin.resharding.rebuild import WEIGHT
from ntp_plugin.resharding.reshard import refuse_unequal_replicas, relayout
from ntp_plugin.resharding.reshard_plan import AvailableVersions, plan_relayout
from ntp_plugin.resharding.sharded_state import ShardedState

_RESTART = "restart from the last checkpoint"


class CutReplicas:
    """The replicas of a job that AutoTP has cut, as one rank sees them."""

    def __init__(
        self, engine: Any, policy: TrainingPolicy, topology: Topology, *, rank: ElasticRank, joiner: bool
    ) -> None:
        if topology.dp == 1 and not engine.zero_optimization_stage():
            raise Refused(
                f"there is one replica, of {topology.tp} slots, and no ZeRO, whose state is copied: a lost slot takes"
                " its part of the state with it",
                fix=f"ZeRO stage 1 or 2, {2 * topology.tp} processes, or a lower tensor_parallel.autotp_size",
            )
        self._engine, self._rank, self._topology = engine, rank, topology
        self._slot = topology.slot_of(rank.place.slot)
        self.layers = CutLayers(engine.module, tp=topology.tp, granule=policy.granule)
        parameters = dict(engine.module.named_parameters())
        self._nominal = _nominal(self.layers, parameters, engine, policy, topology)
        self._tensors = {tensor.name: tensor for tensor, _ in self._nominal.units.stages[0].tensors}
        self._sharded = _sharded(engine, parameters)
        """Names of the parameters whose state is sharded; empty without ZeRO."""
        self._refuse_untrained_parts()
        plan_recovery(self._nominal, lost=frozenset())  # what cannot work is refused now
        masters = {} if self._sharded else masters_of(engine)
        self.state = ShardedState(parameters, engine.basic_optimizer, mains=masters, joiner=joiner)
        self.state.refuse_what_cannot_be_cut()
        (self._plan,) = plan_relayout(self._nominal, dict.fromkeys(range(topology.size), self._as_laid_out(0)), 0)
        self._next = self._undisturbed = self._plan
        self._parts: dict[str, TensorSlice] = {}
        self.lanes: Sequence[GradientLane] = ()
        """The lanes that sum gradients; empty while nobody is lost."""
        self._own = engine.buffered_allreduce_fallback, engine.clip_fp32_gradients, engine.save_non_zero_checkpoint
        self._norm = norm_of_first_slots(self._gradients, self._of_first_slot, engine.mpu.get_model_parallel_group)
        self._take_back: TakeBack | None = None
        """Undoes the replacement of the norm; None while the norm is DeepSpeed's own."""
        if joiner:
            self._let_go_of_the_check()
        else:  # also finds tensors that AutoTP has cut and this class takes for whole
            refuse_unequal_replicas([self._plan], self.state, rank.groups)

    def _refuse_untrained_parts(self) -> None:
        for name, tensor in self._tensors.items():
            if self._sharded and tensor.family and name not in self._sharded:
                raise Refused(
                    f"{name} is cut by AutoTP and not trained: with ZeRO a lost slot's part of it is in no copy",
                    fix="ZeRO stage 0, or train it",
                )

    def _as_laid_out(self, version: int) -> AvailableVersions:
        """Return what a member holds if nothing has to be moved."""
        return AvailableVersions(versions=(version,) * len(self._tensors), built=(), lost={version: ()})

    def _let_go_of_the_check(self) -> None:
        """Remove the hook of AutoTP's first forward, in which all slots of a replica compare their samples."""
        self._engine.first_dataloader_check.remove()

    # ------------------------------------------------ who computes what

    @property
    def numbers(self) -> list[int]:
        """This slot's replica's micro-batches in the global batch, by number."""
        return self.shares[self._slot.replica]

    @property
    def shares(self) -> Mapping[int, list[int]]:
        """Replica -> its micro-batches."""
        return one_for_each({share.replica: share.numbers for share in self._plan.goal.batch.shares})

    @property
    def is_replica_leader(self) -> bool:
        """Whether this slot reports what all slots of its replica would report."""
        return is_replica_leader(self._plan, self._slot)

    weight = 1.0
    """Factor of a loss: the sum of gradients is divided as when nobody is lost."""
    lane = None
    """The group whose ranks hold the same of tensors that are not moved in parts; None for all ranks."""
    lanes_apart = 1

    def lane_of(self, _slot: int) -> int:
        """Return the only lane."""
        return 0

    def who_was_there(self, agreed: Agreed) -> int:
        """Return the first slot that is not joining."""
        return min(slot for slot, report in agreed.reports.items() if not report.joiner)

    def alone(self) -> AbstractContextManager[None]:
        """Go forward without the other slots of the replica."""
        return self.layers.alone()

    @property
    def widths(self) -> list[list[int]]:
        """Surviving slots, replica by replica."""
        return [[sum(slot.replica == replica for slot in self._plan.training)] for replica in range(self._topology.dp)]

    @property
    def divisor(self) -> int:
        """What the sum of all gradients is divided by: the nominal number of replicas, or nothing."""
        return self._topology.dp if self._engine.gradient_average else 1

    @property
    def why_none_is_saved(self) -> str:
        """Why no checkpoint can be written now; empty if it can."""
        if self._sharded and self._plan.surviving.lost:
            return "a rank is lost, and the files want the shards of all"
        return "" if self.whole else "no replica has all of its slots, as its files want"

    @property
    def whole(self) -> list[int]:
        """Replicas that have lost nothing."""
        return [replica for replica, (width,) in enumerate(self.widths) if width == self._topology.tp]

    # ------------------------------------------------ slices of tensors

    def part(self, name: str) -> TensorSlice:
        """Return what this slot holds of a tensor; each slot holds all of a tensor that is not cut. Cached, since each
        step asks for it."""
        if name not in self._parts:
            self._parts[name] = self._part(name)
        return self._parts[name]

    def _part(self, name: str) -> TensorSlice:
        tensor, units = self._tensors[name], self._units(name)
        return TensorSlice(
            tensor=name,
            shape=tensor.shape,
            dim=tensor.dim,
            ranges=global_ranges(tensor, units),
            start=0,
            stop=math.prod(local_shape(tensor, units)),
            whole="" if tensor.family else f"t{self._slot.tp}",
        )

    def replicated_state(self) -> ReplicatedState:
        """Yield what every replica holds. Tensors that are not cut are compared with the same slot in other
        replicas."""
        for name, tensor in self._tensors.items():
            tensor_slice = dataclasses.replace(self.part(name), whole=f"r{self._slot.replica}")
            of_slot = "" if tensor.family else f" of TP slot {self._slot.tp}"
            entries = self.state.entries(name)
            yield name + of_slot, of_slot, tensor_slice, {WEIGHT: entries[WEIGHT]} if self._sharded else entries

    def is_cut(self, name: str) -> bool:
        """Whether a slot holds only a part of this tensor."""
        return bool(self._tensors[name].family)

    def slice_of(self, name: str, places: Spans, start: int, stop: int) -> TensorSlice:
        """Return a slice of a tensor, whose elements exist once in the job."""
        tensor = self._tensors[name]
        return TensorSlice(tensor=name, shape=tensor.shape, dim=tensor.dim, ranges=places, start=start, stop=stop)

    def _units(self, name: str) -> Spans:
        return self._plan.units_of(self._tensors[name], self._slot)

    # ------------------------------------------------ a recovery

    def held(self) -> str:
        """Return what this slot holds, for its report."""
        return self.state.held(self._plan.lost).encode()

    def plan(self, agreed: Agreed) -> str:
        """Plan who holds, computes and sends what, from what all ranks reported."""
        epoch = agreed.view.epoch
        held = {
            place: self._as_laid_out(epoch) if self._sharded else AvailableVersions.decode(report.held)
            for place, report in agreed.reports.items()
        }
        try:
            (self._next,) = plan_relayout(self._nominal, held, epoch)
        except (BelowMinimum, StateLost) as found:
            raise type(found)(found.what, fix=_RESTART) from found
        return self._next.digest

    def resume_from(self, agreed: Agreed) -> None:
        """Move what changes hands and compare everything, or make room for it; then set DeepSpeed up for the new
        layout."""
        self._plan, self._parts = self._next, {}
        if self._sharded:
            self._make_room(agreed.view.epoch)
        else:
            relayout([self._plan], self.state, self._rank.groups, step=agreed.decision.step)
        pattern = self._plan.surviving.pattern(self._slot.replica, 0)
        survivors = [tp for tp in range(self._topology.tp) if tp not in pattern]
        self.layers.tell(survivors.index(self._slot.tp), pattern)
        self._let_go_of_the_check()
        self._into_engine()

    def _make_room(self, version: int) -> None:
        """Allocate the parameters in their new sizes; their current values are discarded."""
        for name in self._sharded:
            parameter, shape = self.state.parameters[name], local_shape(self._tensors[name], self._units(name))
            room = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
            self.state.build(name, version, {WEIGHT: room}, {})
        self.state.switch()

    def _into_engine(self) -> None:
        engine = self._engine
        reduce, clip, saves = self._own
        self.lanes = []
        if self._take_back is not None:
            self._take_back()
            self._take_back = None
        if self._plan.surviving.lost:
            self._take_back = self._norm.apply()
            self.lanes = DirectLanes(self._plan, self._rank.groups).gradients
            reduce, clip = self._reduce, self._clip
            saves = self._slot.replica == min(self.whole, default=-1)
        engine.buffered_allreduce_fallback, engine.clip_fp32_gradients = reduce, clip
        engine.save_non_zero_checkpoint = saves

    # ------------------------------------------------ a step in a degraded layout

    @torch.no_grad()
    def _reduce(self, grads: Any = None, elements_per_buffer: int = 0) -> None:
        """`buffered_allreduce_fallback`."""
        del grads, elements_per_buffer
        gradients = {}
        for name, parameter in self.state.parameters.items():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients[name] = parameter.grad
        GradientLanes(only(self.lanes, gradients), gradients).finish()
        for gradient in gradients.values():
            gradient.div_(self.divisor)

    @torch.no_grad()
    def _clip(self) -> None:
        """`clip_fp32_gradients`."""
        cut = {name for name, tensor in self._tensors.items() if tensor.family}
        gradients = {name: one.grad for name, one in self.state.parameters.items() if one.grad is not None}
        mine = [grad.float().norm() for name, grad in gradients.items() if name in cut or self.is_replica_leader]
        squares = torch.stack(mine).square().sum() if mine else torch.zeros((), device=self._engine.device)
        dist.all_reduce(squares, group=self._engine.mpu.get_model_parallel_group())
        dist.all_reduce(squares, op=dist.ReduceOp.MAX)
        coefficient = torch.clamp(self._engine.gradient_clipping() / (squares.sqrt() + 1e-6), max=1.0)
        for gradient in gradients.values():
            gradient.mul_(coefficient)

    def _gradients(self) -> Gradients:
        found = {name: (one.grad, self._tensors[name].dim) for name, one in self.state.parameters.items()}
        return {name: (gradient, dim) for name, (gradient, dim) in found.items() if gradient is not None}

    def _of_first_slot(self, name: str) -> Spans:
        """Return which part of this slot's share of a tensor the first slot of the replica held when nobody was lost. A
        tensor that is not cut counts in full, in one slot."""
        tensor, held = self._tensors[name], self._units(name)
        if not tensor.family:
            return ((0, tensor.shape[tensor.dim]),) if self.is_replica_leader else ()
        first = self._undisturbed.units_of(tensor, dataclasses.replace(self._slot, tp=0))
        return local_ranges(tensor, held, sp.intersection(sp.union(held), sp.union(first)))


def _sharded(engine: Any, parameters: Mapping[str, torch.nn.Parameter]) -> frozenset[str]:
    groups = engine.optimizer.bit16_groups if engine.zero_optimization_stage() else ()
    stepped = {id(parameter) for group in groups for parameter in group}
    return frozenset(name for name, parameter in parameters.items() if id(parameter) in stepped)


def _nominal(
    layers: CutLayers,
    parameters: Mapping[str, torch.nn.Parameter],
    engine: Any,
    policy: TrainingPolicy,
    topology: Topology,
) -> Nominal:
    size = max(parameter.element_size() for parameter in parameters.values())
    micro_batch, each = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    return Nominal(
        topology=topology,
        units=layers.units(),
        batch=Batch(micro_batch=micro_batch, global_batch=micro_batch * each * topology.dp),
        state=State(weight_bytes=size, gradient_bytes=size, optimizer_bytes=2 * size),
        hardware=Hardware(),
        policy=Policy(min_tp_width=policy.min_tp_width, route="direct", copies=CopyPolicy(count=0)),
    )
