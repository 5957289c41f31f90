"""The part of the table of hooks (`hooks.py`) that jobs with experts have."""

import functools

from ntp_plugin.megatron import padding, router_metrics
from ntp_plugin.megatron.checkpoint.expert_checkpoints import ExpertCheckpoints
from ntp_plugin.megatron.layers.uneven_experts import UnevenExperts
from ntp_plugin.megatron.layers.uneven_layers import UnevenLayers
from ntp_plugin.megatron.layout import Layout
from ntp_plugin.megatron.reduction.lane_sync import LaneSync
from ntp_plugin.patching import Replacement

_MOE = "megatron.core.transformer.moe"


def of_checkpoints(layout: Layout, layers: UnevenLayers) -> tuple[Replacement, ...]:
    """Return the hooks that save experts where they are."""
    experts = ExpertCheckpoints(layout, UnevenExperts(layers))
    return tuple(
        Replacement(
            target=f"{_MOE}.experts:{name}.sharded_state_dict",
            why="it numbers experts as if each rank had as many, and has data-parallel groups decide who writes",
            make=experts.entries,
        )
        for name in ("TEGroupedMLP", "SequentialMLP")
    )


def of_experts(experts: UnevenExperts) -> tuple[Replacement, ...]:
    """Return the hooks that say which experts a slot has."""
    return (
        Replacement(
            target=f"{_MOE}.moe_layer:MoELayer.__init__",
            why="it divides the experts evenly among the ranks that are left",
            make=experts.layer,
        ),
        *(
            Replacement(
                target=f"{_MOE}.experts:{name}.__init__",
                why="experts are cut as a whole, and not as an MLP is",
                make=experts.experts,
            )
            for name in ("TEGroupedMLP", "SequentialMLP")
        ),
    )


def of_routers(sync: LaneSync) -> tuple[Replacement, ...]:
    """Return the hooks that leave out what a router does for micro-batches that weigh nothing, and sum its log."""
    return (
        Replacement(
            target=f"{_MOE}.moe_utils:MoEAuxLossAutoScaler.apply",
            why="replicas of an expert group run alike many micro-batches, and padding adds nothing to the loss",
            make=padding.without_padding,
        ),
        Replacement(
            target=f"{_MOE}.router:TopKRouter._apply_expert_bias",
            why="padding is not counted",
            make=padding.uncounted,
        ),
        Replacement(
            target=f"{_MOE}.moe_logging:MoEMetricsTracker.record",
            why="padding is not logged",
            make=padding.uncounted,
        ),
        Replacement(
            target="megatron.core.transformer.multi_token_prediction:MTPLossAutoScaler.apply",
            why="nor do the losses of its predictions",
            make=padding.without_padding,
        ),
        Replacement(
            target="megatron.core.transformer.multi_token_prediction:MTPLossLoggingHelper.save_metrics_to_tracker",
            why="as above",
            make=padding.uncounted,
        ),
        Replacement(
            target=f"{_MOE}.moe_logging:MoEMetricsTracker._sync_metrics",
            why="it takes means over replicas that run alike many micro-batches",
            make=functools.partial(router_metrics.over_all, sync),
        ),
    )
