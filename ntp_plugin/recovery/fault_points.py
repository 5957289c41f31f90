"""Named points of a step and of a recovery, at which tests and the CPU emulation inject faults.

A fault point belongs to a step, by its number, or to a recovery, by the epoch that it leads to. An ordinary run has
none of this: an adapter's `fault_points.py` wraps the methods around a fault point only when asked to.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # the names of fault points are read without torch
    import torch

    from ntp_plugin.copies.slices import TensorSlice
    from ntp_plugin.recovery.driver import Driver

STEP_FAULT_POINTS: Mapping[str, str] = {
    "compare": "before replicas are compared, if that is due (Megatron)",
    "step": "a step begins (Megatron)",
    "forward": "before the forward of a micro-batch",
    "backward": "before the backward of a micro-batch",
    "accumulated": "a micro-batch is through its backward (DeepSpeed)",
    "exchange": "before it sends to another stage, or receives from it (Megatron)",
    "dispatch": "before a layer sends tokens to experts of other ranks (Megatron)",
    "combine": "before it gets their results back (Megatron)",
    "gather-forward": "before it gathers the weights of a module for its forward (ZeRO-3)",
    "gather-backward": "before it gathers them for the backward (ZeRO-3)",
    "scatter": "it has its slices of reduced gradients, and before it adds them up (ZeRO-3)",
    "reduce": "before its gradients are reduced, while those of others may be",
    "reduced": "all micro-batches are done, and their gradients reduced over the lanes (Megatron)",
    "vote": "the gradients are reduced, and nobody has applied them",
    "apply": "after the vote, before the optimizer changes anything",
    "gather": "before a sharded optimizer gathers the new weights",
    "applied": "the optimizer has stepped",
    "scheduled": "a step is over, and its result comes from memory, as a loss followed its vote (Megatron)",
    "stepped": "after the engine's step (DeepSpeed)",
    "between": "in the framework's collectives between two steps (Megatron)",
    "save": "before a checkpoint is written",
    "written": "after it",
}
RECOVERY_FAULT_POINTS: Mapping[str, str] = {
    "report": "the work is interrupted, before the rank reports its state",
    "plan": "all have reported; before it plans",
    "regroup": "before the process groups are edited",
    "resume": "before state is moved",
    "rolled": "a step that others had applied is applied here too (DeepSpeed)",
    "moved": "state has moved; before the model is put into the new layout (Megatron)",
    "built": "the model has its new layout; before its buffers are made again (Megatron)",
    "made": "after that (Megatron)",
    "resumed": "at the end of a recovery, before the step is taken again",
    "arriving": "in the first step of a joining rank, before its optimizer state has arrived (Megatron)",
    "arrived": "after that (Megatron)",
}
FAULT_POINTS = (*STEP_FAULT_POINTS, *RECOVERY_FAULT_POINTS)
ALL_DONE = "all done"
"""The last point: every member has ended its training. No fault is injected there."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight:
    """A trained tensor, as far as this process holds it."""

    tensor_slice: "TensorSlice"
    values: "torch.Tensor"
    is_cut: bool
    """Whether it is cut over the TP slots; otherwise each slot holds all of it."""
    shared_by: str = ""
    """Who holds all of it together: an expert group, or all ranks with ZeRO-3. Empty if a replica does."""


class Reached(Protocol):
    """Called at every fault point that this process reaches. What it does there it does to this process."""

    def __call__(self, fault_point: str, step: int | None = None, *, epoch: int | None = None) -> None: ...


type Weights = Callable[[], Iterable[Weight]]
"""The weights of this process in the current layout."""
type IsHere = Callable[[str, Weights], None]
"""Called when this process has a slot of a job, with the slot and a way to get its weights."""


class FaultPoints:
    """Wraps methods so that they report the fault points of one kind."""

    def __init__(self, reached: Reached, kind: str, number: Callable[[], int]) -> None:
        """`kind` says whether the points are numbered by step or by epoch; `number` returns that number."""
        self._reached, self._kind, self._number = reached, kind, number

    def at(self, owner: Any, name: str, before: str | None, after: str | None = None) -> None:
        """Report these points before and after each call of a method. Both have the number from before the call."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            where: dict[str, Any] = {self._kind: self._number()}
            if before:
                self._reached(before, **where)
            result = original(*args, **kwargs)
            if after:
                self._reached(after, **where)
            return result

        setattr(owner, name, wrapped)


def recovery_fault_points(driver: "Driver", trainer: Any, reached: Reached) -> FaultPoints:
    """Install the fault points that every recovery has, and the end; an adapter may add its own."""
    fault_points = FaultPoints(reached, "epoch", lambda: driver.target_epoch)
    fault_points.at(driver, "_report", "report")
    fault_points.at(trainer, "plan", "plan")
    fault_points.at(driver, "_regroup", "regroup")
    fault_points.at(trainer, "resume_from", "resume", "resumed")
    fault_points.at(driver, "finish", None, ALL_DONE)
    return fault_points
