"""Ranks are lost with an Adam that counts its steps per group, as TransformerEngine's and apex's do.

The reference is torch's Adam in one full-width replica that computes the whole batch.
"""

import pytest

from benchmarks.numerics import BF16, BOUNDS, bounds_of
from ntp_plugin.testing.faults import kill
from tests.harness.parity.job import Job, largest_differences, run
from tests.harness.parity.layouts import BASE, MODELS, degraded, uniform
from tests.harness.parity.live import as_if_always_there, live
from tests.harness.parity.saved import joined, loading, saving
from tests.megatron.test_checkpoints import with_arguments
from tests.megatron.test_live import OVERLAP, assert_every_sample_once, assert_same_training, widths


def job(more=OVERLAP, **options):
    return Job(
        **{"model": MODELS[BASE], "tp": 2, "dp": 2, "enabled": True, "more": more, "group_adam": True, **options}
    )


def test_group_adam_trains_as_torchs_adam():
    worst = largest_differences(run(uniform(BASE, group_adam=True)), run(uniform(BASE)))
    assert max(worst.values()) <= BOUNDS["float64"], worst


@pytest.mark.parametrize("more", ["", pytest.param(OVERLAP, marks=pytest.mark.short)])
def test_a_rank_dies(more):
    lived, rows = live(job(more), faults=[kill(1, during="backward", step=5)])
    assert widths(lived) == {0: 1, 2: 2, 3: 2}
    assert_same_training(lived)
    assert_every_sample_once(rows)


def test_steps_are_taken_again():
    lived, rows = live(job(), faults=[kill(1, during="applied", step=5)])
    assert_same_training(lived)
    assert_every_sample_once(rows)


@pytest.mark.parametrize("more", ["", OVERLAP])
def test_a_rank_rejoins(more):
    lived, _ = live(job(more), faults=[kill(1, during="backward", step=5)], back={1: 12})
    assert widths(lived) == dict.fromkeys(range(4), 2)
    assert_same_training(lived)


def test_a_replica_is_idle_for_some_steps():
    """Its survivors get the counts of the steps that they missed."""
    lived, _ = live(job("--ntp-min-tp-width 2"), faults=[kill(1, during="backward", step=5)], back={1: 10})
    assert widths(lived) == dict.fromkeys(range(4), 2)
    assert_same_training(lived)


def test_a_single_replica_in_half_precision():
    """All is from copies; what is stepped are other tensors than the parameters."""
    lived, _ = live(job("--bf16", dtype="float32", tp=4, dp=1), faults=[kill(2, during="backward", step=5)])
    worst = largest_differences(as_if_always_there(lived), run(uniform(BASE, **BF16)))
    bounds = bounds_of(BASE, "bfloat16")
    assert all(worst[key] <= bounds[key] for key in worst), (worst, bounds)


SAVED = f"{OVERLAP} --dist-ckpt-optim-fully-reshardable"


@pytest.mark.parametrize(
    "layouts",
    [
        ("TP2+TP1", "TP2+TP1"),
        ("TP4+TP3", "TP3+TP3"),
        ("TP4+TP3", None),
        (None, "TP4+TP3"),
    ],
    ids=str,
)
def test_a_checkpoint_of_one_layout_resumes_in_another(layouts, tmp_path):
    """None: no loss, and stock Megatron."""
    first, second = (
        degraded(BASE, layout, more=SAVED, group_adam=True) if layout else job(SAVED, tp=4, enabled=False)
        for layout in layouts
    )
    seen = run(with_arguments(first, saving(tmp_path)))
    found = joined(seen, run(with_arguments(second, loading(tmp_path))))
    worst = largest_differences(found, run(uniform(BASE)))
    assert max(worst.values()) <= BOUNDS["float64"], worst
