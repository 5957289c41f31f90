"""Estimates the time of one micro-batch on a layout, before it is measured.

Inside a TP group every attention and MLP block ends in a collective, so the slot with the most units sets the pace of
each family. A layer of experts is an exchange within an expert group, so the slot with the most experts sets the pace
of all its replicas. Inside a pipeline the slowest stage sets the pace of the replica. Times are whole nanoseconds, so
that every survivor computes the same ones; by default a healthy micro-batch counts as one second and only ratios mean
anything.
"""

from collections.abc import Iterable
from fractions import Fraction

from ntp_plugin.planning.expert_groups import NOMINAL_LOAD, GroupLoad
from ntp_plugin.planning.shard_layout import lay_out
from ntp_plugin.planning.topology import WHOLE, Pattern
from ntp_plugin.planning.units import ModelUnits, StageUnits

HEALTHY_NS = 1_000_000_000


def stage_work(units: StageUnits, tp: int, pattern: Pattern, load: GroupLoad = NOMINAL_LOAD) -> Fraction:
    """FLOPs per nominal token on the critical path of a group: each family, and the experts, at their widest slot."""
    own = sum(
        flops * lay_out(family, tp, pattern).widest for family, flops in zip(units.families, units.flops, strict=True)
    )
    return own * load.tokens + units.expert_flops * load.expert_tokens / tp


def micro_batch_ns(
    nominal: ModelUnits,
    tp: int,
    stages: Iterable[tuple[StageUnits, Pattern]],
    healthy_ns: int = HEALTHY_NS,
    load: GroupLoad = NOMINAL_LOAD,
) -> int:
    """The time of one micro-batch in a replica with these stages and patterns, against a full-width replica's."""
    whole = max(stage_work(stage, tp, WHOLE) for stage in nominal.stages)
    degraded = max(stage_work(stage, tp, pattern, load) for stage, pattern in stages)
    return round(degraded / whole * healthy_ns)
