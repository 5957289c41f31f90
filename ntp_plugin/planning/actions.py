"""Chooses the action after a loss, and returns the whole table that it was chosen from.

    reduce tp        the degraded replica continues narrower
    move layers      it continues without a stage, whose layers go to its other stages; others of these may be narrower
    drop replica     it does not continue; its batch goes to the others
    swap a spare in  a spare that is ready takes the place of the lost slot
    wait for a spare the job pauses until one is ready
    restart          all ranks start again from the last checkpoint

Each has a score: the work done until things change again, over what an undamaged job would do in that time:

    throughput x efficiency x max(0, H - T) / H,   H = min(expected next failure, expected repair)

T is the time without training. An action that continues narrower, or without a replica, while a spare is on its way can
have it swapped in when it is ready: its value is its work until then, plus what the swap does after. The next failure
is one of the replicas that the loss concerns: a failure elsewhere does not undo what the choice has gained. Efficiency
is 1, unless the user lets the batch change; then it is (phi + m0) / (phi + m), the value of a sample in a batch of m
against one in the nominal m0, with the measured gradient noise scale phi (Pollux, arXiv 2008.12260).

Pure arithmetic on facts that every survivor shares, so that all choose alike. Of equal scores the action listed first
wins: it disturbs least.
"""

import dataclasses
import math
from collections.abc import Mapping

from ntp_plugin.errors import ConfigError, Refused
from ntp_plugin.planning.topology import Slot, SurvivingReplicas, Topology

REDUCE_TP, MOVE_LAYERS, DROP_REPLICA = "reduce tp", "move layers", "drop replica"
SWAP_SPARE, WAIT_FOR_SPARE, RESTART = "swap a spare in", "wait for a spare", "restart"
ACTIONS = (REDUCE_TP, MOVE_LAYERS, DROP_REPLICA, SWAP_SPARE, WAIT_FOR_SPARE, RESTART)

EQUAL = 2e-5
"""Scores that differ by less are equal: seconds in days. A replica kept narrower can still continue when others
cannot."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """The expected effect of an action: the step time, the part of the nominal batch in it, and the time without
    training.

    `too_large` says by how much it does not fit into memory; empty if it fits.
    """

    step_s: float
    transition_s: float
    batch: float = 1.0
    too_large: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """The facts known when slots are lost."""

    topology: Topology
    lost: frozenset[Slot]
    nominal_step_s: float
    forecasts: Mapping[str, Forecast]
    """Action -> its forecast. An action without one is impossible."""
    spare_s: float | None
    """Seconds until a spare is ready: 0 if one is ready, None if none comes."""
    repair_s: float
    """Seconds until the lost slots are expected back."""
    failures_per_gpu_s: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ActionPolicy:
    """The limits that the user sets."""

    forbid: tuple[str, ...] = ()
    max_wait_s: float | None = None
    """Longest wait for a spare."""
    hysteresis: float = 0.0
    """How much better (0.01: one per cent) another action must be than the one in force."""
    min_tp_width: int = 1
    batch: float | None = None
    """Samples of the nominal batch, if the batch may change; else None."""
    noise_scale: float | None = None
    """Gradient noise scale in samples, if the batch may change."""

    def __post_init__(self) -> None:
        unknown = [action for action in self.forbid if action not in ACTIONS]
        if unknown:
            raise ConfigError(f"{unknown[0]!r} is no action", fix=f"choose from {', '.join(ACTIONS)}")
        if (self.batch is None) != (self.noise_scale is None):
            raise ConfigError(
                "a batch that may change needs its size and its gradient noise scale, or neither",
                fix="give both, or leave both out and keep the batch",
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """A row of the table. A refused action has no score."""

    action: str
    score: float | None
    throughput: float
    efficiency: float
    transition_s: float
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The chosen action, how long it is expected to last, and the table it was chosen from."""

    action: str
    horizon_s: float
    table: tuple[Scored, ...]


def choose(situation: Situation, policy: ActionPolicy, *, current: str | None = None) -> Choice:
    """Choose the best action. `current` is in force: another one must be better by the hysteresis."""
    horizon = horizon_s(situation)
    table = tuple(_scored(action, situation, policy, horizon) for action in ACTIONS)
    possible = {row.action: row.score for row in table if row.score is not None}
    if not possible:
        reasons = "; ".join(f"{row.action}: {row.reason}" for row in table)
        raise Refused(
            f"no action is possible after the loss of {len(situation.lost)} slots ({reasons})",
            fix="allow another action, bring slots back, or restart by hand",
        )
    enough = max(possible.values()) * (1 - EQUAL)
    best = next(action for action in possible if possible[action] >= enough)  # the first of equals
    if current in possible and possible[best] <= possible[current] * (1 + policy.hysteresis):
        best = current
    return Choice(action=best, horizon_s=horizon, table=table)


