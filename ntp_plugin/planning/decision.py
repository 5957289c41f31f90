"""Decides what a running job does about a loss: the choice of `actions.py`, among what such a job can do.

It can continue narrower, or with the layers of a lost stage on other stages; continue without the degraded replicas; or
end in order to be restarted whole. It never pauses for a spare: one that is on its way joins by itself when it is
ready, and continuing meanwhile costs nothing. A restart is considered if the user has given its duration; it pays if
the survivors are slow enough for long enough.

Step times are fractions of an undamaged job's step, taken from the plan, so that all survivors choose alike. A policy
that forbids narrower replicas is not a decision per loss: degraded replicas are then idle from the first loss on.
"""

import dataclasses

from ntp_plugin.errors import ConfigError
from ntp_plugin.planning.actions import (
    DROP_REPLICA,
    MOVE_LAYERS,
    REDUCE_TP,
    RESTART,
    ActionPolicy,
    Choice,
    Forecast,
    Situation,
    choose,
)
from ntp_plugin.planning.batch_split import BatchSplit
from ntp_plugin.planning.recovery_plan import Nominal, RecoveryPlan, split_among

DAY_S = 86_400.0


def as_allowed(nominal: Nominal) -> Nominal:
    """Apply the policy to the job: if narrower replicas are forbidden, only full-width ones train.

    Refuses a policy that allows nothing.
    """
    forbid, narrows = _policy(nominal).forbid, nominal.topology.narrows
    none_left = DROP_REPLICA in forbid and (not narrows or REDUCE_TP in forbid)
    if none_left and nominal.policy.actions.restart_s is None:
        of = "of a context group" if nominal.topology.cp > 1 else "with experts"
        what = "" if narrows else f"drop-replica is forbidden, a replica {of} cannot be narrowed"
        raise ConfigError(
            f"{what or 'reduce-tp and drop-replica are forbidden'}, and restart_s is not set: no action after a loss is"
            " possible",
            fix=f"allow {'one of them' if narrows else 'drop-replica'}, or set restart_s to the duration of a restart",
        )
    if MOVE_LAYERS in forbid:
        nominal = dataclasses.replace(nominal, layers=None)
    if REDUCE_TP not in forbid:
        return nominal
    policy = dataclasses.replace(nominal.policy, min_tp_width=nominal.topology.tp)
    return dataclasses.replace(nominal, policy=policy)


def decide(plan: RecoveryPlan) -> Choice:
    """Choose the action for the losses of a plan; refuses if no allowed action is possible."""
    nominal, actions = plan.nominal, plan.nominal.policy.actions
    lost = frozenset(plan.lost)
    everybody = frozenset(range(nominal.topology.dp))
    step_ns = split_among(nominal, everybody).step_ns
    going_on = REDUCE_TP if nominal.surviving(lost).is_nominally_cut else MOVE_LAYERS
    forecasts = {going_on: _forecast(plan.batch, step_ns, actions.recovery_s)}
    whole = everybody - {slot.replica for slot in lost}
    if whole:
        forecasts[DROP_REPLICA] = _forecast(split_among(nominal, whole), step_ns, actions.recovery_s)
    if actions.restart_s is not None:
        forecasts[RESTART] = Forecast(step_s=1.0, transition_s=actions.restart_s)
    situation = Situation(
        topology=nominal.topology,
        lost=lost,
        nominal_step_s=1.0,
        forecasts=forecasts,
        spare_s=None,
        repair_s=actions.repair_s,
        failures_per_gpu_s=actions.failures_per_gpu_day / DAY_S,
    )
    return choose(situation, _policy(nominal))


def in_lines(choice: Choice) -> list[str]:
    """Format the table, a line for each action."""
    return [
        f"{row.action}: {row.reason}" if row.score is None else f"{row.action}: {row.score:.4f}, {row.reason}"
        for row in choice.table
    ]


def _policy(nominal: Nominal) -> ActionPolicy:
    forbid = tuple(word.replace("-", " ") for word in nominal.policy.actions.forbid)
    return ActionPolicy(forbid=forbid, min_tp_width=nominal.policy.min_tp_width)


def _forecast(batch: BatchSplit, whole_ns: int, recovery_s: float) -> Forecast:
    return Forecast(step_s=batch.step_ns / whole_ns, transition_s=recovery_s, batch=batch.computed / batch.total)
