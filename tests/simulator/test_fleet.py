"""Step times and throughputs with given losses, against numbers worked out by hand."""

import dataclasses
import itertools
from random import Random

import pytest

from ntp_plugin.planning.pace import stage_work
from ntp_plugin.planning.routes import plan_route
from ntp_plugin.planning.shard_layout import lay_out, slot_elements
from ntp_plugin.planning.topology import Slot, SurvivingReplicas
from ntp_plugin.simulator.fleet import FIXED, SHRINK, STRICT
from ntp_plugin.simulator.step_time import UnevenPace, pattern_of
from tests.simulator.scenarios import PAPER, scenario


def test_only_how_many_slots_are_lost_matters_to_the_pace():
    """The premise of the model: any pattern with so many lost slots is as wide as the first one."""
    model = scenario(parallel={"tp": 8, "pp": 2, "dp": 8}).fleet.model
    for stage, count in itertools.product(range(2), range(1, 5)):
        for lost in itertools.combinations(range(8), count):
            units = model.units.stages[stage]
            assert stage_work(units, 8, lost) == stage_work(units, 8, pattern_of(count))
            fullest, first = (max(slot_elements(units, 8, pattern)) for pattern in (lost, pattern_of(count)))
            assert fullest == pytest.approx(first, rel=0.02)  # one unit of one family more or less


def test_a_step_time_is_the_sum_of_its_parts():
    """Compute, collectives, pipeline, exposed reduction and optimizer, counted from the data sheet by hand."""
    fleet = scenario().fleet
    model, machine = fleet.model, fleet.model.machine
    tokens, layers, h = 4096, 8, 4096
    per_layer = 2 * 12 * h * h + 2 * tokens * h  # products, and causal attention
    vocabulary = 2 * h * 32768
    compute = [3 * (layers * per_layer) * tokens / 8, 3 * (layers * per_layer + vocabulary) * tokens / 8]
    collectives = 8 * layers * (tokens * h * 2 * 7 / 8 / 450e9 + 10e-6)
    stages = [flops / (989e12 * 0.6) + collectives for flops in compute]
    assert [model.stage_ns(stage, 0) / 1e9 for stage in (0, 1)] == pytest.approx(stages, rel=1e-6)
    hand_over = 2 * (tokens * h * 2 / 8 / 50e9 + 20e-6)
    assert fleet.nominal_ns / 1e9 == pytest.approx(sum(stages) + hand_over + 15 * max(stages), rel=1e-6)
    elements = layers * 12 * h * h / 8 + 2 * layers * h + 32768 * h / 8 + h  # and the norms, replicated on every slot
    exposed = 0.1 * 2 * 7 / 8 * elements * 4 / (machine.nic_gb_per_s * 1e9)
    optimizer = elements * (4 + 2 * 12 + 2) / 3350e9
    assert model.tail_ns(0, 8) / 1e9 == pytest.approx(exposed + optimizer, rel=1e-6)


def test_the_modelled_reduction_sends_as_much_as_the_busiest_rank_of_the_plan():
    asked = scenario()
    fleet, topology = asked.fleet, asked.topology
    surviving = SurvivingReplicas(topology=topology, lost=frozenset({Slot(replica=3, stage=1, tp=2)}), min_tp_width=1)
    units = fleet.model.units.stages[1]
    from ntp_plugin.config.sections import Hardware  # noqa: PLC0415

    route = plan_route(surviving, units, 1, wanted="direct", gradient_bytes=4, hardware=Hardware())
    elements = max(slot_elements(units, 8, (2,)))
    sent = 2 * 7 / 8 * elements * 4
    assert route.direct_cost.nic_bytes == pytest.approx(sent, rel=0.01)


