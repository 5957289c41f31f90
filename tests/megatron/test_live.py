"""Ranks of a Megatron job die, and the job goes on as if it had not happened."""

import pytest

from benchmarks.numerics import BOUNDS
from benchmarks.parity.job import STEPS, largest_differences, run
from benchmarks.parity.layouts import BASE, MODELS, Job, uniform
from benchmarks.parity.live import live
from ntp_plugin.testing.faults import kill


def job(**options):
    return Job(**{"model": MODELS[BASE], "tp": 2, "dp": 2, "enabled": True, **options})


def assert_same_training(lived, reference):
    worst = largest_differences({slot: one.seen for slot, one in lived.items()}, reference)
    assert max(worst.values()) <= BOUNDS["float64"], worst


def assert_every_sample_once(rows, batch=6):
    """Of each step's last attempt: the samples that were drawn are the step's, each once."""
    for step in range(1, STEPS + 1):
        drawn = [row[2:] for row in rows if row[:2] == ["drawn", step]]
        newest = max(epoch for epoch, _ in drawn)
        samples = [sample for epoch, sample in drawn if epoch == newest]
        assert sorted(samples) == list(range((step - 1) * batch, step * batch)), step


def test_nobody_is_lost():
    lived, rows = live(job())
    assert len(lived) == 4
    assert_same_training(lived, run(uniform(BASE)))
    assert_every_sample_once(rows)


@pytest.mark.parametrize(
    "moment",
    ["step", "backward", "reduced", "vote", "apply", "applied", "between"],
)
def test_a_rank_dies(moment):
    lived, rows = live(job(), faults=[kill(3, during=moment, step=5)])
    assert {slot: one.width for slot, one in lived.items()} == {0: 2, 1: 2, 2: 1}
    assert_same_training(lived, run(uniform(BASE)))
    assert_every_sample_once(rows)
