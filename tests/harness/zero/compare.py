"""Compare a run that lost ranks with one that did not, and check that every sample was used once."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.harness.zero.job import RATE, Job, Rows, Seen, undisturbed

BOUNDS = {"float64": 1e-12, "float32": 1e-6}
"""Relative, after 20 steps at Adam's eps 1e-4: what a changed order of summation makes."""


def within(found: Mapping[str, float], dtype: str) -> bool:
    """Whether the differences are no larger than what rounding makes; DeepSpeed takes norms in float32, whatever the
    gradients are."""
    bounds = {"loss": BOUNDS[dtype], "weights": BOUNDS[dtype], "grad_norm": BOUNDS["float32"]}
    return all(found[key] <= bound for key, bound in bounds.items())


def differences(outcomes: Mapping[int, Seen], rows: Rows, job: Job) -> dict[str, float]:
    """The largest relative ones, of all ranks that are left: of any step's loss and norm, and of the last weights."""
    reference, whole = undisturbed(job), undisturbed_weights(job)
    norms = [
        abs(norm - reference[0].norms[step]) / max(reference[0].norms[step], 1e-300)
        for seen in outcomes.values()
        for step, norm in seen.norms.items()
    ]
    return {
        "loss": largest(_losses(counted(rows)), _losses_of_all(reference)),
        "grad_norm": max(norms),
        "weights": max(of_weights(seen, whole) for seen in outcomes.values()),
    }


def assert_same_training(outcomes: Mapping[int, Seen], rows: Rows, job: Job, *, once: bool = True) -> None:
    """Assert that the training equals that of an undisturbed run, and used every sample once."""
    reference = undisturbed(job)[0]
    for seen in outcomes.values():
        assert (seen.steps, seen.samples, seen.rates) == (reference.steps, reference.samples, reference.rates)
    found = differences(outcomes, rows, job)
    assert within(found, job.dtype), found
    assert not once or used_once(rows, job)


def undisturbed_weights(job: Job) -> dict[str, Any]:
    """Whole."""
    return together(undisturbed(job), job)


def together(outcomes: Mapping[int, Seen], job: Job) -> dict[str, Any]:
    """Combine the weights of the slots of the first replica, which has lost no slot."""
    slots = [outcomes[slot] for slot in range(job.tp)]
    if job.mpu:
        return {name: value for slot in slots for name, value in slot.weights.items()}
    return {
        name: np.concatenate([slot.weights[name] for slot in slots], axis=slots[0].places[name][0])
        if name in slots[0].places
        else value
        for name, value in slots[0].weights.items()
    }


def of_weights(mine: Seen, theirs: Mapping[str, Any]) -> float:
    """Relative to the largest value of a tensor; of what this rank has of it. What training has moved by less than
    rounding of one step, as the bias of attention's keys, has no gradient: there it is relative to a step."""
    largest = 0.0
    for name in mine.weights:
        whole, (dim, places) = theirs[name], mine.places.get(name, (0, None))
        other = whole if places is None else np.take(whole, places, axis=dim)
        assert mine.weights[name].shape == other.shape, (name, mine.weights[name].shape, other.shape)
        scale = np.abs(whole).max()
        scale = RATE if scale < RATE * BOUNDS["float32"] else scale
        largest = max(largest, float(np.abs(mine.weights[name] - other).max() / scale))
    return largest


def largest(mine: Mapping[int, float], theirs: Mapping[int, float]) -> float:
    """Differences over the steps of both, which must be the same."""
    assert mine.keys() == theirs.keys(), (sorted(mine), sorted(theirs))
    return max(abs(mine[step] - theirs[step]) / abs(theirs[step]) for step in theirs)


def counted(rows: Rows) -> list[list[Any]]:
    """The micro-batches of the attempts that counted: each step's last."""
    found = [row for row in rows if row[0] == "micro"]
    newest: dict[int, int] = defaultdict(int)
    for _, step, epoch, *_ in found:
        newest[step] = max(epoch, newest[step])
    return [row for row in found if row[2] == newest[row[1]]]


def used_once(rows: Rows, job: Job) -> bool:
    """Whether every sample of every step was."""
    drawn = Counter((step, sample) for _, step, _, _, *samples in counted(rows) for sample in samples)
    return set(drawn.values()) == {1} and len(drawn) == job.steps * job.replicas * job.each * job.micro


def _losses(rows: Rows) -> dict[int, float]:
    found: dict[int, list[float]] = defaultdict(list)
    for _, step, _, loss, *_ in rows:
        found[step].append(loss)
    return {step: float(np.mean(sorted(losses))) for step, losses in found.items()}


def _losses_of_all(reference: Mapping[int, Seen]) -> dict[int, float]:
    steps = reference[0].losses
    return {
        step: float(np.mean(sorted(loss for seen in reference.values() for loss in seen.losses[step])))
        for step in steps
    }