def test_uneven_stages_in_a_1f1b_pipeline():
    """Counted on a grid: micro-batch m leaves stage s once it has left s - 1, and m - 1 has left s."""
    random = Random(3)
    for _ in range(50):
        times = [random.randint(1, 9) for _ in range(random.randint(1, 6))]
        pace, count = UnevenPace(ns=max(times), fill_ns=sum(times)), random.randint(1, 12)
        left = [[0] * len(times) for _ in range(count)]
        for m, s in itertools.product(range(count), range(len(times))):
            ready = max(left[m][s - 1] if s else 0, left[m - 1][s] if m else 0)
            left[m][s] = ready + times[s]
        assert pace.step_ns(count, len(times)) == left[-1][-1]
        assert pace.most_within(left[-1][-1], len(times)) == count
        assert pace.most_within(left[-1][-1] - 1, len(times)) == count - 1


def test_uneven_depths_cost_as_much_as_the_deepest_stage():
    even = scenario(PAPER, model={"layers": 96}).fleet
    uneven = scenario(PAPER).fleet
    assert uneven.model.depths == (13, 13, 13, 13, 12, 12, 12, 12)
    layers = (100 + 7 * 13) / (96 + 7 * 12)  # the last stage has the vocabulary as well, so that it is a little less
    assert 1.04 < uneven.nominal_ns / even.nominal_ns < layers


def test_the_narrower_the_slower_and_the_widest_slot_rules():
    fleet = scenario(PAPER).fleet
    even = scenario(PAPER, even=True).fleet
    assert lay_out(fleet.model.units.stages[1].families[0], 32, (0,)).widest == 5
    times = [fleet.model.stage_ns(1, lost) for lost in range(17)]
    assert times == sorted(times)
    assert even.model.stage_ns(1, 0) == fleet.model.stage_ns(1, 0)
    assert even.model.stage_ns(1, 1) < fleet.model.stage_ns(1, 1)
    assert even.model.stage_ns(1, 16) == fleet.model.stage_ns(1, 16)  # half the slots divide everything


def test_dropping_costs_the_replica_and_nothing_else():
    fleet = scenario().fleet
    running = fleet.running({}, [5], mode=SHRINK)
    assert running.batch == pytest.approx(7 / 8)
    assert 7 / 8 <= running.throughput < 7 / 8 * 1.02  # fewer replicas reduce a little faster


def test_the_modes_of_the_batch():
    fleet = scenario().fleet
    shrink, strict = (fleet.running({5: 1}, mode=mode) for mode in (SHRINK, STRICT))
    assert shrink.batch < 1 and strict.batch == 1
    assert strict.step_s > shrink.step_s >= fleet.nominal_step_s * 0.99
    assert fleet.running({5: 1}, mode=FIXED).throughput == 0
    assert fleet.running({}, mode=FIXED).throughput == pytest.approx(1)


def test_packed_domains_degrade_fewer_replicas():
    apart, packed = scenario().fleet, scenario(packed=True).fleet
    lost = {0: 1, 9: 1}  # stage 0 of replica 0, stage 1 of replica 1
    assert apart.replicas(lost) == ({(1, 0): 1, (0, 1): 1}, 0)
    assert packed.replicas(lost) == ({(1, 1): 1}, 0)
    assert packed.running(lost, mode=SHRINK).throughput > apart.running(lost, mode=SHRINK).throughput


def test_below_the_minimum_width_a_replica_is_dropped():
    fleet = scenario(min_tp_width=7).fleet
    assert fleet.replicas({3: 2}) == ({}, 1)
    assert fleet.replicas({3: 1})[1] == 0


def test_power_boosts_degraded_replicas_only():
    fleet = scenario().fleet
    assert fleet.pace((1, 0), boosted=True).ns < fleet.pace((1, 0)).ns
    assert fleet.pace((0, 0), boosted=True) == fleet.pace((0, 0))
    machine = fleet.model.machine
    assert machine.boosted_speed == pytest.approx(1.3**0.3333)
    capped = dataclasses.replace(fleet.model, machine=dataclasses.replace(machine, boost=1.0))
    assert capped.stage_ns(0, 1, boosted=True) == capped.stage_ns(0, 1)
