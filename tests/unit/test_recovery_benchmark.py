"""How the benchmark of recoveries divides a trial into phases, and when a row holds."""

import random

import pytest

from benchmarks.recovery import PHASES, Case, by_phase, cases, faults, is_as_wanted


def row(fault, *, p50_s, p99_s):
    return {"fault": fault, "p50_s": p50_s, "p99_s": p99_s}


def test_phases_add_up_to_the_total_although_a_second_recovery_repeats_some():
    ended = [(10.0, "signal"), (11.0, "break out"), (13.0, "agree"), (14.0, "break out"), (18.0, "agree")]
    took = by_phase(9.0, reversed(ended))
    assert {phase: seconds for phase, seconds in took.items() if seconds} == {
        "signal": 1.0,
        "break out": 2.0,
        "agree": 6.0,
    }
    assert tuple(took) == PHASES


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (row("sigkill", p50_s=0.5, p99_s=1.0), True),
        (row("sigkill", p50_s=0.51, p99_s=0.6), False),
        (row("sigkill", p50_s=0.4, p99_s=1.01), False),
        (row("sigstop", p50_s=0.8, p99_s=3.0), True),
        (row("hang", p50_s=1.51, p99_s=1.6), False),
    ],
)
def test_every_kill_must_be_fast_and_half_of_the_faults_with_a_threshold(found, wanted):
    assert is_as_wanted(found) is wanted


def test_faults_of_a_job_hit_different_slots_one_after_the_other():
    for case in cases(""):
        for seed in range(50):
            first, second = faults(case, random.Random(seed))
            assert first.slot != second.slot
            assert first.after_step < second.after_step


def test_thirty_kills_at_eight_ranks():
    (kills,) = [case for case in cases("") if (case.fault, case.ranks) == ("sigkill", 8)]
    assert kills.jobs * kills.losses == 30
    assert all(case == Case(fault=case.fault, ranks=4, jobs=1, losses=1) for case in cases("ci"))
