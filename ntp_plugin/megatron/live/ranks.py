"""Megatron's lists of ranks, after its groups were edited.

The groups are edited in place, so that every handle that Megatron and the user's script keep stays valid. Besides them
Megatron has the ranks of its groups as lists, and two numbers that can be set: how many replicas there are, and which
one this is. In a degraded layout these stay nominal, as in a job that begins degraded (`megatron/groups.py`).

Some kinds of groups cannot be edited, so in a degraded layout they are groups of the epoch. In a pipeline's column that
has lost a slot, another slot of its stage stands in, which is not a member of the original group; and there are no
embedding groups, again as in a job that begins degraded. A context group may have replicas that are idle, and a replica
idle slots of a stage whose layers have moved; they are members of the original group as long as they live.
"""

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from ntp_plugin.megatron.groups import MakeGroups
from ntp_plugin.megatron.layout import Layout
from ntp_plugin.planning.topology import Slot

_LISTS = {
    "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS": "_TENSOR_MODEL_PARALLEL_GROUP",
    "_MODEL_PARALLEL_GLOBAL_RANKS": "_MODEL_PARALLEL_GROUP",
    "_DATA_PARALLEL_GLOBAL_RANKS": "_DATA_PARALLEL_GROUP",
    "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP": "_DATA_PARALLEL_GROUP_WITH_CP",
    "_CONTEXT_PARALLEL_GLOBAL_RANKS": "_CONTEXT_PARALLEL_GROUP",
    "_PIPELINE_GLOBAL_RANKS": "_PIPELINE_MODEL_PARALLEL_GROUP",
    "_EMBEDDING_GLOBAL_RANKS": "_EMBEDDING_GROUP",
    "_POSITION_EMBEDDING_GLOBAL_RANKS": "_POSITION_EMBEDDING_GROUP",
}
_REPLACED = (
    *("_PIPELINE_MODEL_PARALLEL_GROUP", "_EMBEDDING_GROUP", "_EMBEDDING_GLOBAL_RANKS"),
    *("_CONTEXT_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP"),
)
"""What has other members in a degraded layout than those that are left of the first ones."""


class MegatronRanks:
    """Updates Megatron's lists of ranks."""

    def __init__(self) -> None:
        self._nominal: dict[str, Any] = {}

    def tell(self, layout: Layout, make_groups: MakeGroups, alone: Any) -> None:
        """Set Megatron's own numbers to those of the current groups; all ranks call this together.

        Args:
            layout: The layout of this rank.
            make_groups: Makes groups of this epoch.
            alone: A group of this rank alone.
        """
        self._nominal = self._nominal or {name: getattr(parallel_state, name) for name in _REPLACED}
        vars(parallel_state).update(self._nominal)
        degraded = layout.degraded
        if degraded and layout.topology.pp > 1:
            columns = _make_columns(layout, make_groups)
            if not layout.is_idle:
                own = layout.column(layout.slot.replica, layout.slot.tp)
                parallel_state._PIPELINE_MODEL_PARALLEL_GROUP = columns[own] if len(own) > 1 else alone
                parallel_state._EMBEDDING_GROUP = parallel_state._EMBEDDING_GLOBAL_RANKS = None
        for name, smaller in {
            "_CONTEXT_PARALLEL_GROUP": _smaller_contexts(layout),
            "_MODEL_PARALLEL_GROUP": _smaller_replicas(layout),
        }.items():
            for slots, group in zip(smaller, make_groups(smaller) if smaller else (), strict=True):
                if layout.slot in slots:
                    setattr(parallel_state, name, group if len(slots) > 1 else alone)
        for ranks, name in _LISTS.items():
            group = getattr(parallel_state, name)
            if group is not None:
                setattr(parallel_state, ranks, dist.get_process_group_ranks(group))
        parallel_state._MPU_DATA_PARALLEL_WORLD_SIZE = layout.topology.contexts if degraded else None
        parallel_state.set_data_parallel_rank(layout.context if degraded else None)


def _make_columns(layout: Layout, make_groups: MakeGroups) -> dict[tuple[Slot, ...], Any]:
    replicas = sorted({slot.replica for slot in layout.slots})
    wanted = dict.fromkeys(layout.column(replica, tp) for replica in replicas for tp in range(layout.topology.tp))
    return dict(zip(wanted, make_groups(list(wanted)), strict=True))


def _smaller_replicas(layout: Layout) -> list[tuple[Slot, ...]]:
    """Return the slots that train of each replica that has idle ones, and trains: of a stage whose layers have
    moved."""
    training = {slot.replica for slot in layout.slots}
    return [
        tuple(slot for slot in layout.slots if slot.replica == replica)
        for replica in sorted({slot.replica for slot in layout.idle} & training)
    ]


def _smaller_contexts(layout: Layout) -> list[tuple[Slot, ...]]:
    """Return who exchanges parts of sequences, in the context groups that have fewer replicas than nominally."""
    topology, surviving = layout.topology, layout.surviving
    sharing = map(surviving.sharing, sorted({topology.context_of(replica) for replica in surviving.dropped}))
    return [
        tuple(Slot(replica=replica, stage=stage, tp=tp) for replica in replicas)
        for replicas in sharing
        if replicas
        for stage in range(topology.pp)
        for tp in range(topology.tp)
    ]
