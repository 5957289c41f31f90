"""Jobs with experts and context groups in the simulator: step times by hand, who is dropped, and what policies do."""

from pathlib import Path

import pytest

from ntp_plugin.cli.main import main
from ntp_plugin.errors import ConfigError, Refused
from ntp_plugin.planning.topology import SurvivingReplicas, parse_slots
from ntp_plugin.simulator.failures import DAY_S, DomainFailure
from ntp_plugin.simulator.fleet import FIXED, SHRINK, STRICT
from ntp_plugin.simulator.policies import policy_of
from ntp_plugin.simulator.snapshot import losses
from ntp_plugin.simulator.timeline import follow
from tests.simulator.scenarios import scenario

RECIPE = Path(__file__).parents[2] / "recipes/simulate/deepseek-v3.toml"
HIDDEN, MOE_FFN, SEQ = 4096, 2048, 4096
EXPERT = 2 * HIDDEN * MOE_FFN
EXPERTS = {
    "parallel": {"tp": 1, "pp": 2, "dp": 16, "ep": 8},
    "model": {"layers": 16, "experts": 32, "moe_router_topk": 4, "moe_ffn": MOE_FFN},
    "batch": {"global_batch": 512},
}


def fault(start, end, domain=0):
    days = (end - start) * DAY_S
    return DomainFailure(start_s=start * DAY_S, end_s=end * DAY_S, domain=domain, gpus=range(1), expected_s=days)


def course(name, faults, **changed):
    asked = scenario(**EXPERTS | changed)
    return follow(asked.setting(tuple(faults)), policy_of(name), faults)


def test_a_layer_of_experts_computes_for_its_tokens_and_exchanges_them():
    """Products of attention, four experts and four exchanges of a layer; eight ranks are one domain."""
    model = scenario(**EXPERTS).fleet.model
    products = 8 * (2 * 4 * HIDDEN * HIDDEN + 2 * SEQ * HIDDEN) + 8 * 2 * 4 * EXPERT
    exchange = SEQ * 4 * HIDDEN * 2 * 7 / 8 / (model.machine.domain_gb_per_s * 1e9) + model.machine.domain_us * 1e-6
    expected = 3 * products * SEQ / (989e12 * 0.6) + 4 * 8 * exchange
    assert model.stage_ns(0, 0) / 1e9 == pytest.approx(expected, rel=1e-6)


def test_an_expert_group_wider_than_a_domain_exchanges_over_the_nic():
    wide = EXPERTS | {"parallel": EXPERTS["parallel"] | {"ep": 16}}
    inside, over_nic = (scenario(**options).fleet.model for options in (EXPERTS, wide))
    assert over_nic.stage_ns(0, 0) > inside.stage_ns(0, 0) * 1.2


def test_experts_without_shared_ones_have_no_collectives_of_an_mlp():
    options = EXPERTS | {"parallel": {"tp": 4, "pp": 2, "dp": 8, "ep": 8, "etp": 1}}
    plain = scenario(**options).fleet.model
    shared = scenario(**options | {"model": options["model"] | {"moe_shared_expert_ffn": 1024}}).fleet.model
    assert (plain._collectives(0), shared._collectives(0)) == (8 * 4, 8 * 8)


def test_a_reduced_group_is_as_fast_as_its_fullest_slot():
    """Seven of eight slots have 32 experts, so one has five, and the tokens of seven: 5/4 x 7/8."""
    fleet = scenario(**EXPERTS).fleet
    left = fleet._in_step((3,))
    assert (left.replicas, left.load.expert_tokens, left.load.lost_places) == (7, 35 / 32, (3,))
    ((pace, contexts),) = left.paces.items()
    assert contexts == 7
    assert pace.ns == max(fleet.model.stage_ns(stage, 0, load=left.load) for stage in (0, 1))
    assert 1.03 < pace.ns / fleet.pace((0, 0)).ns < 35 / 32


def test_a_dropped_replica_slows_its_expert_group_and_no_other():
    fleet = scenario(**EXPERTS).fleet
    left = fleet._living({}, [3, 19], boosted=False, whole_groups=False)  # both stages of replica 3
    assert sorted(left.paces.values()) == [7, 8]
    assert left.load.expert_groups == 2
    capacity = fleet._in_step((3,)).paces
    within = next(iter(capacity)).most_within(fleet.nominal_ns, 2)
    assert within < 32
    shrunk = fleet.running({}, [3], mode=SHRINK)
    assert shrunk.batch == pytest.approx((8 * 32 + 7 * within) / 512)
    assert fleet.running({3: 1}, mode=SHRINK) == shrunk, "whether or not it could go on"
    assert fleet.running({}, [3], mode=STRICT).batch == 1
    assert fleet.running({}, [3], mode=FIXED).throughput == 0


def test_the_simulator_and_the_plan_agree_about_who_goes_on():
    asked = scenario(**EXPERTS)
    lost = parse_slots(["r3.s1", "r12.s0"], asked.topology)
    surviving = SurvivingReplicas(topology=asked.topology, lost=lost, min_tp_width=1)
    left = asked.fleet._living({16 + 3: 1, 12: 1}, [], boosted=False, whole_groups=False)
    assert left.replicas == len(surviving.replicas)
    assert sum(left.paces.values()) == 14


def test_without_dealing_all_of_an_expert_group_stops():
    fleet = scenario(**EXPERTS).fleet
    assert fleet.running({}, [3], mode=SHRINK, whole_groups=True).batch == pytest.approx(1 / 2)
    assert fleet.running({}, [3, 12], mode=SHRINK, whole_groups=True).throughput == 0
    dealt, dropped = course("dp-drop", [fault(5, 10)]), course("group-drop", [fault(5, 10)])
    assert dealt.least > 0.8
    assert dropped.least < 0.6
    assert dealt.goodput > dropped.goodput


