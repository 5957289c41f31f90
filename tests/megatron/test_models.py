"""Models and features of Megatron on hurt replicas, each against the uniform run."""

import pytest

from benchmarks.numerics import BOUNDS, compared
from benchmarks.parity.layouts import HYBRID, OPTIONS

BOUND = BOUNDS["float64"]


def assert_same(feature, layout, option=""):
    worst = compared(feature, layout, option=OPTIONS.get(option, ""))
    assert max(worst.values()) <= BOUND, worst


@pytest.mark.parametrize(
    ("layout", "option"),
    [("TP4+TP3", ""), ("TP3+TP3", "distributed optimizer")],
)
def test_a_hybrid_model_of_attention_and_mlp(layout, option):
    """Its layers stand in another order than a GPT's, and each by itself."""
    assert_same(HYBRID, layout, option)
