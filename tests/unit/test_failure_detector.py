import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntp_plugin.membership.failure_detector import (
    Pulse,
    Standstill,
    Thresholds,
    after_heartbeat,
    after_stop_query,
    cut_off,
    find_lost,
    hung,
    is_stop_query_due,
    judge,
    left_over,
    standstill,
)

LIMITS = Thresholds()


def heartbeats(at, *, waiting=False, moved_at=None, **more):
    times = {"moved_at": at if moved_at is None else moved_at, "polled_at": at if waiting else None}
    return Pulse(started_at=0.0, heartbeat_at=at, **times | more)


def verdicts(pulses, limits, *, now):
    """The failures that the supervisor of a job on one host finds."""
    return find_lost(pulses, limits, now=now) or judge({0: standstill(pulses, limits)}, {0: pulses}, limits)


def kinds(pulses, now):
    return {verdict.slot: verdict.kind for verdict in verdicts(pulses, LIMITS, now=now)}


def test_an_ended_process_is_lost_at_once_unless_the_job_is_over():
    pulses = {0: heartbeats(10.0), 1: heartbeats(10.0, ended=-9), 2: heartbeats(10.0, ended=0)}
    assert kinds(pulses, now=10.0) == {1: "ended", 2: "ended"}
    assert kinds({0: heartbeats(10.0, ended=0, over=True)}, now=10.0) == {}


@pytest.mark.parametrize(
    ("silence", "stopped", "kind"),
    [(0.29, True, None), (0.31, True, "frozen"), (4.9, False, None), (5.1, False, "silent")],
)
def test_silence_means_frozen_only_in_a_stopped_process(silence, stopped, kind):
    now, pulse = 10.0 + silence, after_heartbeat(heartbeats(10.0), now=10.0, moved_at=10.0)
    for asked_at in (10.0, now):
        pulse = after_stop_query(pulse, LIMITS, now=asked_at, stopped=stopped)
    found = kinds({0: pulse, 1: heartbeats(now)}, now=now)
    assert found == ({0: kind} if kind else {})


@pytest.mark.parametrize(("stopped_for", "verdict"), [(0.24, None), (0.36, "frozen")])
@pytest.mark.parametrize("begins", [0.0, 0.01, 0.049])
def test_a_stopped_process_is_frozen_by_its_stopped_time_only(stopped_for, verdict, begins):
    """It was polled every 0.05 s at least, observed every 0.005 s, and its heartbeat is older than a stop may last."""
    pulse, found = after_heartbeat(Pulse(started_at=0.0), now=9.0, moved_at=9.0), None
    for look in range(300):
        now = 9.0 + 0.005 * look
        if is_stop_query_due(pulse, LIMITS, now=now):
            pulse = after_stop_query(pulse, LIMITS, now=now, stopped=10.0 + begins <= now < 10.0 + begins + stopped_for)
        found = found or kinds({0: pulse, 1: heartbeats(now)}, now=now).get(0)
    assert found == verdict


def test_a_late_poll_does_not_count_as_stopped_time():
    late = after_stop_query(after_heartbeat(heartbeats(10.0), now=10.0, moved_at=10.0), LIMITS, now=11.0, stopped=True)
    assert kinds({0: late, 1: heartbeats(11.0)}, now=11.0) == {}
    still = after_stop_query(late, LIMITS, now=11.26, stopped=True)
    assert kinds({0: still, 1: heartbeats(11.26)}, now=11.26) == {0: "frozen"}


def test_an_ended_process_is_not_polled():
    assert is_stop_query_due(heartbeats(10.0), LIMITS, now=10.0)
    assert not is_stop_query_due(heartbeats(10.0, ended=-9), LIMITS, now=10.0)


@pytest.mark.parametrize(
    ("given", "heartbeat_interval_s"),
    [({}, 0.25), ({"hung_s": 1.0}, 0.1), ({"silent_s": 0.8}, 0.2), ({"heartbeat_s": 0.05}, 0.05)],
)
def test_the_heartbeat_interval_fits_every_limit(given, heartbeat_interval_s):
    assert Thresholds(**given).heartbeat_interval_s == pytest.approx(heartbeat_interval_s)


@pytest.mark.parametrize(("silence", "kind"), [(29.0, None), (31.0, "silent")])
def test_an_announced_end_has_the_time_limit_of_a_hang(silence, kind):
    found = kinds({0: heartbeats(10.0, leaving=True), 1: heartbeats(10.0 + silence)}, now=10.0 + silence)
    assert found == ({0: kind} if kind else {})


def test_a_stopped_process_with_heartbeats_is_not_lost():
    stopped = after_stop_query(
        after_stop_query(heartbeats(10.0), LIMITS, now=10.0, stopped=True), LIMITS, now=10.5, stopped=True
    )
    assert kinds({0: stopped}, now=10.5) == {0: "frozen"}
    assert kinds({0: after_heartbeat(stopped, now=10.6, moved_at=10.0)}, now=10.6) == {}


