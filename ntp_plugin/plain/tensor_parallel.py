"""The trainer for a model whose layers are cut over the ranks of a replica: data parallel x tensor parallel.

When a slot is lost, its replica goes on with the others. They keep their units and take over those of the lost slot,
with the optimizer state, from the slots that hold them in another replica. The replica gets fewer micro-batches, by its
width. A replica without slots is dropped, and its samples go to the other replicas. A slot that rejoins gets exactly
its own units again. `planning/` decides all of this from the reports of the members alone.

`voted_step.py` has the step: cut parameters are summed lane by lane, replicated ones over all slots
(`reduction/gradient_lanes.py`). Every slot of a replica computes the same samples, and one of them counts their losses.

A further loss can interrupt the recovery anywhere; `resharding/reshard.py` explains how the state stays consistent.
"""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist

from ntp_plugin.config.sections import Batch, CopyPolicy, Hardware, Policy, State
from ntp_plugin.copies.slices import TensorSlice
from ntp_plugin.errors import Refused
from ntp_plugin.groups.process_groups import ElasticGroups
from ntp_plugin.membership.agreement import Agreed
from ntp_plugin.membership.protocol import Report
from ntp_plugin.plain.parallel_layers import TensorParallelGroup, describe
from ntp_plugin.plain.voted_step import LossOfSamples, VotedStep, samples_of
from ntp_plugin.planning.recovery_plan import Nominal
from ntp_plugin.planning.topology import Topology
from ntp_plugin.recovery.replica_comparison import ReplicatedState
from ntp_plugin.reduction.direct_lanes import DirectLanes, is_replica_leader
from ntp_plugin.reduction.gradient_lanes import GradientLane, GradientLanes
from ntp_plugin.resharding.cuts import global_ranges, local_shape
from ntp_plugin.resharding.reshard import relayout
from ntp_plugin.resharding.reshard_plan import AvailableVersions, plan_relayout
from ntp_plugin.resharding.sharded_state import ShardedState


