"""The steps of the Trainer, as far as they may have to be taken again: which micro-batches, and what goes with them."""

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(kw_only=True, slots=True)
class Step:
    """One step of the Trainer."""

    number: int
    """Counted from the start of this job."""
    data_epoch: int
    first: int
    """The index of its first micro-batch in the data epoch, in each nominal rank's loader."""
    count: int
    """Its micro-batches in each nominal rank; the last step of a data epoch may have fewer than others."""
    own: Sequence[Any] = ()
    """The micro-batches of this nominal rank as its loader gave them; empty in a rank that has joined since."""
    counts_items: bool = False
    """Whether the loss is divided by the number of labelled tokens in the step."""
    items: int | None = None
    """That number over all nominal ranks; None if each rank divides by its own."""
    tokens_before: int = 0
    """What a trainer of TRL had counted before the step (`trl_tokens.py`)."""
    groups: Sequence[dict[str, Any]] = ()
    """The learning rates and what else the optimizer's groups had."""

    def share(self, numbers: Sequence[int], each: int) -> list[int]:
        """Return which of these numbers of a nominal global batch the step has; `each`: of them in a nominal rank."""
        return [number for number in numbers if number % each < self.count]

    def without_inputs(self) -> "Step":
        """Return what a joining rank gets of it."""
        return dataclasses.replace(self, own=())


def due(share: int, call: int, calls: int) -> int:
    """Return how many micro-batches of a share are to be done after one of the Trainer's calls, counted from 0."""
    return -(-share * (call + 1) // calls)
