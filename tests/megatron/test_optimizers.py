"""Optimizers on degraded replicas: complete, and sharded over lanes."""

import pytest

from benchmarks.numerics import BOUNDS, compared
from ntp_plugin.errors import Refused
from tests.harness.parity.job import run
from tests.harness.parity.layouts import BASE, OPTIONS, degraded


@pytest.mark.parametrize(
    ("feature", "layout"),
    [
        ("sgd", "TP4+TP3"),
        ("sgd, momentum", "TP3+TP3"),
        ("sgd, momentum; parameter gather overlap", "TP4+TP3"),
    ],
)
def test_float64(feature, layout):
    worst = compared(feature, layout)
    assert max(worst.values()) <= BOUNDS["float64"], worst


@pytest.mark.short
@pytest.mark.parametrize("option", ["", OPTIONS["distributed optimizer"]])
def test_an_unknown_optimizer_is_refused_by_its_name(option):
    """Megatron takes what it finds: here a subclass replaces torch's own."""
    with pytest.raises(Refused, match=r"optimizer .*Preconditioned is not known to be element-wise.*Fix: use SGD"):
        run(degraded(BASE, "TP2+TP1", more=option, spoil="optimizer_replaced"))