class TensorParallel(VotedStep):
    """A `Trainer`: each rank is a TP slot of a replica. Ranks are numbered slot by slot, replica by replica."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_of: LossOfSamples,
        *,
        groups: ElasticGroups,
        within: TensorParallelGroup,
        ranks: int,
        per_replica: int,
        micro_batch: int = 1,
        min_width: int = 1,
        joiner: bool = False,
    ) -> None:
        """`per_replica` is the number of micro-batches that every replica computes while no rank is lost."""
        super().__init__(
            model,
            optimizer,
            loss_of,
            groups=groups,
            micro_batches=ranks // within.degree * per_replica,
            micro_batch=micro_batch,
            joiner=joiner,
        )
        self._within = within
        parameters = dict(model.named_parameters())
        self._nominal = _nominal(
            parameters,
            tp=within.degree,
            ranks=ranks,
            per_replica=per_replica,
            micro_batch=micro_batch,
            min_width=min_width,
        )
        self.slot = self._nominal.topology.slot_of(groups.slot)
        self.state = ShardedState(parameters, optimizer, joiner=joiner)
        self.state.refuse_what_cannot_be_cut()
        (self._plan,) = plan_relayout(self._nominal, {rank: self._founding() for rank in range(ranks)}, 0)
        self._lost: Mapping[int, tuple[int, ...]] = {0: ()}
        self._lanes: list[GradientLane] = []
        self._lanes_of = -1

    def _founding(self) -> AvailableVersions:
        return AvailableVersions(versions=(0,) * len(self.state.parameters), built=(), lost={0: ()})

    @property
    def members(self) -> tuple[int, ...]:
        """The slots that train now."""
        return tuple(self._nominal.topology.rank_of(slot) for slot in self._plan.training)

    # ------------------------------------------------ a step

    def step(self) -> float:
        """Take the step of `VotedStep` in the groups of this epoch."""
        self._connect()
        return super().step()

    @property
    def place(self) -> str:
        """The TP slot of this rank in its replica."""
        return f"t{self.slot.tp}"

    @property
    def is_in_the_first_replica(self) -> bool:
        """Whether this rank belongs to the replica whose settings a joining process compares with its own."""
        return self.slot.replica == 0

    def my_samples(self) -> list[int]:
        """Return the samples of a step that this slot's replica computes, as numbers in the global batch."""
        shares = {share.replica: share for share in self._plan.goal.batch.shares}
        if self.slot not in self._plan.training:
            return []
        return samples_of(shares[self.slot.replica], self._micro_batch)

    @property
    def counts(self) -> bool:
        """Whether this slot is the leader of its replica, the only slot that adds to sums over replicas."""
        return is_replica_leader(self._plan, self.slot)

    def _reduce(self, total: torch.Tensor) -> float:
        gradients = {}
        for name, parameter in self.state.parameters.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients[name] = parameter.grad
        under_way = GradientLanes(self._lanes, gradients)
        if not self.counts:
            total.zero_()
        dist.all_reduce(total)
        under_way.finish()
        return float(total)

    def _apply(self) -> None:
        if self.slot in self._plan.training:
            self.optimizer.step()
        self.applied, self._prepared = self.applied + 1, False
        if self.applied == 1:
            self.state.refuse_what_cannot_be_cut()

    # ------------------------------------------------ the groups of an epoch

    def _connect(self) -> None:
        """Make this epoch's groups once: the group of all training ranks, the TP groups, and the lanes."""
        if self._lanes_of == self._groups.epoch:
            return
        self._lanes, self._within.handle = [], None  # the old groups end here
        made = DirectLanes(self._plan, self._groups, within_replicas=True)
        self._lanes, self._within.handle = made.gradients, made.within
        self._lanes_of = self._groups.epoch

    def replicated_state(self) -> ReplicatedState:
        """Yield the state that every replica holds. A tensor that is not cut is compared with the same slot's in other
        replicas."""
        training = self.slot in self._plan.training
        for move in self._plan.moves if training else ():
            tensor = move.tensor
            units = self._plan.units_of(tensor, self.slot)
            tensor_slice = TensorSlice(
                tensor=tensor.name,
                shape=tensor.shape,
                dim=tensor.dim,
                ranges=global_ranges(tensor, units),
                start=0,
                stop=math.prod(local_shape(tensor, units)),
                whole=f"r{self.slot.replica}",
            )
            of_slot = "" if tensor.family else f" of TP slot {self.slot.tp}"
            yield tensor.name + of_slot, of_slot, tensor_slice, self.state.entries(tensor.name)

    # ------------------------------------------------ a recovery

    def report(self) -> Report:
        """Report the applied step and the held units. An update is made in place, so no older step can be restored."""
        held = self.state.held(self._lost).encode()
        return Report(
            applied=self.applied, oldest=self.applied, prepared=self._prepared, joiner=self._joiner, held=held
        )

    def plan(self, agreed: Agreed) -> str:
        """Plan from the reports of all members what each slot holds, computes and sends; return the plan's digest."""
        held = {rank: AvailableVersions.decode(report.held) for rank, report in agreed.reports.items()}
        (self._next,) = plan_relayout(self._nominal, held, agreed.view.epoch)
        return self._next.digest

    def resume_from(self, agreed: Agreed) -> None:
        """Roll forward, move units to their new slots, and compare the state."""
        if self._groups.slot in agreed.decision.roll_forward:
            self._apply()
        self._prepared, self._plan, self._lost = False, self._next, self._next.lost
        relayout([self._plan], self.state, self._groups, step=agreed.decision.step)
        self.applied, self._joiner = agreed.decision.step, False


def _nominal(
    parameters: Mapping[str, torch.nn.Parameter],
    *,
    tp: int,
    ranks: int,
    per_replica: int,
    micro_batch: int,
    min_width: int,
) -> Nominal:
    if ranks % tp:
        raise Refused(f"{ranks} ranks are not a multiple of {tp}, the slots of a replica", fix=f"start {tp} x N ranks")
    parameter_bytes = max(parameter.element_size() for parameter in parameters.values())
    return Nominal(
        topology=Topology(tp=tp, pp=1, dp=ranks // tp, gpus_per_node=tp, nodes_per_rack=1, racks_per_power_row=1),
        units=describe(parameters),
        batch=Batch(micro_batch=micro_batch, global_batch=micro_batch * per_replica * (ranks // tp)),
        state=State(weight_bytes=parameter_bytes, gradient_bytes=parameter_bytes, optimizer_bytes=2 * parameter_bytes),
        hardware=Hardware(),
        policy=Policy(min_tp_width=min_width, route="direct", copies=CopyPolicy(count=0)),
    )
