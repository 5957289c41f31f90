"""Megatron's process groups, without the lost ranks.

Megatron computes all its groups from numbers, and makes them one by one. It gets the nominal numbers, and the lost
ranks are removed from the resulting lists: a TP group is as wide as its replica, a data-parallel group has the ranks of
those replicas whose slot survives. Everything that Megatron and the user's script ask of `parallel_state` is then true
for this rank's replica.

The data-parallel size and rank stay nominal: they determine who consumes which samples. A sum of Megatron's over a
data-parallel group would miss the replicas whose slot is lost; the sums that matter are the plugin's
(`megatron/reduction/lane_sync.py`, `batch_share.py`).

A pipeline group has one rank of each stage that the replica has, so that it gives the right stage and number of stages:
it is this slot's column (`layout.py`). There are no embedding groups: rows that the first and the last stage share are
cut differently there, and lanes sum them.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from ntp_plugin.megatron.layout import Layout
from ntp_plugin.planning.topology import Slot

type MakeGroups = Callable[[Sequence[Sequence[Slot]]], list[Any]]
"""Makes a group of each of these lists of slots; every rank calls it with the same lists. The result for a group
without this rank must not be used."""

_PIPELINE = "pp"


def by_torch(layout: Layout) -> MakeGroups:
    """Make groups with torch, one after the other."""

    def make(wanted: Sequence[Sequence[Slot]]) -> list[Any]:
        return [dist.new_group([layout.ranks[slot] for slot in slots]) for slots in wanted]

    return make


def alone() -> Any:
    """Return a group of this rank alone."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def without_lost(layout: Layout) -> Callable[[Any], Any]:
    """`RankGenerator` whose lists hold only the present slots, by their torch ranks."""

    def make(original: Any) -> Any:
        class WithoutLost(original):  # type: ignore[misc]
            def get_ranks(self, token: str) -> list[list[int]]:
                nominal = super().get_ranks(token)
                return layout.columns(nominal) if token == _PIPELINE else layout.without_lost(nominal)

        return WithoutLost

    return make


def of_nominal_size(layout: Layout) -> Callable[[Any], Any]:
    """`initialize_model_parallel` that computes with the nominal number of ranks."""

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def initialize(*args: Any, **kwargs: Any) -> None:
            given = inspect.signature(original).bind(*args, **kwargs)
            stages = layout.topology.pp  # Megatron's argument has those of this rank's replica
            given.arguments |= {"local_world_size": layout.topology.size, "pipeline_model_parallel_size": stages}
            original(*given.args, **given.kwargs)
            parallel_state._MPU_DATA_PARALLEL_WORLD_SIZE = layout.topology.dp
            parallel_state.set_data_parallel_rank(layout.slot.replica)
            if layout.topology.pp > 1:
                _keep_own_column(layout)
                dist.barrier(
                    group=parallel_state.get_model_parallel_group()
                )  # NCCL needs a first collective of all ranks

        return initialize

    return make


def _keep_own_column(layout: Layout) -> None:
    """Keep this rank's own column: a slot that stands in for others is in several, and Megatron then has a list of
    groups."""
    parallel_state._EMBEDDING_GROUP = parallel_state._EMBEDDING_GLOBAL_RANKS = None
    columns = parallel_state._PIPELINE_GLOBAL_RANKS
    if isinstance(columns[0], list):
        mine = columns.index([layout.ranks[slot] for slot in layout.column(layout.slot.replica, layout.slot.tp)])
        parallel_state._PIPELINE_MODEL_PARALLEL_GROUP = parallel_state._PIPELINE_MODEL_PARALLEL_GROUP[mine]
        parallel_state._PIPELINE_GLOBAL_RANKS = columns[mine]
