"""Multi-token prediction (`--mtp-num-layers`) in replicas of different width, planned and live.

The reference is stock Megatron: one replica, in as many stages, that computes the whole batch.
"""

import dataclasses

import pytest

from benchmarks.numerics import BOUNDS
from ntp_plugin.testing.faults import kill
from tests.harness.parity.job import STEPS, Job, largest_differences, run
from tests.harness.parity.layouts import (
    BASE,
    BOTH_REPLICAS_DEGRADED,
    FIRST_DEGRADED,
    INTERLEAVED,
    LAST_DEGRADED,
    LATENT,
    LAYOUTS,
    MODELS,
    PIPELINES,
    WITH_TE,
)
from tests.harness.parity.live import as_if_always_there, live
from tests.harness.parity.saved import joined, loading, saving

FLOAT64 = BOUNDS["float64"]
SP, PER_TOKEN = "--sequence-parallel", "--calculate-per-token-loss"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 9000"
TIED = "tied embeddings"
TE = f"{MODELS[BASE]} --transformer-impl transformer_engine"


def job(layers, where, *, model=MODELS[BASE], more="", **options):
    """A job that predicts so many further tokens."""
    words = f"{model} --mtp-num-layers {layers} --mtp-loss-scaling-factor 0.3"
    return Job(model=words, **(LAYOUTS | PIPELINES)[where], more=more, **options)


def expected(job, **changed):
    """The reference of a job."""
    return run(dataclasses.replace(job, **{"lost": (), "enabled": False, "dp": 1, "more": "", "spoil": ""} | changed))


def worst_of(planned, **changed):
    return max(largest_differences(run(planned), expected(planned, **changed)).values())


def differs(outcomes, reference):
    """The largest relative difference of what the log says of predictions."""
    (theirs,) = {tuple(seen.predicted) for seen in reference.values() if seen.predicted}
    return max(
        abs(one - other) / max(abs(other), 1)
        for seen in outcomes.values()
        if seen.predicted
        for one, other in zip(seen.predicted, theirs, strict=True)
    )


@pytest.mark.parametrize(
    ("layers", "where", "model", "more"),
    [
        (2, "TP2+TP1", MODELS[BASE], ""),
        (1, "TP4+TP3", MODELS[BASE], ""),
        (2, "TP4+TP3", MODELS[BASE], SP),
        (1, "TP4+TP2", f"{MODELS[BASE]} {PER_TOKEN}", "--ntp-route via_core"),
        (2, "TP3+TP3", MODELS[TIED], SHARDED),
        (2, "TP4+TP3", f"{MODELS[BASE]} --mtp-use-repeated-layer", ""),
        (1, "TP4+TP3", TE, SP),
        (
            1,
            "TP2+TP1",
            MODELS[BASE],
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        ),
        (1, FIRST_DEGRADED, MODELS[BASE], ""),
        (1, LAST_DEGRADED, MODELS[BASE], SHARDED),
        (1, LAST_DEGRADED, MODELS[TIED], ""),
        (2, BOTH_REPLICAS_DEGRADED, f"{MODELS[BASE]} {PER_TOKEN}", SP),
        (1, INTERLEAVED, f"{TE} --pipeline-model-parallel-layout Ett|t|t|mL", f"{SP} {SHARDED}"),
    ],
)
def test_a_degraded_layout_trains_as_the_reference(layers, where, model, more):
    assert worst_of(job(layers, where, model=model, more=more)) <= FLOAT64


def test_with_latent_attention():
    """Whose gradients are whole at TP 1, in stock Megatron without sequence parallelism."""
    assert worst_of(job(1, "TP4+TP3", model=WITH_TE[LATENT], more=SP), tp=1) <= FLOAT64


@pytest.mark.parametrize("where", ["TP4+TP3", LAST_DEGRADED])
def test_the_log_has_the_losses_of_all_predictions(where):
    planned = job(2, where)
    assert len(next(seen.predicted for seen in run(planned).values() if seen.predicted)) == 4 * STEPS
    assert differs(run(planned), expected(planned)) <= FLOAT64


@pytest.mark.parametrize("spoil", ["predictions_of_each_replica", "predictions_found_by_even_parts"])
def test_control_what_the_log_has_of_others_is_noticed(spoil):
    planned = job(2, "TP4+TP3", spoil=spoil)
    assert differs(run(planned), expected(planned)) > 1e3 * FLOAT64


@pytest.mark.parametrize(
    ("spoil", "where"),
    [
        ("columns_of_another_slot", "TP4+TP3"),
        ("scale_by_replicas", "TP4+TP3"),
        ("shared_rows_not_summed", LAST_DEGRADED),
    ],
)
def test_controls_are_noticed(spoil, where):
    assert worst_of(job(1, where, spoil=spoil)) > 1e3 * FLOAT64


@pytest.mark.parametrize(
    ("more", "fault_point"),
    [
        pytest.param(SHARDED, "backward", marks=pytest.mark.short),
        *(("", point) for point in ("forward", "backward", "reduce", "vote", "apply", "applied", "between")),
        (SP, "backward"),
    ],
)
def test_a_rank_dies_and_rejoins(more, fault_point):
    whole = dataclasses.replace(job(1, "TP2+TP1", more=more), lost=(), enabled=True)
    lived, _ = live(whole, faults=[kill(3, during=fault_point, step=5)], back={3: 10})
    assert {slot: one.width for slot, one in lived.items()} == dict.fromkeys(range(4), 2)
    assert max(largest_differences(as_if_always_there(lived), expected(whole)).values()) <= FLOAT64


@pytest.mark.parametrize("slot", [0, 7])
def test_a_stage_is_degraded_and_restored(slot):
    """The embedding is in both stages, and the layers of the prediction in the last."""
    whole = dataclasses.replace(job(1, LAST_DEGRADED), lost=(), enabled=True)
    lived, _ = live(whole, faults=[kill(slot, during="backward", step=5)], back={slot: 10})
    assert {one: lived[one].width for one in lived} == dict.fromkeys(range(8), 2)
    assert max(largest_differences(as_if_always_there(lived), expected(whole)).values()) <= FLOAT64


def test_the_log_of_a_repeated_step_counts_it_once():
    whole = dataclasses.replace(job(1, "TP2+TP1"), lost=(), enabled=True)
    lived, _ = live(whole, faults=[kill(3, during="backward", step=5)])
    assert differs({slot: one.seen for slot, one in lived.items()}, expected(whole)) <= FLOAT64


def test_a_loss_between_a_step_and_its_log_leaves_its_predictions_out():
    whole = dataclasses.replace(job(1, "TP2+TP1"), lost=(), enabled=True)
    lived, _ = live(whole, faults=[kill(3, during="applied", step=5)])
    assert {len(one.seen.predicted) for one in lived.values()} == {2 * (STEPS - 1)}


def test_a_nominal_job_resumes_a_checkpoint_of_a_degraded_one(tmp_path):
    degraded = job(1, LAST_DEGRADED, more=saving(tmp_path))
    seen = run(degraded)
    outcomes = joined(seen, run(dataclasses.replace(degraded, lost=(), more=loading(tmp_path))))
    assert max(largest_differences(outcomes, expected(degraded)).values()) <= FLOAT64
