"""The recovery plan that all ranks compute and compare, for a job that begins degraded.

An interleaved schedule takes micro-batches in groups of a fixed size. Replicas then share out whole groups: for
planning, a group is one nominal micro-batch, which runs in that many splits.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_current_global_batch_size

from ntp_plugin.config.sections import Batch, CopyPolicy, Hardware, State, TrainingPolicy
from ntp_plugin.errors import PlansDiffer
from ntp_plugin.megatron.batch_schedule import batch_schedule
from ntp_plugin.megatron.groups import MakeGroups
from ntp_plugin.megatron.job_shape import guard_of, taken_together, with_routed
from ntp_plugin.megatron.layout import Layout
from ntp_plugin.planning.batch_split import NominalBatch, Share
from ntp_plugin.planning.layer_placement import cut_of
from ntp_plugin.planning.recovery_plan import Nominal, RecoveryPlan, nominal_batch, plan_recovery
from ntp_plugin.planning.units import ModelUnits, StageUnits

_NO_COPIES = CopyPolicy(count=0)


class JobPlan:
    """The layout from the beginning; the plan once the model is built and described, unless one is given."""

    def __init__(
        self,
        layout: Layout,
        policy: TrainingPolicy,
        args: Any,
        *,
        make_groups: MakeGroups,
        alone: Callable[[], Any],
        plan: RecoveryPlan | None = None,
    ) -> None:
        """`alone` makes a group of this rank alone."""
        self.layout, self.policy, self.args = layout, policy, args
        self.make_groups, self.alone = make_groups, alone
        self._schedule = batch_schedule(args)
        self._schedule.require_equal_replicas(args.micro_batch_size, layout.topology.contexts)
        taken_together(args, layout.topology.contexts, self._schedule.sizes)  # refused here, before anything is built
        self._plan = plan
        self._shared_out: dict[int, tuple[NominalBatch, Share]] = {}
        self._runs: dict[int, int] = {}
        """By the global batch."""

    @property
    def planned(self) -> bool:
        """Whether there is a plan."""
        return self._plan is not None

    @property
    def plan(self) -> RecoveryPlan:
        assert self._plan is not None, "the model is built before its step is planned"
        return self._plan

    def agree(self, layers: Mapping[int, StageUnits]) -> RecoveryPlan:
        """Plan, and raise `PlansDiffer` unless all ranks planned the same; all ranks call this together.

        Args:
            layers: What this rank has of each of its layers; if no layer has moved, of its stage, by its number.
        """
        nominal = nominal_job(self.layout, self.policy, self.args, share_units(self.layout, layers))
        self._plan = plan_recovery(nominal, lost=self.layout.lost, lost_before=self.layout.lost)
        digests: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(digests, f"{self._plan.digest} {self._schedule}")
        _compare(digests, self.layout)
        return self._plan

    @functools.cached_property
    def segments(self) -> Mapping[int, StageUnits]:
        """The units of each segment that this rank has."""
        return self.plan.nominal.segments_of(self.layout.surviving, self.layout.slot)

    @property
    def batch(self) -> NominalBatch:
        """The global batch of the step under way, as full-width replicas would share it out."""
        return self.shared_out(get_current_global_batch_size())[0]

    @property
    def share(self) -> Share:
        """The part of it that this rank's replica computes."""
        return self.shared_out(get_current_global_batch_size())[1]

    @property
    def runs(self) -> int:
        """How many micro-batches this rank's replica runs in the step under way. Replicas whose tokens go to the same
        experts run alike many; those beyond a replica's own weigh nothing."""
        global_batch = get_current_global_batch_size()
        if global_batch not in self._runs:
            self._runs[global_batch] = self._runs_of(global_batch)
        return self._runs[global_batch]

    def _runs_of(self, global_batch: int) -> int:
        if not self.layout.topology.expert_slots:
            return self.shared_out(global_batch)[1].count
        return self.plan.runs(self.layout.context, self.plan.split_of(global_batch))

    def batch_at(self, consumed: int) -> tuple[NominalBatch, Share]:
        """Return the same for the step that begins after this number of samples."""
        return self.shared_out(self._schedule.at(consumed))

    def shared_out(self, global_batch: int) -> tuple[NominalBatch, Share]:
        """Return a global batch of this size and this replica's share of it; both follow from size and layout alone."""
        if global_batch not in self._shared_out:
            split, context = self.plan.split_of(global_batch), self.layout.context
            nominal = nominal_batch(self.plan.nominal, global_batch)
            share = next(share for share in split.shares if share.replica == context)
            self._shared_out[global_batch] = nominal, share
        return self._shared_out[global_batch]


def nominal_job(layout: Layout, policy: TrainingPolicy, args: Any, units: ModelUnits) -> Nominal:
    """Return the job with nobody lost, as planning describes it: with the largest global batch that it will have.
    `units` are those of each stage; of each layer, if layers may move."""
    schedule = batch_schedule(args)
    schedule.require_equal_replicas(args.micro_batch_size, layout.topology.contexts)
    together = taken_together(args, layout.topology.contexts, schedule.sizes)
    layers = layout.layers
    stages = units if layers is None else units.cut(itertools.pairwise(cut_of(layers.depths)))
    return Nominal(
        topology=layout.topology,
        units=with_routed(stages, args),
        layers=layers,
        layer_units=None if layers is None else units,
        batch=Batch(micro_batch=args.micro_batch_size * together, global_batch=schedule.largest),
        state=State(weight_bytes=4, gradient_bytes=4, optimizer_bytes=8),
        hardware=Hardware(),
        policy=_without_copies(policy),
        splits=together,
        guard=None if policy.gpu_memory_gb is None else guard_of(args, policy.gpu_memory_gb * 1e9),
    )


def share_units(layout: Layout, units: Mapping[int, StageUnits]) -> ModelUnits:
    """Return what each stage is made of, or each layer, gathered from the ranks that have it; all ranks call this
    together."""
    units_of_ranks: list[Mapping[int, StageUnits]] = [units] * dist.get_world_size()
    dist.all_gather_object(units_of_ranks, units)
    found: dict[int, StageUnits] = {}
    for slot, reported in zip(layout.slots, units_of_ranks, strict=True):
        for number, part in reported.items():
            if found.setdefault(number, part) != part:
                raise PlansDiffer(
                    f"{slot} has other layers than the first slot with {'stage' if layout.layers is None else 'layer'}"
                    f" {number}",
                    fix="start all with the same arguments",
                )
    return ModelUnits(stages=tuple(found[number] for number in sorted(found)))


def _without_copies(policy: TrainingPolicy) -> TrainingPolicy:
    """Plan without copies, since none exist yet; and without an events file, which may differ by host."""
    return dataclasses.replace(policy, copies=_NO_COPIES, events=None)


def _compare(digests: Sequence[str], layout: Layout) -> None:
    if len(set(digests)) > 1:
        plans = ", ".join(f"{slot} {digest}" for slot, digest in zip(layout.slots, digests, strict=True))
        raise PlansDiffer(f"the ranks made different plans: {plans}", fix="start all with the same arguments")