def horizon_s(situation: Situation) -> float:
    """How long a choice is expected to last, in seconds."""
    topology = situation.topology
    concerned = len({slot.replica for slot in situation.lost}) * topology.tp * topology.pp
    failures_per_s = situation.failures_per_gpu_s * concerned
    return min(situation.repair_s, 1 / failures_per_s if failures_per_s else math.inf)


def efficiency(batch: float, policy: ActionPolicy) -> float:
    """The value of a sample in a step with this part of the nominal batch."""
    if policy.batch is None or policy.noise_scale is None:
        return 1.0
    return (policy.noise_scale + policy.batch) / (policy.noise_scale + batch * policy.batch)


def _scored(action: str, situation: Situation, policy: ActionPolicy, horizon: float) -> Scored:
    forecast = situation.forecasts.get(action)
    refusal = _refusal(action, forecast, situation, policy)
    if forecast is None or refusal:
        return Scored(action=action, score=None, throughput=0.0, efficiency=0.0, transition_s=0.0, reason=refusal)
    wait = (situation.spare_s or 0.0) if action == WAIT_FOR_SPARE else 0.0
    transition = forecast.transition_s + wait
    rate = _rate(forecast, situation, policy)
    score, reason = _part(rate, horizon, transition), f"after {transition:.1f} s without"
    swap = situation.forecasts.get(WAIT_FOR_SPARE)
    spare_s = situation.spare_s or 0.0
    if (
        action in (REDUCE_TP, MOVE_LAYERS, DROP_REPLICA)
        and swap
        and transition < spare_s < horizon
        and SWAP_SPARE not in policy.forbid
    ):
        until = rate * (spare_s - transition) / horizon
        then = _part(_rate(swap, situation, policy), horizon, spare_s + swap.transition_s)
        if until + then > score:
            score, reason = until + then, f"{reason}, until a spare is swapped in after {spare_s:.0f} s"
    return Scored(
        action=action,
        score=score,
        throughput=forecast.batch * situation.nominal_step_s / forecast.step_s,
        efficiency=efficiency(forecast.batch, policy),
        transition_s=transition,
        reason=f"{rate:.4f} of a whole job's progress for {horizon:.0f} s, {reason}",
    )


def _rate(forecast: Forecast, situation: Situation, policy: ActionPolicy) -> float:
    throughput = forecast.batch * situation.nominal_step_s / forecast.step_s
    return throughput * efficiency(forecast.batch, policy)


def _part(rate: float, horizon: float, transition: float) -> float:
    return rate if math.isinf(horizon) else rate * max(0.0, horizon - transition) / horizon


def _refusal(action: str, forecast: Forecast | None, situation: Situation, policy: ActionPolicy) -> str:
    """Why an action is impossible; empty if it is possible."""
    if action in policy.forbid:
        return "forbidden"
    of_its_own = {
        REDUCE_TP: _too_narrow,
        DROP_REPLICA: _none_left,
        SWAP_SPARE: _none_ready,
        WAIT_FOR_SPARE: _none_soon,
    }.get(action)
    if of_its_own and (refusal := of_its_own(situation, policy)):
        return refusal
    return forecast.too_large if forecast else "not offered"


def _too_narrow(situation: Situation, policy: ActionPolicy) -> str:
    surviving = SurvivingReplicas(topology=situation.topology, lost=situation.lost, min_tp_width=policy.min_tp_width)
    degraded = {slot.replica for slot in situation.lost}
    if not surviving.dropped >= degraded:
        return ""
    if not situation.topology.narrows:
        of = "of a context group" if situation.topology.cp > 1 else "with experts"
        return f"a replica {of} keeps its full width"
    return f"narrower than min_tp_width = {policy.min_tp_width}"


def _none_left(situation: Situation, _policy: ActionPolicy) -> str:
    degraded = {slot.replica for slot in situation.lost}
    return "" if len(degraded) < situation.topology.dp else "no replica would be left"


def _none_ready(situation: Situation, _policy: ActionPolicy) -> str:
    return "" if situation.spare_s == 0 else "no spare is ready"


def _none_soon(situation: Situation, policy: ActionPolicy) -> str:
    if situation.spare_s is None:
        return "no spare comes"
    if policy.max_wait_s is not None and situation.spare_s > policy.max_wait_s:
        return f"a spare takes {situation.spare_s:.0f} s, max_wait is {policy.max_wait_s:.0f} s"
    return ""
