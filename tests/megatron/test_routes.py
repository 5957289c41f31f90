"""Gradients by way of core slots, on Megatron, train as one uniform run, and as by the lanes of owner tuples."""

import dataclasses

import pytest

from benchmarks.numerics import BOUNDS
from ntp_plugin.errors import StateLost
from tests.harness.parity.job import STEPS, largest_differences, replica_digests, run
from tests.harness.parity.layouts import BASE, OLD, OPTIONS, degraded, uniform

FLOAT64 = BOUNDS["float64"]
FOUR = ["TP4+TP3", "TP4+TP2", "TP3+TP3", "TP4+TP4+TP3"]


def routed(layout, route="via_core", model=BASE, **settings):
    return run(degraded(model, layout, route=route, **settings))


def assert_same_training(outcomes, bound=FLOAT64, model=BASE, **settings):
    worst = largest_differences(outcomes, run(uniform(model, **settings)))
    assert max(worst.values()) <= bound, worst


def core_exchanges(outcomes):
    """How often each rank lent, or got back."""
    return [seen.collectives["all_to_all_single"] for seen in outcomes.values()]


@pytest.mark.parametrize("route", ["direct", "via_core"])
@pytest.mark.parametrize("layout", FOUR)
def test_float64(layout, route):
    outcomes = routed(layout, route)
    assert_same_training(outcomes)
    assert any(core_exchanges(outcomes)) == (route == "via_core")


def test_float32():
    assert_same_training(routed("TP4+TP3", dtype="float32"), BOUNDS["float32"], dtype="float32")


def test_biases_and_tied_embeddings():
    assert_same_training(routed("TP4+TP2", model=OLD), model=OLD)


@pytest.mark.parametrize(
    ("option", "layout"),
    [
        ("overlap", "TP4+TP3"),
        ("distributed optimizer", "TP4+TP2"),
        ("distributed optimizer, overlap", "TP4+TP4+TP3"),
    ],
)
def test_options_make_no_difference(option, layout):
    outcomes = routed(layout, more=OPTIONS[option])
    assert_same_training(outcomes)
    for seen in outcomes.values():
        assert (seen.overlapped >= 3 * (STEPS - 1)) == ("overlap" in option), "several buckets are under way at once"


def test_the_same_bits_when_repeated():
    again = dataclasses.replace(degraded(BASE, "TP4+TP3", route="via_core"), more="--log-interval 1")
    first = routed("TP4+TP3")
    assert max(largest_differences(run(again), first).values()) == 0.0
    one, *others = replica_digests(first).values()
    for other in others:
        assert all((one[name] == other[name]).all() for name in one)


def test_auto_takes_the_cheaper_by_the_plan():
    """In a model this small only the number of collectives counts: three lanes cost as much as one by way of cores."""
    four_lanes = dataclasses.replace(degraded(BASE, "TP4+TP3", route="auto"), lost=("r1.s0.t0,r1.s0.t1,r1.s0.t3",))
    assert not any(core_exchanges(routed("TP4+TP3", "auto")))
    assert any(core_exchanges(run(four_lanes)))
    assert_same_training(run(four_lanes))


@pytest.mark.short
def test_units_sent_to_the_wrong_core_are_detected():
    with pytest.raises(StateLost, match="is not the same in all replicas"):
        routed("TP4+TP2", spoil="units_to_the_wrong_core")
