"""Makes the lanes of an epoch by the direct route: one group of all slots that train, and one for each owner tuple.

Cut parameters are summed lane by lane. Replicated ones are summed over all slots that train, and one slot of each
replica contributes (`gradient_lanes.py`). For jobs without pipeline stages, whose groups a framework does not make.
"""

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from ntp_plugin.groups.process_groups import ElasticGroups
from ntp_plugin.planning.spans import Spans
from ntp_plugin.planning.topology import Slot
from ntp_plugin.reduction.gradient_lanes import GradientLane, Slice
from ntp_plugin.resharding.cuts import local_ranges
from ntp_plugin.resharding.reshard_plan import RelayoutPlan

_CONNECT_S = 5.0
"""Seconds for a member to enter a lane. A loss ends the wait at once, so this limit is only for failures that nobody
detects."""


class DirectLanes:
    """The lanes of one plan, as one slot is in them."""

    def __init__(self, plan: RelayoutPlan, groups: ElasticGroups, *, within_replicas: bool = False) -> None:
        """Make the groups; all members of the world call this together.

        `within_replicas` makes the groups of replicas as well, if a framework has not made them.
        """
        self._plan = plan
        self._slot = plan.nominal.topology.slot_of(groups.slot)
        self.within: dist.ProcessGroup | None = None
        """The group of this slot's replica, if asked for and if the replica has more slots."""
        self.gradients: list[GradientLane] = []
        self._connect(groups, plan.surviving.replicas if within_replicas else ())

    def _connect(self, groups: ElasticGroups, replicas: Sequence[int]) -> None:
        plan, rank_of = self._plan, self._plan.nominal.topology.rank_of
        of_replicas = [[slot for slot in plan.training if slot.replica == replica] for replica in replicas]
        lanes = plan.goal.routes[0].lanes.lanes
        members = [plan.training, *of_replicas, *(lane.members(plan.surviving) for lane in lanes)]
        handles = groups.make_lanes([tuple(rank_of(slot) for slot in slots) for slots in members], timeout_s=_CONNECT_S)
        here = [self._slot in slots for slots in members]
        first = 1 + len(replicas)
        self.within = next((handles[at] for at in range(1, first) if here[at]), None)
        if here[0]:
            self.gradients.append(
                GradientLane(
                    group=handles[0], slices=self._replicated(), counted=is_replica_leader(self._plan, self._slot)
                )
            )
        for at, lane in enumerate(lanes, start=first):
            if here[at]:
                self.gradients.append(GradientLane(group=handles[at], slices=self._slices(dict(lane.units))))

    def _replicated(self) -> tuple[Slice, ...]:
        tensors = [tensor for tensor, _ in self._plan.nominal.units.stages[0].tensors if not tensor.family]
        return tuple(
            Slice(name=tensor.name, dim=0, ranges=((0, tensor.shape[0]),), places=((0, tensor.shape[0]),))
            for tensor in tensors
        )

    def _slices(self, units: Mapping[str, Spans]) -> tuple[Slice, ...]:
        """Where the units of a lane lie in this slot's gradients."""
        tensors = [tensor for tensor, _ in self._plan.nominal.units.stages[0].tensors if tensor.family in units]
        return tuple(
            Slice(
                name=tensor.name,
                dim=tensor.dim,
                ranges=local_ranges(tensor, self._plan.units_of(tensor, self._slot), units[tensor.family]),
                places=tensor.local_index(units[tensor.family]),
            )
            for tensor in tensors
        )


def is_replica_leader(plan: RelayoutPlan, slot: Slot) -> bool:
    """Whether a slot contributes for its replica to sums to which all its slots would add the same: the first does."""
    return slot in plan.training and slot == min(other for other in plan.training if other.replica == slot.replica)
