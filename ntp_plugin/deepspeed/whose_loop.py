"""What the accumulation window asks of the loop around it: the user's own, or that of a framework.

A user's loop draws one micro-batch for each forward, and the window knows nothing else of it. A framework's loop, such
as that of the Hugging Face `Trainer`, has counters of its own. It replaces this object (`hf/trainer_loop.py`,
`accelerate_loop/user_loop.py`).
"""

from collections.abc import Sequence
from typing import Any

from ntp_plugin.errors import Refused


class UserDraws:
    """A loop of the user's own."""

    def __init__(self, each: int) -> None:
        self.micro_steps = each
        """By how much a step advances the engine's count of micro-steps."""

    def share(self, _step: int, numbers: Sequence[int]) -> Sequence[int]:
        """Return which of these micro-batches a step has; the last step of a data epoch may have fewer than others."""
        return numbers

    def order(self, followed: Any, step: int, _share: Sequence[int]) -> Sequence[int]:
        """Return the order in which the loop draws its share of a step from this loader."""
        order: Sequence[int] = followed.stream.order_of(step)
        return order

    def losses_in(self, step_batch: int) -> int:
        """Return by what the sum of a step's losses is divided for their mean; `step_batch`: its micro-batches."""
        return step_batch

    def counted_here(self) -> float:
        """Return what this rank's loop has counted in the step's micro-batches; the vote adds it up over the ranks."""
        return 0.0

    def may_admit(self) -> bool:
        """Whether joining ranks may come in at this accumulation window."""
        return True

    def unfollowed(self) -> Refused:
        """Return the error of a loop that trains on batches of a loader that cannot be rewound."""
        return Refused(
            "the engine trains on batches of a loader that cannot be rewound",
            fix="use the one that deepspeed.initialize(training_data=...) returns, or a DataLoader with a"
            " DistributedSampler of all ranks",
        )

    def line_up(self) -> None:
        """Agree with the other ranks' loops on where all are, at the end of a recovery; a loop that nothing but the
        training steps ties to the others need not."""

    def progress(self) -> Any:
        """Return what a joining rank's loop must know, on the rank that reports it."""
        return None

    def take_progress(self, progress: Any) -> None:
        """Take it, on a joining rank."""