def test_a_dense_group_is_one_replica():
    fleet = scenario().fleet
    assert fleet.running({}, [5], mode=SHRINK, whole_groups=True) == fleet.running({}, [5], mode=SHRINK)


def test_context_groups_go_on_with_as_many_as_divide():
    """Four share a sequence; with one lost two go on, and take twice as long for a micro-batch."""
    options = {"parallel": {"tp": 2, "pp": 2, "dp": 4, "cp": 4}, "batch": {"global_batch": 64}}
    fleet = scenario(**options).fleet
    assert (fleet.dp, fleet.total, fleet.together) == (16, 64, 4)
    left = fleet._in_step((1,))
    assert (left.replicas, left.load.tokens) == (2, 2)
    ((pace, contexts),) = left.paces.items()
    assert contexts == 1
    assert pace.ns == pytest.approx(2 * fleet.pace((0, 0)).ns, rel=0.05)
    lowest = fleet.running({1: 1}, mode=SHRINK)
    assert lowest.batch == pytest.approx((3 * 16 + pace.most_within(fleet.nominal_ns, 2)) / 64)


def test_an_expert_group_within_a_replica_is_lost_with_it():
    fleet = scenario(**EXPERTS | {"parallel": {"tp": 8, "pp": 2, "dp": 4, "ep": 4, "etp": 1}}).fleet
    assert fleet.together == 1
    left = fleet._living({1: 1}, [], boosted=False, whole_groups=False)
    assert (left.replicas, left.load.expert_groups, left.load.lost_places) == (3, 6, ())
    assert fleet._load_of_whole(4).expert_groups == 8


def test_the_tail_reduces_experts_over_their_groups_and_all_else_over_replicas():
    model = scenario(**EXPERTS, state={"distributed_optimizer": True}).fleet.model
    own = 8 * (4 * HIDDEN * HIDDEN + 2 * HIDDEN + 32 * HIDDEN) + 32000 * HIDDEN + HIDDEN
    experts, machine = 8 * 4 * EXPERT, model.machine
    load = scenario(**EXPERTS).fleet._load_of_whole(16)
    sent = 2 * 15 / 16 * own * 4 + 2 * 1 / 2 * experts * 4
    touched = (own / 16 + experts / 2) * (4 + 24 + 2)
    expected = 0.1 * sent / (machine.nic_gb_per_s * 1e9) + touched / (machine.memory_gb_per_s * 1e9)
    assert model.tail_ns(0, 16, load) / 1e9 == pytest.approx(expected, rel=1e-3)


def test_a_slot_receives_the_experts_that_it_is_dealt():
    fleet = scenario(**EXPERTS).fleet
    assert fleet.moved_s(1) == pytest.approx(8 * EXPERT * (2 + 12) / (fleet.model.machine.nic_gb_per_s * 1e9))
    done = course("dp-drop", [fault(5, 10)])
    assert done.paused_s == pytest.approx(2 * (5 + fleet.nominal_step_s / 2 + fleet.moved_s(1)))


def test_a_packed_fleet_drops_replicas_of_one_group():
    apart, packed = (scenario(**EXPERTS, packed=packed).fleet for packed in (False, True))
    lost = {0: 1, 9: 1}  # one replica of each expert group
    assert sorted(apart._living(lost, [], boosted=False, whole_groups=False).paces.values()) == [14]
    assert sorted(packed._living(lost, [], boosted=False, whole_groups=False).paces.values()) == [7, 8]


@pytest.mark.parametrize("name", ["ntp", "ntp-pw"])
def test_a_policy_that_narrows_drops_the_replica(name):
    narrow, drop = course(name, [fault(5, 10)]), course("dp-drop", [fault(5, 10)])
    assert narrow.actions == drop.actions == {"drop replica": 1}
    assert narrow.goodput == drop.goodput


def test_the_chooser_never_narrows_and_is_no_worse_than_dropping():
    faults = [fault(1, 6), fault(3, 9, domain=1), fault(5, 15, domain=2)]
    chosen = course("chooser", faults, hot=1)
    assert "reduce tp" not in chosen.actions
    assert chosen.goodput >= course("dp-drop+hot", faults, hot=1).goodput - 1e-5


def test_a_snapshot_of_lost_gpus():
    fleet = scenario(**EXPERTS).fleet
    options = {"mode": SHRINK, "failed": [1 / 32], "draws": 20, "seed": 1, "blast": 1}
    rows, _ = losses(fleet, [policy_of("dp-drop"), policy_of("group-drop")], **options)
    dealt, dropped = (row.mean for row in rows)
    assert dealt < 0.2
    assert dropped > 0.45


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"even": True}, ConfigError, "even is for replicas that go on narrower"),
        ({"spares_needed": True, "packed": True}, ConfigError, "spares_needed is for replicas that go on narrower"),
        ({"parallel": {"tp": 1, "dp": 8, "ep": 5}}, ConfigError, "experts = 32 is not a multiple of ep = 5"),
        ({"parallel": {"tp": 1, "dp": 6, "ep": 4}}, Refused, "the 6 ranks of a stage do not make expert groups of 4"),
    ],
)
def test_what_does_not_go_together_is_one_clear_line(changed, error, message):
    with pytest.raises(error, match=message):
        _ = scenario(**EXPERTS | changed).fleet


def test_the_recipe_says_what_it_shows(capsys):
    assert main(["simulate", str(RECIPE)]) == 0
    out = capsys.readouterr().out
    for part in ("expert groups of 64", "23.779%", "86.743%", "92.507%", "tokens are spread evenly"):
        assert part in out
