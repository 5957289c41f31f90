"""What a job that runs does about a loss: the chooser of `actions.py`, told what such a job can do.

It can go on narrower, go on without the replicas that are degraded, or end, to be started again whole. It never stands
still for a spare: one that is on its way comes in by itself when it is there, and who goes on meanwhile loses nothing
by it. A restart is offered where the user has said how long it takes; then it is worth it where what is left is slow
enough, and long enough so.

Steps are told as parts of a whole job's step, by the plan, so that all survivors choose alike. That narrower replicas
are forbidden is no choice of the moment: whoever is degraded stands idle then, from the first loss on.
"""

import dataclasses

from ntp_plugin.errors import ConfigError
from ntp_plugin.planning.actions import (
    DROP_REPLICA,
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
    """The job as its policy allows it: where narrower replicas are forbidden, none trains that is not whole.

    Refuses a policy that allows nothing.
    """
    forbid = _policy(nominal).forbid
    if {REDUCE_TP, DROP_REPLICA} <= set(forbid) and nominal.policy.actions.restart_s is None:
        raise ConfigError(
            "reduce-tp and drop-replica are forbidden, and restart_s is not said: nothing could be done about a loss",
            way_out="allow one of them, or say how long a restart takes",
        )
    if REDUCE_TP not in forbid:
        return nominal
    policy = dataclasses.replace(nominal.policy, min_tp_width=nominal.topology.tp)
    return dataclasses.replace(nominal, policy=policy)


def decide(plan: RecoveryPlan) -> Choice:
    """About the losses of a plan; refuses where nothing that is allowed can be done."""
    nominal, said = plan.nominal, plan.nominal.policy.actions
    lost = frozenset(plan.lost)
    everybody = frozenset(range(nominal.topology.dp))
    step_ns = split_among(nominal, everybody).step_ns
    forecasts = {REDUCE_TP: _forecast(plan.batch, step_ns, said.recovery_s)}
    whole = everybody - {slot.replica for slot in lost}
    if whole:
        forecasts[DROP_REPLICA] = _forecast(split_among(nominal, whole), step_ns, said.recovery_s)
    if said.restart_s is not None:
        forecasts[RESTART] = Forecast(step_s=1.0, transition_s=said.restart_s)
    situation = Situation(
        topology=nominal.topology,
        lost=lost,
        nominal_step_s=1.0,
        forecasts=forecasts,
        spare_s=None,
        repair_s=said.repair_s,
        failures_per_gpu_s=said.failures_per_gpu_day / DAY_S,
    )
    return choose(situation, _policy(nominal))


def in_lines(choice: Choice) -> list[str]:
    """The table, a line for each action."""
    return [
        f"{row.action}: {row.reason}" if row.score is None else f"{row.action}: {row.score:.4f}, {row.reason}"
        for row in choice.table
    ]


def _policy(nominal: Nominal) -> ActionPolicy:
    forbid = tuple(word.replace("-", " ") for word in nominal.policy.actions.forbid)
    return ActionPolicy(forbid=forbid, min_tp_width=nominal.policy.min_tp_width)


def _forecast(batch: BatchSplit, whole_ns: int, recovery_s: float) -> Forecast:
    return Forecast(step_s=batch.step_ns / whole_ns, transition_s=recovery_s, batch=batch.computed / batch.total)
