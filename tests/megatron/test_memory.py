"""The memory model against the bytes of real tensors, rank by rank, on real Megatron."""

import pytest

from tests.harness.parity.job import run
from tests.harness.parity.layouts import BASE, OLD, OPTIONS, degraded

WITHIN = 0.05


def differences(layout, feature=BASE, more=""):
    """The plan for the fullest slot of each group, relative to the bytes of its fullest rank, less 1."""
    outcomes = list(run(degraded(feature, layout, more=more, dtype="float32")).values())
    found = {}
    for replica in {seen.replica for seen in outcomes}:
        group = [seen for seen in outcomes if seen.replica == replica]
        for what in ("weights", "gradients", "optimizer"):
            counted = max(seen.counted[what] for seen in group)
            assert counted
            found[replica, what] = group[0].planned[what] / counted - 1
    return found


@pytest.mark.parametrize(
    ("layout", "feature", "more"),
    [
        pytest.param("TP2+TP1", BASE, "", marks=pytest.mark.short),
        ("TP4+TP3", OLD, ""),
        ("TP3+TP3", BASE, OPTIONS["distributed optimizer"]),
    ],
)
def test_bytes_are_within_five_per_cent_of_those_counted(layout, feature, more):
    found = differences(layout, feature, more)
    assert max(abs(part) for part in found.values()) <= WITHIN, found
