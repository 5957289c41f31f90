"""When replicas are compared, between the comparisons that are always made. PURE.

A comparison reads all of a rank's weights, which costs as much as it costs; how often it is worth that depends on how
long a step takes. So the interval follows a budget: a share of the step time. It is decided anew with each comparison,
from what all ranks measured, so that all decide the same.
"""

import dataclasses
import math
from collections.abc import Sequence

AT_LEAST_EVERY = 100
"""Steps, however much a comparison costs."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What one rank measured, in seconds."""

    digests_s: float
    """Its own digests, in this comparison."""
    exchange_s: float
    """The exchange of the last comparison, with the wait for the other ranks; 0 where there was none."""
    step_s: float
    """The fastest step since the last comparison; 0 where there was none."""


def steps_until_next(measured: Sequence[Measured], budget: float) -> int:
    """The number of steps to the next comparison.

    Args:
        measured: of all ranks. Who comes to an exchange last has not waited in it, so the shortest one counts.
        budget: the share of the step time that comparisons may take.
    """
    cost = max(one.digests_s for one in measured) + min(one.exchange_s for one in measured)
    step = min((one.step_s for one in measured if one.step_s), default=0.0)
    if not step:
        return 1
    return max(1, min(AT_LEAST_EVERY, math.ceil(cost / (budget * step))))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompareSchedule:
    """When the next comparison is due, as far as this rank knows."""

    every: int | None
    """What the user has set: so many steps between two comparisons, 0 for none; None: by the budget."""
    epoch: int = -1
    """The epoch that `next_at` belongs to."""
    next_at: int = 0

    def seen(self, step: int, epoch: int) -> "CompareSchedule":
        """In a new epoch, which all ranks enter at the same step, the next comparison is after its first step: whoever
        joined knows no more, and a loss may have kept some ranks from hearing what was decided last."""
        if epoch == self.epoch:
            return self
        return dataclasses.replace(self, epoch=epoch, next_at=step + 1)

    def is_due(self, step: int) -> bool:
        """Whether a comparison is due after so many steps."""
        if self.every == 0 or not step:
            return False
        of_the_user = self.every is not None and step % self.every == 0
        return of_the_user or step == self.next_at or (self.every is None and step > self.next_at)

    def compared(self, step: int, measured: Sequence[Measured], budget: float) -> "CompareSchedule":
        """After a comparison, from what all ranks measured."""
        if self.every is not None:
            return dataclasses.replace(self, next_at=0)
        return dataclasses.replace(self, next_at=step + steps_until_next(measured, budget))
