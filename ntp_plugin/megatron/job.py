"""What all parts of the adapter know of a job that begins hurt, and the plan that all ranks have made alike."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ntp_plugin.config.sections import Batch, CopyPolicy, Hardware, State, TrainingPolicy
from ntp_plugin.errors import PlansDiffer
from ntp_plugin.megatron.layout import Layout
from ntp_plugin.planning.batch_split import NominalBatch, Share
from ntp_plugin.planning.recovery_plan import Nominal, RecoveryPlan, plan_recovery
from ntp_plugin.planning.units import ModelUnits, StageUnits

_NO_COPIES = CopyPolicy(count=0)


class Job:
    """The layout from the beginning; the plan from when the model has been built and described."""

    def __init__(self, layout: Layout, policy: TrainingPolicy, args: Any) -> None:
        self.layout, self.policy, self.args = layout, policy, args
        self._plan: RecoveryPlan | None = None

    @property
    def plan(self) -> RecoveryPlan:
        assert self._plan is not None, "the model is built before its step is planned"
        return self._plan

    def agree(self, units: StageUnits) -> RecoveryPlan:
        """Plan, and make sure that every rank has planned the same; all ranks call this together."""
        args = self.args
        nominal = Nominal(
            topology=self.layout.topology,
            units=ModelUnits(stages=(units,)),
            batch=Batch(micro_batch=args.micro_batch_size, global_batch=args.global_batch_size),
            state=State(weight_bytes=4, gradient_bytes=4, optimizer_bytes=8),
            hardware=Hardware(),
            policy=_without_copies(self.policy),
        )
        self._plan = plan_recovery(nominal, lost=self.layout.lost, lost_before=self.layout.lost)
        told: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(told, self._plan.digest)
        _compare(told, self.layout)
        return self._plan

    @property
    def batch(self) -> NominalBatch:
        """The global batch as whole replicas would share it out."""
        topology, batch = self.layout.topology, self.plan.nominal.batch
        return NominalBatch(
            replicas=topology.dp,
            per_replica=batch.micro_batches_per_replica(topology.dp),
            micro_batch=batch.micro_batch,
            stages=topology.pp,
            healthy_ns=self.plan.batch.nominal_ns,
        )

    @property
    def share(self) -> Share:
        """What this rank's replica computes of it."""
        share = next(share for share in self.plan.batch.shares if share.replica == self.layout.slot.replica)
        assert share.size == self.args.micro_batch_size, "no plan has smaller micro-batches: memory is not guarded yet"
        return share


def _without_copies(policy: TrainingPolicy) -> TrainingPolicy:
    """Nothing is copied yet, so nothing is planned for it."""
    return TrainingPolicy(
        enabled=policy.enabled,
        min_tp_width=policy.min_tp_width,
        granule=policy.granule,
        route=policy.route,
        batch=policy.batch,
        copies=_NO_COPIES,
        lost=policy.lost,
        dropout=policy.dropout,
    )


def _compare(told: Sequence[str], layout: Layout) -> None:
    if len(set(told)) > 1:
        plans = ", ".join(f"{slot} {digest}" for slot, digest in zip(layout.slots, told, strict=True))
        raise PlansDiffer(f"the ranks made different plans: {plans}", way_out="start all with the same arguments")
