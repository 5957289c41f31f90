"""A degraded replica with too little memory runs more and smaller micro-batches, or does not train at all.

Bytes are those of `planning/memory_fit.py`, here of a tiny model; `test_memory.py` tests their accuracy.
"""

import pytest

from benchmarks.numerics import BOUNDS, compared
from ntp_plugin.errors import Refused
from ntp_plugin.telemetry import Follower, Recovered
from ntp_plugin.testing.faults import kill
from tests.harness.parity.job import Job, largest_differences, run
from tests.harness.parity.layouts import (
    BASE,
    DROPOUT,
    FOURS,
    IN_SPLITS,
    LAST_DEGRADED,
    MODELS,
    TIGHT,
    degraded,
    reference,
    uniform,
)
from tests.harness.parity.live import as_if_always_there, live
from tests.megatron.test_live import assert_every_sample_once

SAMPLES = 24
ROOM_FOR_TP1_IN_SPLITS = "--ntp-gpu-memory-gb 0.0032"
ROOM_FOR_WHOLE_REPLICAS = "--ntp-gpu-memory-gb 0.002"


def shares(outcomes):
    return {seen.replica: seen.share for seen in outcomes.values()}


def assert_same_training(outcomes, expected):
    worst = largest_differences(outcomes, expected)
    assert max(worst.values()) <= BOUNDS["float64"], worst


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        pytest.param("TP4+TP3", {0: (4, 4), 1: (4, 2)}, marks=pytest.mark.short),
        ("TP3+TP3", {0: (6, 2), 1: (6, 2)}),
    ],
)
def test_samples_of_a_step_are_the_same_in_smaller_micro_batches(layout, expected):
    worst = compared(f"{FOURS}; {IN_SPLITS}", layout)
    assert max(worst.values()) <= BOUNDS["float64"], worst
    assert shares(run(degraded(FOURS, layout, more=TIGHT))) == expected


def test_each_stage_of_a_pipeline_has_to_fit():
    outcomes = run(degraded(FOURS, LAST_DEGRADED, more="--ntp-gpu-memory-gb 0.0016"))
    assert shares(outcomes) == {0: (4, 4), 1: (4, 2)}
    assert_same_training(outcomes, run(reference(FOURS, LAST_DEGRADED)))


def test_masks_are_those_of_the_samples_and_not_of_the_micro_batches():
    dropouts = MODELS[DROPOUT].removeprefix(MODELS[BASE])
    outcomes = run(degraded(FOURS, "TP4+TP3", more=f"{dropouts} {TIGHT}"))
    assert shares(outcomes)[1] == (4, 2)
    assert_same_training(outcomes, run(uniform(FOURS, more=dropouts)))


def test_a_mean_loss_is_not_split():
    mean = MODELS[FOURS].replace("--calculate-per-token-loss", "")
    refused = r"stage 0 at TP width 3 does not fit into 0\.0012 GB per GPU: as is 0\.00126 GB.*Fix"
    with pytest.raises(Refused, match=refused):
        run(Job(model=mean, tp=4, dp=2, lost=("r1.s0.t3",), more=TIGHT))


# ---------------------------------------------------------------- live


def job(more):
    return Job(model=MODELS[FOURS], tp=2, dp=2, enabled=True, more=more)


def test_a_degraded_replica_runs_smaller_micro_batches(tmp_path):
    more = f"{ROOM_FOR_TP1_IN_SPLITS} --ntp-events={tmp_path}/events"
    lived, rows = live(job(more), faults=[kill(3, during="backward", step=5)])
    assert shares({slot: one.seen for slot, one in lived.items()}) == {0: (4, 4), 1: (4, 2)}
    assert_same_training(as_if_always_there(lived), run(uniform(FOURS)))
    assert_every_sample_once(rows, SAMPLES)
    micro_batches = [
        one.event.micro_batches for one in Follower(tmp_path / "events").news() if isinstance(one.event, Recovered)
    ]
    assert micro_batches == [[4, 2]] * 3, "of the nominal size, so that shares can be compared"


def test_a_degraded_replica_that_does_not_fit_is_dropped():
    lived, rows = live(job(ROOM_FOR_WHOLE_REPLICAS), faults=[kill(3, during="backward", step=5)])
    training = {slot: one for slot, one in lived.items() if slot != 2}
    assert shares({slot: one.seen for slot, one in training.items()}) == {0: (6, 4)}
    assert_same_training(as_if_always_there(training), run(uniform(FOURS)))
    assert_every_sample_once(rows, SAMPLES)


def test_a_memory_limit_below_nominal_replicas_is_refused_before_training():
    with pytest.raises(Refused, match=r"stage 0 at TP width 2 does not fit into 0\.001 GB per GPU: as is"):
        live(job("--ntp-gpu-memory-gb 0.001"))
