"""Compare a run of a loop with accelerate that lost ranks with one that did not."""

from collections.abc import Collection, Mapping

import numpy as np

from tests.harness.accelerate.job import Job, Seen, undisturbed

BOUNDS = {"float64": 1e-12, "float32": 1e-6}
"""Relative, of weights and metrics."""
_COUNTED = ("steps", "rates", "engine_steps", "samples", "micro_steps", "reduced")


def of_weights(mine: Seen, theirs: Seen) -> float:
    """Return the largest difference, relative to the largest value of a tensor."""
    return max(
        float(np.abs(mine.weights[name] - other).max() / np.abs(other).max()) for name, other in theirs.weights.items()
    )


def differences(outcomes: Mapping[int, Seen], job: Job, *, joined: Collection[int] = ()) -> dict[str, float]:
    """Return the largest relative differences from the run without losses: of the evaluations, and of the weights.
    `joined`: slots that have rejoined; what they evaluated before that counts for nothing."""
    theirs = undisturbed(job)[0]
    return {
        "loss": max(
            abs(value - other) / abs(other)
            for slot, mine in outcomes.items()
            if slot not in joined
            for value, other in zip(mine.metrics, theirs.metrics, strict=True)
        ),
        "weights": max(of_weights(mine, theirs) for mine in outcomes.values()),
    }


def assert_same_training(
    outcomes: Mapping[int, Seen], job: Job, *, metrics: bool = True, joined: Mapping[int, int] | None = None
) -> None:
    """Assert that all ranks have the weights, counters and schedule of the run without losses. `joined`: slots that
    have rejoined, and the step; they have run through what was before without computing."""
    theirs = undisturbed(job)[0]
    for slot, mine in outcomes.items():
        found = of_weights(mine, theirs)
        assert found <= BOUNDS[job.dtype], (slot, found)
        for name in _COUNTED:
            here, there = getattr(mine, name), getattr(theirs, name)
            if name in ("rates", "reduced") and joined and slot in joined:
                here, there = here[joined[slot] :], there[joined[slot] :]
            assert here == there, (slot, name, here, there)
        if metrics and not (joined and slot in joined):
            np.testing.assert_allclose(mine.metrics, theirs.metrics, rtol=BOUNDS[job.dtype])
    assert [mine.is_main for _, mine in sorted(outcomes.items())] == [True] + [False] * (len(outcomes) - 1)
