"""The moments of a step and of a recovery, by name, for whoever makes something happen there: rehearsals and tests.

A moment is of a step, by its number, or of a recovery, by the epoch that it leads to. Nothing of this is in place in an
ordinary run: an adapter's `fault_points.py` puts it around the methods that a moment lies before or behind, when asked
to.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # names of moments are read where there is no torch
    import torch

    from ntp_plugin.copies.slices import TensorSlice
    from ntp_plugin.recovery.driver import Driver

OF_STEPS: Mapping[str, str] = {
    "compare": "before replicas are compared, if it is time for that (Megatron)",
    "step": "a step begins (Megatron)",
    "forward": "before the forward of a micro-batch",
    "backward": "before the backward of a micro-batch",
    "accumulated": "a micro-batch is through its backward (DeepSpeed)",
    "exchange": "before it sends to another stage, or receives from it (Megatron)",
    "reduce": "before its gradients are reduced, while those of others may be",
    "reduced": "all micro-batches are done, and their gradients reduced over the lanes (Megatron)",
    "vote": "the reduced gradients are there, and nobody has applied them",
    "apply": "after the vote, before the optimizer changes anything",
    "gather": "before a sharded optimizer gathers the new weights",
    "applied": "the optimizer has stepped",
    "scheduled": "a step is over, and told from memory because a loss followed its vote (Megatron)",
    "stepped": "after the engine's step (DeepSpeed)",
    "between": "in what the framework does together between two steps (Megatron)",
    "save": "before a checkpoint is written",
    "written": "after it",
}
OF_RECOVERIES: Mapping[str, str] = {
    "report": "broken out of the work, before it reports where it stands",
    "plan": "all have reported; before it plans",
    "regroup": "before the process groups are edited",
    "resume": "before state is moved",
    "rolled": "a step that others had applied is applied here too (DeepSpeed)",
    "moved": "the state is there; before the model is put into the new layout (Megatron)",
    "built": "the model has its new layout; before its buffers are made again (Megatron)",
    "made": "after that (Megatron)",
    "resumed": "at the end of a recovery, before the step is taken again",
    "arriving": "in the first step of a slot that came back, before all have what its optimizer keeps (Megatron)",
    "arrived": "after that (Megatron)",
}
FAULT_POINTS = (*OF_STEPS, *OF_RECOVERIES)
ALL_DONE = "all done"
"""Behind all others: every member has ended its training. Nothing is made to happen there."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight:
    """A tensor that is trained, as far as this process has it."""

    piece: "TensorSlice"
    values: "torch.Tensor"
    is_cut: bool
    """Over the TP slots; else each of them has it."""


class Reached(Protocol):
    """Hears of every moment that this process comes to; what it does there it does to this process."""

    def __call__(self, fault_point: str, step: int | None = None, *, epoch: int | None = None) -> None: ...


type Weights = Callable[[], Iterable[Weight]]
"""Those of this process in the layout of now."""
type IsHere = Callable[[str, Weights], None]
"""Hears that this process has a slot of a job, and how to come by its weights."""


class FaultPoints:
    """Puts the telling around methods, of one kind of moments."""

    def __init__(self, reached: Reached, kind: str, number: Callable[[], int]) -> None:
        """`kind`: step or epoch, whichever number they go by."""
        self._reached, self._kind, self._number = reached, kind, number

    def at(self, owner: Any, name: str, before: str | None, after: str | None = None) -> None:
        """Calls of this method are between these two moments. The numbers are those from before it."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def told(*args: Any, **kwargs: Any) -> Any:
            where: dict[str, Any] = {self._kind: self._number()}
            if before:
                self._reached(before, **where)
            result = original(*args, **kwargs)
            if after:
                self._reached(after, **where)
            return result

        setattr(owner, name, told)


def of_recoveries(driver: "Driver", trainer: Any, reached: Reached) -> FaultPoints:
    """Those that every recovery has, and the end of all; more of an adapter's own may follow."""
    fault_points = FaultPoints(reached, "epoch", lambda: driver.heading_for)
    fault_points.at(driver, "_report", "report")
    fault_points.at(trainer, "plan", "plan")
    fault_points.at(driver, "_regroup", "regroup")
    fault_points.at(trainer, "resume_from", "resume", "resumed")
    fault_points.at(driver, "finish", None, ALL_DONE)
    return fault_points
