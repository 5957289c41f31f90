"""Replicas that have lost a stage train as one replica with all stages does: their other stages have its layers.

The reference is stock Megatron: one replica that computes the whole batch, in as many stages as nominal.
"""

import pytest

from benchmarks.numerics import BOUNDS, compared
from ntp_plugin.errors import Refused, StateLost
from tests.harness.parity.job import Job, largest_differences, run
from tests.harness.parity.layouts import (
    BASE,
    BOTH_LOST_STAGES,
    DEEP,
    DROPOUT,
    FIRST_STAGE_LOST,
    LAST_STAGE_LOST,
    LOST_STAGES,
    MODELS,
    OLD,
    ONE_STAGE_LEFT,
    ONE_STAGE_LOST,
    OPTIONS,
    SEQUENCE,
    STAGE_AND_SLOT_LOST,
    TWO_STAGES_LOST,
    degraded,
    reference,
)

FLOAT64, FLOAT32 = BOUNDS["float64"], BOUNDS["float32"]
_SHARDED = "distributed optimizer, overlap"


@pytest.mark.parametrize("layout", LOST_STAGES)
def test_float64(layout):
    worst = compared(BASE, layout)
    assert max(worst.values()) <= FLOAT64, worst


def test_float32():
    worst = compared(BASE, ONE_STAGE_LOST, dtype="float32")
    assert max(worst.values()) <= FLOAT32, worst


@pytest.mark.parametrize(
    ("option", "layout"),
    [
        ("distributed optimizer", FIRST_STAGE_LOST),
        (_SHARDED, LAST_STAGE_LOST),
        pytest.param(_SHARDED, STAGE_AND_SLOT_LOST, marks=pytest.mark.short),
        ("parameter gather overlap", ONE_STAGE_LOST),
        ("overlap", ONE_STAGE_LEFT),
        ("recompute", TWO_STAGES_LOST),
        ("recompute modules", DEEP),
        (SEQUENCE, DEEP),
        (SEQUENCE, STAGE_AND_SLOT_LOST),
    ],
)
def test_options_make_no_difference(option, layout):
    worst = compared(option, layout)
    assert max(worst.values()) <= FLOAT64, worst


@pytest.mark.parametrize(
    ("feature", "layout"),
    [
        ("per-token loss", LAST_STAGE_LOST),
        ("per-token loss", BOTH_LOST_STAGES),
        ("qk-layernorm", STAGE_AND_SLOT_LOST),
        ("biases, layernorm", FIRST_STAGE_LOST),
        ("tied embeddings", FIRST_STAGE_LOST),
        ("tied embeddings", LAST_STAGE_LOST),
        ("tied embeddings", STAGE_AND_SLOT_LOST),
        (OLD, ONE_STAGE_LOST),
        (f"{SEQUENCE}: {OLD}", STAGE_AND_SLOT_LOST),
        (DROPOUT, ONE_STAGE_LOST),
        (DROPOUT, STAGE_AND_SLOT_LOST),
    ],
)
def test_features(feature, layout):
    worst = compared(feature, layout)
    assert max(worst.values()) <= FLOAT64, worst


def test_a_tied_embedding_with_a_sharded_optimizer():
    more = OPTIONS[_SHARDED]
    worst = largest_differences(
        run(degraded("tied embeddings", LAST_STAGE_LOST, more=more)), run(reference("tied embeddings", LAST_STAGE_LOST))
    )
    assert max(worst.values()) <= FLOAT64, worst


def test_given_depths_of_the_first_and_the_last_stage():
    """Nominally 1, 4 and 2 layers; without the second stage 4 and 3, or as the output layer weighs."""
    words = "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 2"
    where = {"tp": 1, "pp": 3, "layers": 7, "more": words}
    outcomes = run(Job(model=MODELS[BASE], dp=2, lost=("r0.s1",), **where))
    worst = largest_differences(outcomes, run(Job(model=MODELS[BASE], **where)))
    assert max(worst.values()) <= FLOAT64, worst


def test_layers_that_are_taken_for_others_are_noticed():
    worst = compared(BASE, ONE_STAGE_LOST, spoil="neighbours_exchanged")
    assert worst["weights"] > 1e-3, worst


def test_weights_of_another_draw_are_noticed():
    with pytest.raises(StateLost, match="is not the same in all replicas"):
        run(degraded(BASE, ONE_STAGE_LOST, spoil="moved_layers_draw_their_own"))


@pytest.mark.parametrize(
    ("more", "lost", "says"),
    [
        (
            "--hybrid-layer-pattern *--*",
            ("r1.s1",),
            "--hybrid-layer-pattern is not built yet for replicas that have lost",
        ),
        ("", ("r0.s1,r1.s2",), "names a stage of each replica"),
        ("--ntp-gpu-memory-gb 1", ("r1.s1",), "--ntp-gpu-memory-gb is not compared yet"),
    ],
)
def test_what_does_not_work_is_refused(more, lost, says):
    model = f"{MODELS[BASE]} --calculate-per-token-loss"
    with pytest.raises(Refused, match=says):
        run(Job(model=f"{model} {more}", tp=1, pp=4, dp=2, lost=lost))


def test_one_stage_with_a_tied_embedding_is_refused():
    with pytest.raises(Refused, match="a replica has one stage left"):
        run(degraded("tied embeddings", ONE_STAGE_LEFT))
