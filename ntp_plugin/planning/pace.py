"""Estimates the time of one micro-batch on a layout, before it is measured.

Inside a TP group every attention and MLP block ends in a collective, so the slot with the most units sets the pace of
each family; inside a pipeline the slowest stage sets the pace of the replica. Times are whole nanoseconds, so that
every survivor computes the same ones; by default a healthy micro-batch counts as one second and only ratios mean
anything.
"""

from fractions import Fraction

from ntp_plugin.planning.shard_layout import lay_out
from ntp_plugin.planning.topology import WHOLE, Pattern
from ntp_plugin.planning.units import ModelUnits, StageUnits

HEALTHY_NS = 1_000_000_000


def stage_work(units: StageUnits, tp: int, pattern: Pattern) -> int:
    """FLOPs per token on the critical path of a group: each family at its widest slot."""
    return sum(
        flops * lay_out(family, tp, pattern).widest for family, flops in zip(units.families, units.flops, strict=True)
    )


def micro_batch_ns(units: ModelUnits, tp: int, patterns: tuple[Pattern, ...], healthy_ns: int = HEALTHY_NS) -> int:
    """The time of one micro-batch in a replica whose stages have these patterns, against a full-width replica's."""
    whole = max(stage_work(stage, tp, WHOLE) for stage in units.stages)
    degraded = max(stage_work(stage, tp, pattern) for stage, pattern in zip(units.stages, patterns, strict=True))
    return round(Fraction(degraded, whole) * healthy_ns)
