"""`--overlap-param-gather` on degraded replicas: the forward begins while parameters are gathered."""

import pytest

from benchmarks.numerics import BF16, BOUNDS, bounds_of, compared
from ntp_plugin.testing.faults import kill
from tests.harness.parity.job import STEPS, Job, largest_differences, run
from tests.harness.parity.layouts import BASE, MODELS, OPTIONS, degraded, uniform
from tests.harness.parity.live import as_if_always_there, live

GATHER = OPTIONS["parameter gather overlap"]
IN_THE_STEP = (
    f"{OPTIONS['distributed optimizer, overlap']} --overlap-param-gather-with-optimizer-step --ckpt-format torch"
)
EVALUATED = "--eval-iters 1 --eval-interval 5"
BOUND = BOUNDS["float64"]


@pytest.mark.parametrize("layout", [pytest.param("TP4+TP3", marks=pytest.mark.short), "TP3+TP3"])
def test_gathers_overlap_the_forward_pass(layout):
    outcomes = run(degraded(BASE, layout, more=GATHER))
    worst = largest_differences(outcomes, run(uniform(BASE)))
    assert max(worst.values()) <= BOUND, worst
    for seen in outcomes.values():
        assert seen.gathered_ahead >= 3 * (STEPS - 1), "several buckets, from the second step on"


def test_without_the_flag_no_gather_overlaps():
    """A negative control of what is counted."""
    outcomes = run(degraded(BASE, "TP4+TP3", more=OPTIONS["distributed optimizer, overlap"]))
    assert {seen.gathered_ahead for seen in outcomes.values()} == {0}


def test_evaluation_sees_the_parameters_of_its_step():
    """Evaluation has no hooks to wait with: Megatron gathers all parameters before it."""
    outcomes = run(degraded(BASE, "TP4+TP3", more=f"{GATHER} {EVALUATED}"))
    reference = run(uniform(BASE, more=EVALUATED))
    worst = largest_differences(outcomes, reference)
    assert max(worst.values()) <= BOUND, worst
    assert len(set(reference[0].evaluated)) == len(reference[0].evaluated) >= 4
    for seen in outcomes.values():
        assert seen.evaluated == pytest.approx(reference[0].evaluated, rel=BOUND)


def test_a_replica_without_micro_batches_runs_no_forward_and_joins_every_gather():
    small = "--global-batch-size 2 --calculate-per-token-loss"
    layout = {"lost": ("r1.s0.t0,r1.s0.t1,r1.s0.t3",), "tp": 4, "dp": 2}
    outcomes = run(degraded(BASE, layout, more=f"{small} {GATHER}"))
    worst = largest_differences(outcomes, run(uniform(BASE, more=small)))
    assert max(worst.values()) <= BOUND, worst
    assert [seen.gathered_ahead > 0 for _, seen in sorted(outcomes.items())] == [True] * 4 + [False]


def test_bf16_within_four_times_its_noise_floor():
    worst, bounds = compared("parameter gather overlap", "TP4+TP3", **BF16), bounds_of(BASE, "bfloat16")
    assert all(worst[key] <= bounds[key] for key in worst), (worst, bounds)


def test_the_comparison_detects_a_forward_that_does_not_wait():
    outcomes = run(degraded(BASE, "TP4+TP3", more=GATHER, spoil="parameters_not_awaited"))
    assert max(largest_differences(outcomes, run(uniform(BASE))).values()) > BOUND


@pytest.mark.parametrize("fault_point", ["backward", "apply", "applied"])
@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (2, 1)], ids=["a replica is dropped", "a stage is narrower"])
def test_gathers_in_the_step_of_the_first_chunk_are_left_out_while_a_slot_is_lost(tp, dp, fault_point):
    """The parameters of a rank's first chunk are sent while the optimizer steps the others."""
    options = {"model": MODELS[BASE], "pp": 2, "chunks": 2, "batch": 8}
    job = Job(tp=tp, dp=dp, more=f"{IN_THE_STEP} --overlap-param-gather", enabled=True, **options)
    lived, _ = live(job, faults=[kill(1, during=fault_point, step=4)], back={1: 12})
    assert len(lived) == job.processes
    assert max(largest_differences(as_if_always_there(lived), run(Job(tp=1, **options))).values()) <= BOUND
