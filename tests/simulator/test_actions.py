"""The chooser: the content of each row, and the chosen one."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntp_plugin.errors import ConfigError, Refused
from ntp_plugin.planning.actions import (
    ACTIONS,
    DROP_REPLICA,
    EQUAL,
    REDUCE_TP,
    RESTART,
    SWAP_SPARE,
    WAIT_FOR_SPARE,
    ActionPolicy,
    Forecast,
    Situation,
    choose,
    efficiency,
    horizon_s,
)
from ntp_plugin.planning.topology import Slot, Topology

TOPOLOGY = Topology(tp=8, pp=2, dp=4, gpus_per_node=8, nodes_per_rack=4, racks_per_power_row=8)
LOST = frozenset({Slot(replica=1, stage=0, tp=3)})
DAY_S = 86_400.0
FORECASTS = {
    REDUCE_TP: Forecast(step_s=1.0, batch=0.97, transition_s=1.0),
    DROP_REPLICA: Forecast(step_s=1.0, batch=0.75, transition_s=0.5),
    SWAP_SPARE: Forecast(step_s=1.0, transition_s=60.0),
    WAIT_FOR_SPARE: Forecast(step_s=1.0, transition_s=60.0),
    RESTART: Forecast(step_s=1.0, batch=0.75, transition_s=1200.0),
}


def situation(**changed):
    facts = {
        "topology": TOPOLOGY,
        "lost": LOST,
        "nominal_step_s": 1.0,
        "forecasts": FORECASTS,
        "spare_s": None,
        "repair_s": 5 * DAY_S,
        "failures_per_gpu_s": 1e-9,
    }
    return Situation(**(facts | changed))


def row(choice, action):
    return next(row for row in choice.table if row.action == action)


def test_the_score_is_throughput_over_the_rest_of_the_horizon():
    choice = choose(situation(), ActionPolicy())
    assert choice.action == REDUCE_TP
    assert choice.horizon_s == 5 * DAY_S
    assert row(choice, REDUCE_TP).score == pytest.approx(0.97 * (5 * DAY_S - 1) / (5 * DAY_S))
    assert row(choice, RESTART).score == pytest.approx(0.75 * (5 * DAY_S - 1200) / (5 * DAY_S))
    assert [found.action for found in choice.table] == list(ACTIONS)


def test_the_horizon_ends_with_the_next_failure_of_the_replicas_concerned():
    often = situation(failures_per_gpu_s=1 / (16 * 1000.0))
    assert horizon_s(often) == pytest.approx(1000)
    two = dataclasses.replace(often, lost=LOST | {Slot(replica=2, stage=1, tp=0)})
    assert horizon_s(two) == pytest.approx(500)
    assert math.isinf(horizon_s(situation(repair_s=math.inf, failures_per_gpu_s=0.0)))


def test_a_spare_pays_off_if_it_saves_more_than_the_pause():
    ready = situation(spare_s=0.0)
    assert choose(ready, ActionPolicy()).action == SWAP_SPARE  # 3 % of five days are hours
    assert choose(dataclasses.replace(ready, repair_s=1000.0), ActionPolicy()).action == REDUCE_TP  # 3 % of 1000 s


def test_no_action_waits_for_a_spare_that_can_be_swapped_in_later():
    comes = situation(spare_s=600.0)
    choice = choose(comes, ActionPolicy())
    assert choice.action == REDUCE_TP
    assert "until a spare is swapped in after 600 s" in row(choice, REDUCE_TP).reason
    assert row(choice, WAIT_FOR_SPARE).score < row(choice, REDUCE_TP).score
    no_other = ActionPolicy(forbid=(REDUCE_TP, DROP_REPLICA))
    assert choose(comes, no_other).action == WAIT_FOR_SPARE
    impatient = dataclasses.replace(no_other, max_wait_s=599.0)
    assert choose(comes, impatient).action == RESTART
    assert "max_wait is 599 s" in row(choose(comes, impatient), WAIT_FOR_SPARE).reason


def test_an_action_that_does_not_fit_is_rejected_with_its_reason():
    forecasts = FORECASTS | {REDUCE_TP: dataclasses.replace(FORECASTS[REDUCE_TP], too_large="81 GB of 80")}
    choice = choose(situation(forecasts=forecasts), ActionPolicy())
    assert choice.action == DROP_REPLICA
    assert row(choice, REDUCE_TP).reason == "81 GB of 80"
    assert row(choice, REDUCE_TP).score is None


def test_a_group_below_the_minimum_is_not_reduced():
    choice = choose(situation(), ActionPolicy(min_tp_width=8))
    assert (choice.action, row(choice, REDUCE_TP).reason) == (DROP_REPLICA, "narrower than min_tp_width = 8")


def test_the_last_replica_is_not_dropped():
    alone = dataclasses.replace(TOPOLOGY, dp=1)
    lost = frozenset({Slot(replica=0, stage=0, tp=0)})
    choice = choose(situation(topology=alone, lost=lost), ActionPolicy(forbid=(REDUCE_TP,)))
    assert choice.action == RESTART
    assert row(choice, DROP_REPLICA).reason == "no replica would be left"


def test_hysteresis_keeps_the_present_action():
    ready = situation(spare_s=0.0)
    assert choose(ready, ActionPolicy(hysteresis=0.05), current=REDUCE_TP).action == REDUCE_TP
    assert choose(ready, ActionPolicy(hysteresis=0.01), current=REDUCE_TP).action == SWAP_SPARE


def test_a_sample_of_a_smaller_batch_is_worth_more_if_the_batch_may_change():
    policy = ActionPolicy(batch=1000.0, noise_scale=1000.0)
    assert efficiency(0.5, policy) == pytest.approx(2000 / 1500)
    assert efficiency(0.5, ActionPolicy()) == 1
    half = situation(forecasts=FORECASTS | {DROP_REPLICA: Forecast(step_s=0.6, batch=0.5, transition_s=0.5)})
    assert choose(half, ActionPolicy()).action == REDUCE_TP
    assert choose(half, policy).action == DROP_REPLICA  # 0.83 x 1.33 is more than 0.97 x 1.02


def test_without_a_possible_action_every_reason_is_reported():
    with pytest.raises(Refused, match=r"loss of 1 slots \(reduce tp: forbidden; .*wait for a spare: no spare comes"):
        choose(situation(), ActionPolicy(forbid=(REDUCE_TP, DROP_REPLICA, RESTART)))


def test_keys_without_effect_are_refused():
    with pytest.raises(ConfigError, match="'reduce' is no action"):
        ActionPolicy(forbid=("reduce",))
    with pytest.raises(ConfigError, match="or neither"):
        ActionPolicy(noise_scale=10.0)


@given(
    st.dictionaries(
        st.sampled_from(ACTIONS),
        st.builds(Forecast, step_s=st.floats(0.5, 10), transition_s=st.floats(0, 1e4), batch=st.floats(0.01, 1)),
        min_size=1,
    ),
    st.sampled_from([None, 0.0, 100.0]),
    st.floats(1, 1e6),
)
def test_the_choice_has_the_best_score_of_the_table(forecasts, spare_s, repair_s):
    asked = situation(forecasts=forecasts, spare_s=spare_s, repair_s=repair_s)
    try:
        choice = choose(asked, ActionPolicy())
    except Refused:
        possible = set(forecasts) - ({SWAP_SPARE} if spare_s != 0 else set())
        assert possible - ({WAIT_FOR_SPARE} if spare_s is None else set()) == set()
        return
    scores = {found.action: found.score for found in choice.table if found.score is not None}
    assert scores[choice.action] >= max(scores.values()) * (1 - EQUAL)
    assert all(0 <= score <= 40 for score in scores.values())
