"""How a running job reacts to a loss: it continues, unless the costs of a restart are given and lower."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntp_plugin.errors import ConfigError, Refused
from ntp_plugin.planning.actions import DROP_REPLICA, REDUCE_TP, RESTART
from ntp_plugin.planning.decision import as_allowed, decide, in_lines
from ntp_plugin.planning.recovery_plan import Nominal, plan_recovery
from ntp_plugin.planning.topology import parse_slots
from tests.unit.strategies import make_job

REPAIR_S = 432_000.0


NOT_OFFERED = ["move layers", "swap a spare in", "wait for a spare", RESTART]


def nominal(cp=1, **actions):
    return as_allowed(
        Nominal.of(
            make_job(
                parallel={"tp": 4, "pp": 1, "cp": cp, "dp": 4 // cp, "gpus_per_node": 4},
                model={"layers": 2, "hidden": 64, "heads": 8, "ffn": 256, "vocab": 1000},
                batch={"micro_batch": 4, "global_batch": 64},
                ntp={"actions": actions},
            )
        )
    )


def plan(job, *words):
    return plan_recovery(job, lost=parse_slots(words, job.topology))


def test_a_job_continues_narrower_by_default():
    choice = decide(plan(nominal(), "r1.s0.t2"))
    assert choice.action == REDUCE_TP
    assert [row.action for row in choice.table if row.score is None] == NOT_OFFERED


@given(st.floats(0, REPAIR_S), st.sampled_from([("r1.s0.t2",), ("r1.s0.t2", "r1.s0.t3"), ("r0", "r1.s0.t0")]))
def test_a_restart_is_chosen_where_more_work_is_done_until_repair(restart_s, words):
    found = plan(nominal(restart_s=restart_s, failures_per_gpu_day=0.0), *words)
    rate = found.batch.nominal_ns / found.batch.step_ns
    narrower, again = rate * (REPAIR_S - 1.0), REPAIR_S - restart_s
    if abs(narrower - again) > 1e-4 * REPAIR_S:
        assert (decide(found).action == RESTART) == (again > narrower)


def test_a_step_is_compared_with_a_nominal_one_of_as_many_splits():
    """An interleaved pipeline splits a micro-batch of the plan, and a full-width replica does so too."""
    one, split = (decide(plan(dataclasses.replace(nominal(), splits=number), "r1.s0.t2")).table[0] for number in (1, 4))
    assert one.action == REDUCE_TP
    assert split.throughput == pytest.approx(one.throughput)


def test_failures_that_come_often_make_a_restart_worth_less():
    costs = {"restart_s": 20_000.0, "repair_s": 400_000.0}
    seldom, often = (
        decide(plan(nominal(**costs, failures_per_gpu_day=rate), "r1.s0.t2", "r1.s0.t3")) for rate in (0.0, 1.0)
    )
    assert (seldom.action, often.action) == (RESTART, REDUCE_TP)
    assert often.horizon_s == pytest.approx(86_400 / 4), "of the four GPUs of the replica that is degraded"


def test_without_narrower_replicas_the_others_continue_alone():
    found = plan(nominal(forbid=["reduce-tp"]), "r1.s0.t2")
    assert found.dropped == (1,)
    assert decide(found).action == DROP_REPLICA
    assert "reduce tp: forbidden" in in_lines(decide(found))


def test_a_job_without_allowed_actions_is_refused_before_a_loss():
    with pytest.raises(ConfigError, match=r"reduce-tp and drop-replica are forbidden, and restart_s is not set"):
        nominal(forbid=["reduce-tp", "drop-replica"])
    found = plan(nominal(forbid=["reduce-tp", "drop-replica"], restart_s=1e5), "r1.s0.t2")
    assert decide(found).action == RESTART


def test_a_context_group_goes_on_without_the_replica_and_no_replica_is_narrowed():
    choice = decide(plan(nominal(cp=2), "r1.s0.t2"))
    assert choice.action == DROP_REPLICA
    assert "reduce tp: a replica of a context group keeps its full width" in in_lines(choice)
    with pytest.raises(ConfigError, match=r"drop-replica is forbidden, a replica of a context group cannot"):
        nominal(cp=2, forbid=["drop-replica"])
    found = plan(nominal(cp=2, forbid=["drop-replica"], restart_s=1e5), "r1.s0.t2")
    assert decide(found).action == RESTART


def test_an_impossible_decision_states_its_reason():
    found = plan(nominal(forbid=["drop-replica"]), "r1.s0.t2")
    narrower = dataclasses.replace(found, nominal=with_min_tp_width(found.nominal, 4))
    with pytest.raises(Refused, match=r"no action is possible .*reduce tp: narrower than .*; drop replica: forbidden"):
        decide(narrower)


def with_min_tp_width(job, width):
    return dataclasses.replace(job, policy=dataclasses.replace(job.policy, min_tp_width=width))


def test_an_unknown_action_is_refused():
    with pytest.raises(ConfigError, match="'reduce' is no action"):
        nominal(forbid=["reduce"])


def test_the_same_losses_lead_to_the_same_table():
    job = nominal(restart_s=600.0)
    tables = {tuple(in_lines(decide(plan(job, *words)))) for words in (("r0.s0.t1", "r2"), ("r2", "r0.s0.t1"))}
    assert len(tables) == 1


def test_a_decision_depends_only_on_facts_in_the_digest():
    one, other = (plan(nominal(restart_s=seconds), "r1.s0.t2") for seconds in (600.0, 601.0))
    assert one.digest != other.digest
    assert dataclasses.replace(one, nominal=other.nominal).batch == other.batch
