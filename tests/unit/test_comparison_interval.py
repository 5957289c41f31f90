"""How often replicas are compared follows a budget, and is the same on all ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntp_plugin.recovery.comparison_interval import AT_LEAST_EVERY, CompareSchedule, Measured, steps_until_next

SECONDS = st.floats(1e-6, 1e3)
MEASURED = st.builds(Measured, digests_s=SECONDS, exchange_s=SECONDS | st.just(0.0), step_s=SECONDS | st.just(0.0))
BUDGETS = st.floats(0.0001, 1.0)


def measured(*, digests_s=0.0, exchange_s=0.0, step_s=1.0):
    return Measured(digests_s=digests_s, exchange_s=exchange_s, step_s=step_s)


@pytest.mark.parametrize(
    ("cost", "steps"), [(0.0001, 1), (0.005, 1), (0.0051, 2), (0.05, 10), (0.25, 50), (0.5, 100), (60.0, 100)]
)
def test_comparisons_take_no_more_than_half_a_percent_of_the_step_time_but_come_at_least_every_100_steps(cost, steps):
    assert steps_until_next([measured(digests_s=cost)], 0.005) == steps


@given(st.lists(MEASURED, min_size=1, max_size=5), BUDGETS)
def test_the_budget_holds_unless_the_bound_on_the_interval_does(all_measured, budget):
    steps = steps_until_next(all_measured, budget)
    assert 1 <= steps <= AT_LEAST_EVERY
    known = [one.step_s for one in all_measured if one.step_s]
    cost = max(one.digests_s for one in all_measured) + min(one.exchange_s for one in all_measured)
    assert not known or steps == AT_LEAST_EVERY or cost / steps <= budget * min(known) * (1 + 1e-9)


def test_the_wait_for_the_slowest_rank_is_no_cost_of_the_comparison():
    waits = [measured(digests_s=0.01, exchange_s=3.0), measured(digests_s=0.01, exchange_s=0.001)]
    assert steps_until_next(waits, 0.005) == 3


@given(st.lists(st.tuples(st.integers(1, 30), st.booleans(), st.lists(MEASURED, min_size=2, max_size=2))), BUDGETS)
def test_ranks_compare_after_the_same_steps_whatever_a_loss_kept_one_of_them_from_hearing(parts, budget):
    """In each epoch one rank may miss the result of a comparison; a joining rank knows nothing before it joins."""
    heard = missed = CompareSchedule(every=None)
    step = 0
    for epoch, (steps, is_missed, both) in enumerate(parts):
        joined = CompareSchedule(every=None)
        for _ in range(steps):
            schedules = [one.seen(step, epoch) for one in (heard, missed, joined)]
            due = {one.is_due(step) for one in schedules}
            assert len(due) == 1
            if due == {True}:
                schedules = [one.compared(step, both, budget) for one in schedules]
            heard, missed, joined = schedules
            step += 1
        last = heard.seen(step, epoch).compared(step, both, budget) if is_missed else heard
        heard, missed = last, heard


def test_the_first_comparison_is_after_the_first_step_and_after_the_first_of_each_epoch():
    schedule = CompareSchedule(every=None).seen(0, 0)
    assert not schedule.is_due(0) and schedule.is_due(1)
    schedule = schedule.compared(1, [measured(digests_s=0.1)], 0.005).seen(2, 0)
    assert not schedule.is_due(20) and schedule.is_due(21)
    schedule = schedule.seen(7, 1)
    assert not schedule.is_due(7) and schedule.is_due(8)


def test_the_user_may_set_the_interval_or_switch_comparisons_off():
    schedule = CompareSchedule(every=3).seen(0, 0)
    assert [step for step in range(1, 10) if schedule.is_due(step)] == [1, 3, 6, 9]
    schedule = schedule.compared(1, [measured()], 0.005).seen(4, 1)
    assert [step for step in range(4, 10) if schedule.is_due(step)] == [5, 6, 9]
    assert not any(CompareSchedule(every=0).seen(0, 0).is_due(step) for step in range(200))
