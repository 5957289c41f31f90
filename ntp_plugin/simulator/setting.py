"""Inputs that all policies of a run share, and the result of each policy."""

import dataclasses
from collections.abc import Mapping

from ntp_plugin.planning.actions import ActionPolicy
from ntp_plugin.planning.topology import Topology
from ntp_plugin.simulator.fleet import Fleet


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """How long the whole job pauses, in seconds."""

    recover_s: float
    """From a loss or a return to the next step, without what is moved."""
    swap_s: float
    """Until a ready spare has the state and the job goes on."""
    cold_s: float
    """Until a cold spare is ready."""
    restart_s: float
    """From a loss to the first step of a job that was started again."""
    checkpoint_s: float
    """Between two checkpoints; a restart does again what came after the last."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SimulationSetting:
    """What all policies of a run have in common."""

    fleet: Fleet
    topology: Topology
    costs: Costs
    mode: str
    hot: int
    cold: int
    horizon_s: float
    failures_per_gpu_s: float
    groups_per_domain: int
    allowed: ActionPolicy


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """How a policy did."""

    policy: str
    goodput: float
    """Work done against a whole job to which nothing happens."""
    paused_s: float
    losses: int
    events: int
    least: float
    """The lowest throughput, pauses aside."""
    spares_used: int
    """At once, at most."""
    actions: Mapping[str, int]
    series: tuple[tuple[float, float], ...]
    """(moment, work done until then)."""
