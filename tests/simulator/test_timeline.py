"""Runs: the work and the pauses of each policy; and counting spares."""

import math

import pytest

from ntp_plugin.planning.actions import ActionPolicy
from ntp_plugin.simulator.failures import DAY_S, DomainFailure, Rates, draw_faults
from ntp_plugin.simulator.policies import POLICIES, policy_of
from ntp_plugin.simulator.report import simulate
from ntp_plugin.simulator.snapshot import losses, spares_needed
from ntp_plugin.simulator.timeline import follow
from tests.simulator.scenarios import PAPER, scenario


def fault(start, end, domain=3, gpus=1):
    return DomainFailure(
        start_s=start * DAY_S, end_s=end * DAY_S, domain=domain, gpus=range(gpus), expected_s=(end - start) * DAY_S
    )


def course(name, faults, **changed):
    asked = scenario(**changed)
    return follow(asked.setting(tuple(faults)), policy_of(name), faults)


def test_without_faults_everybody_does_all():
    for name in POLICIES:
        assert course(name, []).goodput == pytest.approx(1)


def test_a_dropped_replica_is_an_eighth_while_it_is_out():
    done = course("dp-drop", [fault(5, 10)])
    rate = scenario().fleet.running({}, [3], mode="shrink").throughput
    step = scenario().fleet.nominal_step_s
    assert done.paused_s == pytest.approx(2 * (5 + step / 2) + scenario().fleet.moved_s(1))
    assert done.goodput == pytest.approx((15 + 5 * rate) / 20, abs=1e-5)
    assert done.least == pytest.approx(rate)


def test_a_fault_that_outlasts_the_run_is_cut_there():
    rate = scenario().fleet.running({3: 1}, mode="shrink").throughput
    assert course("ntp", [fault(10, 400)]).goodput == pytest.approx((10 + 10 * rate) / 20, abs=1e-5)


def test_a_hot_spare_is_swapped_in_and_the_repaired_domain_is_the_next_spare():
    done = course("ntp+hot", [fault(1, 2), fault(3, 9), fault(4, 8, domain=5)], hot=1)
    assert done.actions == {"swap a spare in": 2, "reduce tp": 1}
    assert done.spares_used == 1


def test_a_cold_spare_comes_later_and_waiting_for_it_is_a_pause():
    cold = course("ntp+cold", [fault(1, 9)], cold=1)
    waited = course("wait", [fault(1, 9)], cold=1)
    assert cold.actions == {"reduce tp": 1, "swap a spare in": 1}
    assert waited.actions == {"wait for a spare": 1}
    assert waited.paused_s == pytest.approx(900 + 60 + scenario().fleet.nominal_step_s / 2)
    assert cold.paused_s < 80 < waited.paused_s


def test_a_restart_repeats_the_steps_after_the_last_checkpoint():
    done = course("restart", [fault(1, 2)], standstills={"checkpoint_s": 50_000.0})
    assert done.paused_s == pytest.approx(900 + DAY_S % 50_000)
    both = course("restart", [fault(1, 2), fault(5, 6, domain=4)])
    rate = scenario().fleet.running({}, [3], mode="shrink").throughput
    assert both.goodput < (1 + 19 * rate) / 20 + 1e-3  # the first is back only when the second restarts the job


def test_two_faults_of_one_gpu_are_one_loss_until_both_are_repaired():
    done = course("dp-drop", [fault(1, 5), fault(2, 9)])
    assert done.actions == {"drop replica": 1}
    alone = course("dp-drop", [fault(1, 9)])
    assert done.goodput == pytest.approx(alone.goodput)


def test_work_is_linear_in_the_faults():
    few, many = scenario(failures={"factor": 20.0}), scenario(failures={"factor": 200.0})
    for asked in (few, many):
        faults = asked.faults()
        ends = sum(found.end_s < asked.horizon_s for found in faults)
        done = follow(asked.setting(faults), policy_of("ntp"), faults)
        assert done.events == len(faults) + ends


def test_all_policies_see_the_same_faults_and_a_seed_determines_a_run():
    one, again, other = (list(simulate(scenario(seed=seed)))[-1] for seed in (4, 4, 5))
    assert one == again
    assert one.courses != other.courses


def test_the_chooser_may_be_forbidden_something():
    faults = [fault(1, 9)]
    asked = scenario()
    free, bound = (
        follow(asked.setting(tuple(faults)), policy_of("chooser"), faults),
        follow(scenario(choosing={"forbid": ["reduce tp"]}).setting(tuple(faults)), policy_of("chooser"), faults),
    )
    assert free.actions == {"reduce tp": 1}
    assert bound.actions == {"drop replica": 1}
    assert free.goodput > bound.goodput
    assert asked.setting(()).allowed == ActionPolicy()


def test_poisson_faults_have_the_configured_rate_shares_and_blast():
    from random import Random  # noqa: PLC0415

    rates = Rates(per_gpu_day=0.01, blast_gpus=4)
    found = draw_faults(Random(1), rates, domains=100, domain_gpus=8, horizon_s=100 * DAY_S)
    expected = 0.01 * 800 * 100
    assert abs(len(found) - expected) < 4 * math.sqrt(expected)
    hard = sum(one.end_s - one.start_s == pytest.approx(5 * DAY_S) for one in found)
    assert hard / len(found) == pytest.approx(0.78, abs=0.06)
    assert {len(one.gpus) for one in found} == {4}
    assert {one.gpus.start for one in found} == {0, 4}


def test_the_papers_case():
    """Short: `make show-simulator` has all of it beside the paper's figures."""
    asked = scenario(PAPER, even=True)
    policies = [policy_of(name) for name in ("dp-drop", "ntp", "ntp-pw")]
    rows, whole = losses(asked.fleet, policies, mode="shrink", failed=[0.004], draws=5, seed=0, blast=1)
    drop, ntp, boosted = (row.mean for row in rows)
    assert 0.11 < drop < 0.14
    assert ntp < 0.03
    assert boosted < 0.01
    assert whole[0].mean == pytest.approx((1 - 0.004) ** 32, abs=0.01)


def test_spares_keep_the_global_batch():
    asked = scenario(PAPER, even=True)
    many = [fault(1, 9, domain=number) for number in range(20)]
    needed = {
        name: spares_needed(asked.fleet, policy_of(name), many, horizon_s=asked.horizon_s)
        for name in ("dp-drop", "ntp", "ntp-pw")
    }
    # 20 degraded domains fill 3 replicas that do 7 of 8 micro-batches each: one more replica of 8, or the 20 of them;
    # to repair it by replacing alone takes all 20, and 4 + 8 of them leave 2 replicas with 2 missing.
    assert needed == {"dp-drop": 20, "ntp": 8, "ntp-pw": 0}
    ends_before = [fault(1, 2, domain=number) for number in range(5)] + [fault(3, 4, domain=9)]
    assert spares_needed(asked.fleet, policy_of("dp-drop"), ends_before, horizon_s=asked.horizon_s) == 5
