"""Time in which a process was stopped does not count as waiting."""

import pytest

from ntp_plugin.membership.running_time import MOST_S, RunningTime


def test_a_pause_longer_than_a_wait_ever_makes_counts_as_a_short_one():
    now = [100.0]
    running = RunningTime(lambda: now[0])
    for now[0] in (100.25, 100.5, 160.5, 160.75):
        seconds = running.seconds()
    assert seconds == pytest.approx(0.5 + MOST_S + 0.25)


def test_the_running_time_can_be_reset():
    now = [0.0]
    running = RunningTime(lambda: now[0])
    now[0] = 0.25
    assert running.seconds() == 0.25
    running.begin_again()
    assert running.seconds() == 0.0
