"""Models, and combinations of features, on degraded replicas: each against the uniform run."""

import pytest

from benchmarks.numerics import BF16, BOUNDS, bounds_of, compared
from ntp_plugin.errors import Refused
from tests.harness.parity.job import run
from tests.harness.parity.layouts import BASE, HYBRID, TOGETHER, degraded


@pytest.mark.parametrize(
    ("feature", "layout"),
    [
        (HYBRID, "TP4+TP3"),
        (f"{HYBRID}; distributed optimizer", "TP3+TP3"),
        ("no clipping", "TP4+TP3"),
        ("selective recompute", "TP4+TP3"),
        ("recompute modules", "TP3+TP3"),
        *((feature, "TP4+TP3") for feature in TOGETHER if not feature.startswith((HYBRID, "sgd"))),
    ],
)
def test_float64(feature, layout):
    worst = compared(feature, layout)
    assert max(worst.values()) <= BOUNDS["float64"], worst


def test_bf16_with_plain_ddp_within_four_times_its_noise_floor():
    worst, bounds = compared(BASE, "TP4+TP3", **BF16), bounds_of(BASE, "bfloat16")
    assert all(worst[key] <= bounds[key] for key in worst), (worst, bounds)


def test_a_layer_that_the_script_has_frozen_is_refused_by_its_name():
    with pytest.raises(Refused, match=r"mlp\.linear_fc1\.weight is frozen.*Fix: ."):
        run(degraded(BASE, "TP2+TP1", spoil="layer_frozen"))
