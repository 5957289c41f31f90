"""The loss scale of `--fp16`: the same as the reference run's in every step, through losses and returns.

In float64 the scale works as in fp16, and what remains of rounding is small: gradients are made infinite in some steps.
In fp16 itself, they overflow by themselves until the scale is small enough.
"""

import pytest

from benchmarks.numerics import BOUNDS
from ntp_plugin.testing.faults import kill
from tests.harness.parity.job import OVERFLOWS, STEPS, Job, largest_differences, run
from tests.harness.parity.layouts import BASE, MODELS, degraded, uniform
from tests.harness.parity.live import as_if_always_there, live

SHARDED = "--use-distributed-optimizer"
FP16 = "--fp16 --loss-scale-window 5 --initial-loss-scale 65536 --hysteresis 1"
OVERFLOW = {"under": "gradients_overflow"}
KINDS = pytest.mark.parametrize("kind", ["", SHARDED], ids=["plain", "sharded"])


@pytest.fixture(scope="module")
def expected():
    """The reference run skips the steps that overflow, and changes its scale down and up."""
    reference = run(uniform(BASE, more=FP16, **OVERFLOW))
    norms, scales = reference[0].norms, reference[0].scales
    assert [step for step, norm in enumerate(norms, start=1) if not norm] == list(OVERFLOWS)
    assert scales[:6] == [65536, 65536, 32768, 16384, 16384, 8192]
    assert scales[-1] > min(scales), "the window lets it grow again"
    return reference


def assert_same(seen, expected, *, logged_before=()):
    """`logged_before`: steps whose log has the scale of the step before, since their state comes from older copies."""
    worst = largest_differences(seen, expected)
    assert max(worst.values()) <= BOUNDS["float64"], worst
    for rank, one in seen.items():
        scales = list(expected[0].scales)
        for step in logged_before if len(one.scales) == STEPS else ():
            scales[step - 1] = scales[step - 2]
        assert one.scales == scales[-len(one.scales) :], rank  # a rank that came back has the last ones


def job(kind="", **options):
    return Job(**{"model": MODELS[BASE], "tp": 2, "dp": 2, "enabled": True, "more": f"{FP16} {kind}", **options})


def assert_same_training(lived, expected, **options):
    assert_same(as_if_always_there(lived), expected, **options)


@pytest.mark.parametrize(
    "layout", [{"tp": 4, "dp": 2, "lost": ("r1.s0.t2",)}, {"tp": 2, "dp": 2, "pp": 2, "lost": ("r0.s1.t0",)}]
)
@KINDS
def test_a_degraded_layout_has_the_reference_runs_scale(expected, layout, kind):
    if "pp" in layout:  # each stage draws its weights by itself
        expected = run(uniform(BASE, tp=2, pp=2, more=FP16, **OVERFLOW))
    assert_same(run(degraded(BASE, layout, more=f"{FP16} {kind}", **OVERFLOW)), expected)


@pytest.mark.parametrize(
    ("kind", "fault_point", "step"),
    [
        pytest.param(
            kind, fault_point, step, marks=[pytest.mark.short] * ((kind, fault_point, step) == (SHARDED, "vote", 4))
        )
        for kind in ("", SHARDED)
        for fault_point in ("backward", "vote", "apply", "applied")
        for step in (4, 5)
    ],
)
def test_a_job_keeps_it_through_a_loss_and_a_return(expected, kind, fault_point, step):
    """Step 4 overflows, and step 5 does not."""
    lived, _ = live(job(kind, **OVERFLOW), faults=[kill(1, during=fault_point, step=step)], back={1: 12})
    assert len(lived) == 4
    behind = kind == SHARDED and fault_point in ("apply", "applied") and step in OVERFLOWS
    assert_same_training(lived, expected, logged_before=(step,) if behind else ())


def test_a_joining_rank_skips_its_first_step(expected):
    """It gathers parameters once a step of its own has changed some; the others have gathered them since step 2. A
    comparison would gather them before step 7."""
    gathered = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather --ntp-watch-steps 0"
    lived, _ = live(job(gathered, **OVERFLOW), faults=[kill(1, during="backward", step=3)], back={1: 5})
    assert lived[1].seen.norms[0] == 0.0, "step 6 overflows"
    assert_same_training(lived, expected)


@KINDS
def test_an_idle_rank_comes_back_with_the_scale_of_the_others(expected, kind):
    """Slot 3 is idle while step 4 and step 6 overflow, and trains again when slot 2 is back."""
    idle = job(f"{kind} --ntp-min-tp-width 2", **OVERFLOW)
    lived, _ = live(idle, faults=[kill(2, during="backward", step=3)], back={2: 12})
    assert len(lived) == 4
    assert_same_training(lived, expected)


def test_control_a_scale_that_counts_an_undone_step_is_noticed(expected):
    lived, _ = live(job(spoil="scale_changes_before_the_vote", **OVERFLOW), faults=[kill(1, during="vote", step=4)])
    seen = as_if_always_there(lived)
    assert any(one.scales != expected[0].scales for one in seen.values())


@pytest.mark.parametrize("kind", ["", SHARDED], ids=["plain", "sharded"])
def test_fp16_overflows_in_the_same_steps(kind):
    """Each rank sees other gradients overflow, and all skip."""
    settings = {"dtype": "float32", "more": "--fp16 --initial-loss-scale 4194304 --hysteresis 1"}
    reference = run(Job(model=MODELS[BASE], tp=2, dp=2, **settings))
    scales = reference[0].scales
    assert scales[0] > scales[STEPS - 1], "it overflows"
    lived, _ = live(
        job(**{**settings, "more": f"{settings['more']} {kind}"}),
        faults=[kill(3, during="vote", step=2)],
        back={3: 10},
    )
    for one in as_if_always_there(lived).values():
        assert one.scales == scales[-len(one.scales) :]
        assert one.losses == pytest.approx(reference[0].losses, rel=2e-3)
