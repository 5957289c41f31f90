"""Replicas of different width train on Megatron as full-width replicas do, with the same samples.

The reference is stock Megatron: one replica of TP 4 that computes the whole batch.
"""

import dataclasses

import pytest

from benchmarks.numerics import BF16, BOUNDS, CONTROLS, TIMES_THE_FLOOR, USUAL_EPS, bounds_of, compared, noticed
from tests.harness.parity.job import STEPS, Job, largest_differences, replica_digests, run
from tests.harness.parity.layouts import BASE, LAYOUTS, MODELS, OLD, OPTIONS, degraded, uniform

FLOAT64, FLOAT32 = BOUNDS["float64"], BOUNDS["float32"]


def assert_same_training(outcomes, reference, bound):
    worst = largest_differences(outcomes, reference)
    assert max(worst.values()) <= bound, worst


def assert_one_mind(outcomes, reference):
    """All ranks log the same, and the schedule follows the global batch."""
    expected = reference[0]
    (losses,) = {tuple(seen.losses) for seen in outcomes.values()}
    (norms,) = {tuple(seen.norms) for seen in outcomes.values()}
    assert len(losses) == len(norms) == STEPS
    assert losses[-1] < 0.9 * losses[0], "something is learnt"
    for seen in outcomes.values():
        assert (seen.rates, seen.consumed) == (expected.rates, expected.consumed)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *((BASE, layout) for layout in LAYOUTS),
        (OLD, "TP4+TP2"),
        ("qk-layernorm", "TP3+TP3"),
    ],
)
def test_float64(model, layout):
    outcomes = run(degraded(model, layout))
    assert_same_training(outcomes, run(uniform(model)), FLOAT64)
    assert_one_mind(outcomes, run(uniform(model)))


@pytest.mark.parametrize("layout", ["TP4+TP3", "TP3+TP3"])
def test_float32(layout):
    assert_same_training(run(degraded(BASE, layout, dtype="float32")), run(uniform(BASE, dtype="float32")), FLOAT32)


def test_float32_with_biases_no_more_than_four_times_the_noise_floor():
    """They begin at zero, so that rounding is large relative to what 20 steps make of them, in Megatron itself too."""
    worst, bounds = compared(OLD, "TP3+TP3", dtype="float32"), bounds_of(OLD, "float32")
    assert all(worst[key] <= bounds[key] for key in worst), (worst, bounds)


@pytest.mark.parametrize(
    ("option", "layout"),
    [
        ("distributed optimizer", "TP4+TP2"),
        ("overlap", "TP4+TP3"),
        ("distributed optimizer, overlap", "TP3+TP3"),
        ("recompute", "TP2+TP1"),
    ],
)
def test_options_make_no_difference(option, layout):
    outcomes = run(degraded(BASE, layout, more=OPTIONS[option]))
    assert_same_training(outcomes, run(uniform(BASE)), FLOAT64)
    for seen in outcomes.values():
        assert (seen.overlapped >= 3 * (STEPS - 1)) == ("overlap" in option), (
            "several buckets, while the backward goes on"
        )


@pytest.mark.short
def test_a_replica_without_micro_batches_joins_every_sum():
    """Two samples, and a replica that would take four times as long for its own: the other computes both."""
    small = "--global-batch-size 2 --calculate-per-token-loss"
    job = Job(model=MODELS[BASE], tp=4, dp=2, lost=("r1.s0.t0,r1.s0.t1,r1.s0.t3",), more=small)
    outcomes = run(job)
    assert_same_training(outcomes, run(uniform(BASE, more=small)), FLOAT64)


def test_bf16_within_four_times_its_noise_floor():
    worst, bounds = compared("distributed optimizer, overlap", "TP4+TP3", **BF16), bounds_of(BASE, "bfloat16")
    assert all(worst[key] <= bounds[key] for key in worst), (worst, bounds)


@pytest.mark.short
def test_tokens_are_counted_over_the_global_batch():
    """Samples have different numbers of tokens that count, so that a mean of means is another number."""
    per_token = "--calculate-per-token-loss"
    reference = run(uniform(BASE, more=per_token))
    assert_same_training(run(degraded(BASE, "TP4+TP3", more=per_token)), reference, FLOAT64)
    assert reference[0].norms != run(uniform(BASE))[0].norms


def test_at_adams_usual_epsilon_no_more_than_four_times_the_noise_floor():
    """The floor is what Megatron itself shows between two uniform widths."""
    settings = {"dtype": "float32", "eps": USUAL_EPS}
    reference = run(uniform(BASE, **settings))
    floor = largest_differences(run(uniform(BASE, tp=2, **settings)), reference)
    worst = largest_differences(run(degraded(BASE, "TP4+TP3", **settings)), reference)
    assert all(worst[key] <= TIMES_THE_FLOOR * floor[key] for key in worst), (worst, floor)


def test_a_planned_degraded_run_is_the_same_bits_when_repeated():
    job = degraded(BASE, "TP4+TP3")
    again = dataclasses.replace(job, more="--log-interval 1")
    assert_same_training(run(again), run(job), 0.0)


@pytest.mark.parametrize("wrong", CONTROLS)
def test_the_comparison_detects_planted_faults(wrong):
    assert noticed(wrong)


@pytest.mark.short
def test_a_nominal_layout_runs_stock_megatron():
    """The same bits and the same collectives, with the plugin on and off."""
    off = run(Job(model=MODELS[BASE], tp=2, dp=2))
    on = run(Job(model=MODELS[BASE], tp=2, dp=2, enabled=True))
    assert_same_training(on, {0: off[0], **off}, 0.0)
    assert {rank: seen.collectives for rank, seen in on.items()} == {
        rank: seen.collectives for rank, seen in off.items()
    }
    assert replica_digests(on).keys() == {("replica", 0), ("replica", 1)}
