"""`--pipeline-model-parallel-layout`: stages of unequal depth, and an embedding or a loss in a stage of its own.

The reference is stock Megatron: one replica with the same stages that computes the whole batch.
"""

import dataclasses

import pytest

from benchmarks.numerics import BOUNDS
from ntp_plugin.testing.faults import kill
from tests.harness.parity.job import Job, largest_differences, run
from tests.harness.parity.layouts import (
    BASE,
    FIRST_DEGRADED,
    INTERLEAVED,
    LAST_DEGRADED,
    MIDDLE_DEGRADED,
    MODELS,
    OPTIONS,
    PIPELINES,
    SEQUENCE,
)
from tests.harness.parity.live import as_if_always_there, live
from tests.harness.parity.saved import joined, loading, saving

FLOAT64 = BOUNDS["float64"]
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 9000"
TIED = "tied embeddings"
LOSS_APART, EMBEDDING_ALONE, LOSS_ALONE = "Ett|t|t|L", "E|ttL", "Ett|L"
"""The first has two virtual stages on each rank: three layers in the first stage, one in the second, and the loss in a
virtual stage without layers."""
BOTH_ALONE = "E|ttt|t|L"
AN_EMPTY_CHUNK = "Ett||t|tL"


def job(stages, where, *, model=BASE, more="", **options):
    """A job whose layers are in these stages."""
    words = f"{MODELS[model]} --pipeline-model-parallel-layout {stages}"
    return Job(model=words, **PIPELINES[where], more=more, **options)


def expected(job):
    """The reference of a job."""
    return run(dataclasses.replace(job, lost=(), enabled=False, dp=1, more="", spoil=""))


def worst_of(planned):
    return max(largest_differences(run(planned), expected(planned)).values())


@pytest.mark.parametrize(
    ("stages", "where", "model", "more"),
    [
        pytest.param(LOSS_APART, INTERLEAVED, BASE, "", marks=pytest.mark.short),
        (LOSS_APART, INTERLEAVED, TIED, SHARDED),
        (LOSS_APART, "PP2 x 2: TP2,TP1 + TP1,TP2", BASE, OPTIONS[SEQUENCE]),
        (AN_EMPTY_CHUNK, INTERLEAVED, BASE, ""),
        (EMBEDDING_ALONE, FIRST_DEGRADED, TIED, ""),
        (EMBEDDING_ALONE, LAST_DEGRADED, BASE, SHARDED),
        (LOSS_ALONE, LAST_DEGRADED, BASE, ""),
        (LOSS_ALONE, LAST_DEGRADED, BASE, "--ntp-route via_core"),
        (LOSS_ALONE, FIRST_DEGRADED, TIED, SHARDED),
        (BOTH_ALONE, MIDDLE_DEGRADED, BASE, ""),
    ],
)
def test_a_degraded_layout_trains_as_the_reference(stages, where, model, more):
    assert worst_of(job(stages, where, model=model, more=more)) <= FLOAT64


@pytest.mark.parametrize(
    ("spoil", "model"),
    [("activations_of_another_micro_batch", BASE), ("shared_rows_not_summed", TIED), ("scale_by_replicas", BASE)],
)
def test_controls_are_noticed(spoil, model):
    assert worst_of(job(LOSS_APART, INTERLEAVED, model=model, spoil=spoil)) > 1e3 * FLOAT64


@pytest.mark.parametrize("fault_point", ["forward", "backward", "reduce", "vote", "apply"])
@pytest.mark.parametrize("slot", [0, 7])
def test_a_rank_of_an_outer_stage_dies_and_rejoins(slot, fault_point):
    """The first stage has three layers, the last one and the loss."""
    whole = dataclasses.replace(job(LOSS_APART, INTERLEAVED), lost=(), enabled=True)
    lived, _ = live(whole, faults=[kill(slot, during=fault_point, step=5)], back={slot: 10})
    assert {slot: one.width for slot, one in lived.items()} == dict.fromkeys(range(8), 2)
    assert max(largest_differences(as_if_always_there(lived), expected(whole)).values()) <= FLOAT64


@pytest.mark.parametrize(("stages", "where"), [(LOSS_APART, INTERLEAVED), (LOSS_ALONE, LAST_DEGRADED)])
def test_with_the_distributed_optimizer(stages, where):
    whole = dataclasses.replace(job(stages, where, model=TIED, more=SHARDED), lost=(), enabled=True)
    lived, _ = live(whole, faults=[kill(7, during="backward", step=5)], back={7: 10})
    assert max(largest_differences(as_if_always_there(lived), expected(whole)).values()) <= FLOAT64


def test_a_nominal_job_resumes_a_checkpoint_of_a_degraded_one(tmp_path):
    degraded = job(LOSS_ALONE, LAST_DEGRADED, more=saving(tmp_path))
    seen = run(degraded)
    again = dataclasses.replace(degraded, lost=(), more=loading(tmp_path))
    outcomes = joined(seen, run(again))
    assert max(largest_differences(outcomes, expected(degraded)).values()) <= FLOAT64
