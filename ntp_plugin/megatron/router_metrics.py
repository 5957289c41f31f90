"""What routers log of a step, summed over uneven replicas.

Megatron adds up a router's losses over the micro-batches of a rank, and takes the mean of that over data-parallel
groups. In a degraded layout replicas run different numbers of micro-batches, so all ranks that train add up what they
have, each divided by what it would be shared by nominally. A step that is taken again begins with nothing.
"""

import functools
from typing import Any

import torch.distributed as dist
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

from ntp_plugin.megatron.reduction.lane_sync import LaneSync


def over_all(sync: LaneSync, original: Any) -> Any:
    """`MoEMetricsTracker._sync_metrics`, in a degraded layout."""
    topology, layout = sync.layout.topology, sync.layout

    @functools.wraps(original)
    def add_up(tracker: Any, metric_names: Any, *_: Any, **__: Any) -> None:
        for name in metric_names:
            entry = tracker.metrics.get(name)
            if entry is None:
                continue
            shared_by = topology.contexts
            if entry.avg_group is not None:  # a mean over tokens, which all slots have of their own
                shared_by = topology.contexts * layout.context_degree * topology.tp
            entry.values /= shared_by
            dist.all_reduce(entry.values, group=sync.everybody)

    return add_up


def forget() -> None:
    """Drop what a step that was interrupted, or taken again, has added up."""
    get_moe_metrics_tracker().clear()
