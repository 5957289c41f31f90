"""Compare a run of the Trainer that lost ranks with one that did not."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.harness.hf.job import Job, Seen, undisturbed

BOUNDS = {"float64": 1e-12, "float32": 1e-6}
"""Relative, of weights."""
OF_LOG = 1e-6
"""The Trainer adds up its losses in float32, and DeepSpeed takes norms in float32, whatever the model has."""
_COUNTED = ("step", "epoch", "learning_rate")
_MEASURED = ("loss", "grad_norm", "eval_loss", "eval_sum", "num_input_tokens_seen", "num_tokens")


def of_weights(mine: Seen, theirs: Seen) -> float:
    """Return the largest difference, relative to the largest value of a tensor."""
    return max(
        float(np.abs(mine.weights[name] - other).max() / np.abs(other).max()) for name, other in theirs.weights.items()
    )


def differences(outcomes: Mapping[int, Seen], job: Job) -> dict[str, float]:
    """Return the largest relative differences from the run without losses: of the losses that it logs, and of the
    weights."""
    theirs = undisturbed(job)[0]
    losses = [line["loss"] for line in theirs.log if "loss" in line]
    return {
        "loss": max(
            abs(line - other) / abs(other)
            for mine in outcomes.values()
            for line, other in zip([line["loss"] for line in mine.log if "loss" in line], losses, strict=True)
        ),
        "weights": max(of_weights(mine, theirs) for mine in outcomes.values()),
    }


def assert_same_training(outcomes: Mapping[int, Seen], job: Job) -> None:
    """Assert that all ranks have the weights, counters and log of the run without losses."""
    theirs = undisturbed(job)[0]
    for slot, mine in outcomes.items():
        found = of_weights(mine, theirs)
        assert found <= BOUNDS[job.dtype], (slot, found)
        for name in ("steps", "epoch", "rate", "engine_steps", "samples", "micro_steps", "tokens"):
            assert getattr(mine, name) == getattr(theirs, name), (slot, name)
        assert_same_log(mine.log, theirs.log)
    assert [mine.writes for _, mine in sorted(outcomes.items())] == [True] + [False] * (len(outcomes) - 1)


def assert_same_log(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """Assert that the log has the same lines, but for times."""
    assert len(mine) == len(theirs), (mine, theirs)
    for line, other in zip(mine, theirs, strict=True):
        for name in _COUNTED:
            assert line.get(name) == other.get(name), (name, line, other)
        for name in _MEASURED:
            assert (name in line) == (name in other), (name, line, other)
            assert name not in other or abs(line[name] - other[name]) <= OF_LOG * abs(other[name]), (name, line, other)
