"""Whether a job that lost ranks has trained what its undisturbed reference run trained.

Framework-free: losses and weights are whatever numpy takes. Survivors must agree bit for bit with each other, and with
the reference run up to the changed order of sums.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """What one rank has trained."""

    losses: Mapping[int, float]
    """Step -> the loss over the whole global batch; a joining rank has those since it came."""
    weights: Sequence[npt.ArrayLike]
    attempts: Mapping[int, int]
    """Step -> the epoch in which the gradients that it applied had been reduced."""


def assert_same_training(outcomes: Mapping[int, Trained], reference: Trained, *, rtol: float) -> None:
    """Check that ranks that survived faults trained what a run without faults trained.

    Args:
        outcomes: Slot -> what it trained; weights must agree bit for bit between slots.
        reference: What any rank of the run without faults trained.
        rtol: How far losses and weights may be from that run's: another order of summation rounds differently.

    Raises:
        AssertionError: Something differs by more.
    """
    first = next(iter(outcomes.values()))
    for slot, outcome in outcomes.items():
        pairs = zip(outcome.weights, first.weights, reference.weights, strict=True)
        for index, (weight, same, expected) in enumerate(pairs):
            what = f"weight {index} of slot {slot}"
            np.testing.assert_array_equal(np.asarray(weight), np.asarray(same), f"{what} differs between survivors")
            np.testing.assert_allclose(np.asarray(weight), np.asarray(expected), rtol, rtol, err_msg=what)
        for step, loss in outcome.losses.items():
            np.testing.assert_allclose(
                loss, reference.losses[step], rtol, 0, err_msg=f"loss of slot {slot} at step {step}"
            )


def assert_every_sample_once(
    outcomes: Iterable[Trained], used: Iterable[tuple[int, int, int]], *, steps: int, batch: int
) -> None:
    """Check that every step used each sample of its global batch once.

    Args:
        outcomes: What the ranks trained.
        used: (step, epoch, sample) for each sample of each attempt at a step, also of ranks that were lost in it.
        steps: How many steps were taken.
        batch: Samples in a global batch.

    Raises:
        AssertionError: A step used a sample twice or not at all.
    """
    attempts: dict[int, int] = {}
    for outcome in outcomes:
        for step, epoch in outcome.attempts.items():
            assert attempts.setdefault(step, epoch) == epoch, f"step {step}: members applied different attempts"
    rows = list(used)
    for step in range(1, steps + 1):
        samples = sorted(sample for at, epoch, sample in rows if at == step and epoch == attempts[step])
        assert samples == list(range(batch)), f"step {step} of {batch} samples used {samples}"