def test_the_rank_that_all_others_wait_for_is_hung():
    pulses = {slot: heartbeats(100.0, waiting=slot != 2, moved_at=60.0) for slot in range(4)}
    found = verdicts(pulses, LIMITS, now=100.0)
    assert [(verdict.slot, verdict.kind) for verdict in found] == [(2, "hung")]
    assert found[0].reason == "it has neither moved nor polled for 40.0 s while 3 others wait (limit 30.0 s)"


@pytest.mark.parametrize(
    ("polled", "expected"),
    [(99.0, False), (92.6, False), (92.4, None), (70.1, None), (69.9, True)],
)
def test_a_wait_that_stopped_polling_does_not_count_as_a_wait(polled, expected):
    """All report that they wait; the loop of one has stopped. None: no rank is blamed, and no deadlock reported."""
    pulses = {slot: heartbeats(100.0, waiting=True, moved_at=60.0) for slot in range(4)}
    pulses[2] = heartbeats(100.0, moved_at=60.0, polled_at=polled)
    still = standstill(pulses, LIMITS)
    if expected is None:
        assert still is None
    else:
        assert kinds(pulses, now=100.0) == ({2: "hung"} if expected else {})
        assert hung({0: still}) == (0 if expected else 4)


@pytest.mark.parametrize(
    ("since", "kind"), [(590.0, None), (610.0, "hung")], ids=["a long checkpoint", "longer than that"]
)
def test_the_last_unfinished_rank_has_time_for_a_checkpoint(since, kind):
    now = 1000.0 + since
    pulses = {slot: heartbeats(now, waiting=True, moved_at=1000.0, done=True) for slot in range(3)}
    pulses[1] = heartbeats(now, moved_at=1000.0)
    assert kinds(pulses, now=now) == ({1: kind} if kind else {})
    pulses[2] = heartbeats(now, waiting=True, moved_at=1000.0)
    assert kinds(pulses, now=now) == {1: "hung"}, "a rank waits for it in a collective"


def test_a_rank_that_waits_for_the_end_while_others_wait_for_it_is_hung():
    pulses = {slot: heartbeats(100.0, waiting=True, moved_at=60.0, done=slot == 2) for slot in range(4)}
    found = verdicts(pulses, LIMITS, now=100.0)
    assert [(verdict.slot, verdict.kind) for verdict in found] == [(2, "hung")]
    assert found[0].reason == "it has waited for the end for 40.0 s while 3 others wait in collectives (limit 30.0 s)"


def test_a_deadlock_of_the_job_has_no_culprit():
    pulses = {slot: heartbeats(100.0, waiting=True, moved_at=60.0) for slot in range(4)}
    assert kinds(pulses, now=100.0) == {}
    assert hung({0: standstill(pulses, LIMITS)}) == 4


def test_a_long_computation_of_all_is_no_hang():
    assert kinds({slot: heartbeats(100.0, waiting=False, moved_at=60.0) for slot in range(4)}, now=100.0) == {}


def test_no_rank_is_hung_while_one_makes_progress():
    pulses = {slot: heartbeats(100.0, waiting=slot != 2, moved_at=60.0) for slot in range(4)}
    pulses[3] = heartbeats(100.0, waiting=True, moved_at=99.0)
    assert kinds(pulses, now=100.0) == {}


def test_a_rank_with_a_late_heartbeat_may_have_made_progress():
    """Slot 3 has sent no heartbeat for a while, so its state is not known."""
    pulses = {slot: heartbeats(100.0, waiting=slot != 2, moved_at=60.0) for slot in range(4)}
    pulses[3] = heartbeats(89.0, waiting=True, moved_at=60.0)
    assert judge({0: standstill(pulses, LIMITS)}, {0: pulses}, LIMITS) == []
    pulses[3] = heartbeats(90.5, waiting=True, moved_at=60.0)
    assert [verdict.slot for verdict in judge({0: standstill(pulses, LIMITS)}, {0: pulses}, LIMITS)] == [2]


def test_ranks_that_wait_for_a_dead_one_are_not_hung():
    pulses = {0: heartbeats(100.0, waiting=True, moved_at=60.0), 1: heartbeats(60.0, moved_at=60.0)}
    assert kinds(pulses, now=100.0) == {1: "silent"}


def test_a_rank_without_a_heartbeat_is_starting():
    assert kinds({0: Pulse(started_at=0.0)}, now=599.0) == {}
    assert kinds({0: Pulse(started_at=0.0)}, now=601.0) == {0: "silent"}


@given(st.lists(st.tuples(st.floats(0.001, 0.25), st.booleans(), st.booleans()), min_size=1, max_size=60))
def test_a_rank_with_timely_heartbeats_is_never_lost(beats):
    """Whatever it does in between, and whatever the system says of its process."""
    now, pulse = 0.0, Pulse(started_at=0.0)
    for pause, moves, stopped in beats:
        now += pause
        found = verdicts({0: pulse, 1: heartbeats(now)}, LIMITS, now=now)
        assert not found
        pulse = after_heartbeat(pulse, now=now, moved_at=now if moves else pulse.moved_at or 0.0)
        pulse = after_stop_query(pulse, LIMITS, now=now, stopped=stopped)


