"""Replicas in pipeline stages, some of them degraded, train as one full-width replica in as many stages does.

The reference is stock Megatron: one replica that computes the whole batch.
"""

import dataclasses

import pytest

from benchmarks.numerics import BOUNDS, compared
from ntp_plugin.errors import Refused
from tests.harness.parity.job import STEPS, largest_differences, run, with_losses
from tests.harness.parity.layouts import (
    BASE,
    BOTH_REPLICAS_DEGRADED,
    FIRST_DEGRADED,
    HYBRID,
    INTERLEAVED,
    LAST_DEGRADED,
    MIDDLE_DEGRADED,
    OLD,
    OPTIONS,
    PIPELINES,
    SEGMENTS,
    SEQUENCE,
    degraded,
    reference,
)

FLOAT64, FLOAT32 = BOUNDS["float64"], BOUNDS["float32"]


@pytest.mark.parametrize("layout", PIPELINES)
def test_float64(layout):
    worst = compared(BASE, layout)
    assert max(worst.values()) <= FLOAT64, worst
    assert_one_mind(run(degraded(BASE, layout)), run(reference(BASE, layout)))


def assert_one_mind(outcomes, expected):
    """All ranks of the last stage log the same, and the schedule follows the global batch."""
    (losses,) = {tuple(seen.losses) for seen in with_losses(outcomes)}
    (norms,) = {tuple(seen.norms) for seen in outcomes.values()}
    assert len(losses) == len(norms) == STEPS
    assert losses[-1] < 0.9 * losses[0], "something is learnt"
    for seen in outcomes.values():
        assert (seen.rates, seen.consumed) == (expected[0].rates, expected[0].consumed)


@pytest.mark.parametrize("layout", [FIRST_DEGRADED, BOTH_REPLICAS_DEGRADED])
def test_float32(layout):
    worst = compared(BASE, layout, dtype="float32")
    assert max(worst.values()) <= FLOAT32, worst


@pytest.mark.parametrize(
    ("option", "layout"),
    [
        ("distributed optimizer", FIRST_DEGRADED),
        ("distributed optimizer, overlap", LAST_DEGRADED),
        ("distributed optimizer, overlap", BOTH_REPLICAS_DEGRADED),
        ("recompute", FIRST_DEGRADED),
        ("recompute", INTERLEAVED),
        pytest.param("distributed optimizer, overlap", INTERLEAVED, marks=pytest.mark.short),
    ],
)
def test_options_make_no_difference(option, layout):
    worst = compared(option, layout)
    assert max(worst.values()) <= FLOAT64, worst
    outcomes = run(degraded(BASE, layout, more=OPTIONS[option]))
    most = max(seen.overlapped for seen in outcomes.values())
    assert (most >= 2 * (STEPS - 1)) == ("overlap" in option), "several buckets, during the backward"


@pytest.mark.parametrize(
    ("feature", "layout"),
    [
        ("per-token loss", FIRST_DEGRADED),
        ("per-token loss", LAST_DEGRADED),
        ("qk-layernorm", BOTH_REPLICAS_DEGRADED),
        ("biases, layernorm", LAST_DEGRADED),
        (SEQUENCE, BOTH_REPLICAS_DEGRADED),
        (f"{SEQUENCE}: {OLD}", BOTH_REPLICAS_DEGRADED),
        (SEQUENCE, INTERLEAVED),
        (HYBRID, FIRST_DEGRADED),
        (HYBRID, MIDDLE_DEGRADED),
        (f"{HYBRID}; distributed optimizer", BOTH_REPLICAS_DEGRADED),
        (SEGMENTS, INTERLEAVED),
        (SEGMENTS, MIDDLE_DEGRADED),
    ],
)
def test_features(feature, layout):
    worst = compared(feature, layout)
    assert max(worst.values()) <= FLOAT64, worst


@pytest.mark.parametrize(
    ("feature", "layout", "more"),
    [
        pytest.param("tied embeddings", FIRST_DEGRADED, "", marks=pytest.mark.short),
        ("tied embeddings", LAST_DEGRADED, OPTIONS["distributed optimizer, overlap"]),
        ("tied embeddings", BOTH_REPLICAS_DEGRADED, ""),
        ("tied embeddings", MIDDLE_DEGRADED, OPTIONS["distributed optimizer"]),
        ("tied embeddings", INTERLEAVED, OPTIONS["distributed optimizer, overlap"]),
        (OLD, FIRST_DEGRADED, ""),
    ],
)
def test_a_tied_embedding_in_the_first_and_the_last_stage(feature, layout, more):
    worst = largest_differences(run(degraded(feature, layout, more=more)), run(reference(feature, layout)))
    assert max(worst.values()) <= FLOAT64, worst


def test_a_replica_without_micro_batches_joins_every_sum():
    settings = {"batch": 2, "more": "--calculate-per-token-loss"}
    worst = largest_differences(
        run(degraded(BASE, LAST_DEGRADED, **settings)), run(reference(BASE, LAST_DEGRADED, **settings))
    )
    assert max(worst.values()) <= FLOAT64, worst


@pytest.mark.short
def test_groups_of_micro_batches_that_cannot_be_shared_out_are_refused():
    """Two replicas of 3 micro-batches, which an interleaved schedule takes by twos."""
    with pytest.raises(Refused, match=r"a replica has 3 micro-batches.*groups of 2.*multiple of 4"):
        run(dataclasses.replace(degraded(BASE, INTERLEAVED), batch=6))
