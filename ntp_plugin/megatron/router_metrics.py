"""What routers log of a step, summed over uneven replicas.

Megatron adds up a router's losses over the micro-batches of a rank, and takes the mean of that over data-parallel
groups. In a degraded layout replicas run different numbers of micro-batches, so all ranks that train add up what they
have, each divided by what it would be shared by nominally.

Megatron adds up over the ranks when it logs a step. There a loss, or a rank that has just joined, may keep some ranks
from it. So a live job adds up before the vote of the step, where all ranks are together, and the log only reads. A step
that is taken again begins with nothing.
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


_LOGGED = {
    "load_balancing_loss": "aux_loss",
    "seq_load_balancing_loss": "seq_aux_loss",
    "global_load_balancing_loss": "global_aux_loss",
}
"""Names in Megatron's log, and the kinds of load balancing that have them."""


def add_up_before_the_vote(args: Any) -> None:
    """Add up what all routers have recorded in a step; all ranks that train call this together."""
    tracker, kinds = get_moe_metrics_tracker(), args.moe_router_load_balancing_type
    names = [name for name, kind in _LOGGED.items() if kind in kinds]
    names += ["z_loss"] if args.moe_z_loss_coeff is not None else []
    for name in names:
        tracker.ensure_initialized(name, args.num_layers + (args.mtp_num_layers or 0))
    tracker._sync_metrics(names)


def only_read(original: Any) -> Any:
    """`MoEMetricsTracker.report`, of what has been added up."""

    @functools.wraps(original)
    def report(tracker: Any, *args: Any, **kwargs: Any) -> str:
        tracker._sync_metrics = lambda *_, **__: None
        try:
            return str(original(tracker, *args, **kwargs))
        finally:
            del tracker._sync_metrics

    return report


def forget() -> None:
    """Drop what a step that was interrupted, or taken again, has added up."""
    get_moe_metrics_tracker().clear()