def test_a_rank_hung_in_its_wait_for_the_end_is_not_working():
    """A rank that writes a model alone gets `end_s`; this one has nothing left to write."""
    now = 1000.0
    done = Pulse(started_at=0.0, heartbeat_at=now, moved_at=300.0, polled_at=now, done=True)
    for other, found in (
        (dataclasses.replace(done, polled_at=now - LIMITS.hung_s - 1), [2]),
        (dataclasses.replace(done, polled_at=None, done=False), [2]),
        (dataclasses.replace(done, moved_at=now - LIMITS.hung_s - 1, polled_at=None, done=False), []),
    ):
        still = standstill({0: done, 1: done, 2: other}, LIMITS)
        assert [verdict.slot for verdict in judge({0: still}, {0: range(3)}, LIMITS)] == found


# ---------------------------------------------------------------- several hosts


STILL = Standstill(waiting=4, idle={})
SLOTS = {host: range(4 * host, 4 * host + 4) for host in range(4)}


@pytest.mark.parametrize(
    "another",
    [None, Standstill(waiting=3, idle={5: 31.0}), dataclasses.replace(STILL, unreachable=(0,))],
    ids=["somebody moves", "somebody is hung", "a link is cut"],
)
def test_all_ranks_are_hung_when_all_wait_and_none_needs_to(another):
    assert hung({0: STILL, 1: STILL}) == 8
    assert hung({0: STILL, 1: another}) == 0


def test_a_hang_takes_the_word_of_every_host():
    idle = Standstill(waiting=3, idle={5: 31.0})
    assert [verdict.slot for verdict in judge({0: STILL, 1: idle, 2: STILL}, SLOTS, LIMITS)] == [5]
    assert judge({0: STILL, 1: idle, 2: None}, SLOTS, LIMITS) == []
    assert judge({0: STILL, 1: STILL, 2: STILL}, SLOTS, LIMITS) == []


def test_a_host_with_one_hung_rank_is_detected_by_the_others_reports():
    assert [verdict.slot for verdict in judge({0: STILL, 1: Standstill(waiting=0, idle={4: 31.0})}, SLOTS, LIMITS)] == [
        4
    ]


def test_the_minority_side_of_a_network_split_is_evicted():
    heartbeats_of = {0: dataclasses.replace(STILL, unreachable=(1, 2, 3)), 1: STILL, 2: STILL, 3: STILL}
    found = judge(heartbeats_of, SLOTS, LIMITS)
    assert [(verdict.slot, verdict.kind) for verdict in found] == [(slot, "cut off") for slot in range(4)]


@given(st.integers(1, 12), st.data())
def test_survivors_reach_each_other_and_are_the_majority(hosts, data):
    part = data.draw(st.sets(st.integers(0, hosts - 1)))
    rest = set(range(hosts)) - part
    unreachable = {host: sorted(rest if host in part else part) for host in range(hosts)}
    stay = set(range(hosts)) - set(cut_off(unreachable))
    assert stay in (part, rest) or not part or not rest
    assert len(stay) == max(len(part), len(rest))


@given(st.integers(2, 8), st.data())
def test_survivors_of_any_network_failure_reach_each_other(hosts, data):
    pairs = [(a, b) for a in range(hosts) for b in range(a)]
    broken = data.draw(st.lists(st.sampled_from(pairs), unique=True))
    unreachable = {host: [b for a, b in broken if a == host] for host in range(hosts)}
    stay = set(range(hosts)) - set(cut_off(unreachable))
    assert stay
    assert not [pair for pair in broken if set(pair) <= stay]


@pytest.mark.parametrize("over_for", [4.9, 5.1])
@pytest.mark.parametrize(("stopped_for", "kind"), [(4.9, None), (5.1, "frozen")])
def test_after_the_job_unjoined_or_stopped_processes_get_a_short_wait(stopped_for, kind, over_for):
    stopped = heartbeats(10.0, ran_at=10.0, asked_at=10.0 + stopped_for, stopped=True)
    pulses = {
        0: heartbeats(10.0),
        1: Pulse(started_at=9.0),
        2: stopped,
        3: heartbeats(9.0, ended=0),
        4: heartbeats(10.0),
    }
    found = left_over(pulses, {0, 2, 3}, LIMITS, over_for=over_for)
    not_needed = {1: "not needed", 4: "not needed"} if over_for > 5.0 else {}
    assert {verdict.slot: verdict.kind for verdict in found} == not_needed | ({2: kind} if kind else {})


@pytest.mark.parametrize(("joining", "found"), [(True, {0: "frozen"}), (False, {})])
def test_a_joining_rank_stopped_before_its_first_heartbeat_is_frozen(joining, found):
    stopped = Pulse(started_at=0.0, joining=joining, ran_at=10.0, asked_at=10.31, stopped=True)
    assert kinds({0: stopped, 1: heartbeats(10.31)}, now=10.31) == found
