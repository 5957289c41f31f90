"""How many steps lie between two comparisons of the replicas. PURE.

A comparison reads all of a rank's weights. How often it is worth that depends on the time of a step, so the interval
follows a budget: a share of the step time. Each comparison decides the interval anew from the measurements of all
ranks, so that all decide the same. Comparisons that are always made (`replica_comparison.py`) do not depend on it.
"""

import dataclasses
import math
from collections.abc import Sequence

AT_LEAST_EVERY = 100
"""The longest interval in steps, however much a comparison costs."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The durations that one rank measured, in seconds."""

    digests_s: float
    """The rank's own digests, in this comparison."""
    exchange_s: float
    """The exchange of the last comparison, including the wait for other ranks; 0 if there was none."""
    step_s: float
    """The fastest step since the last comparison; 0 if there was none."""


def steps_until_next(measured: Sequence[Measured], budget: float) -> int:
    """Return the number of steps until the next comparison.

    Args:
        measured: The measurements of all ranks. The last rank to enter an exchange has not waited in it, so the
            shortest
            one counts.
        budget: The share of the step time that comparisons may take.
    """
    cost = max(one.digests_s for one in measured) + min(one.exchange_s for one in measured)
    step = min((one.step_s for one in measured if one.step_s), default=0.0)
    if not step:
        return 1
    return max(1, min(AT_LEAST_EVERY, math.ceil(cost / (budget * step))))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompareSchedule:
    """The step of the next comparison, as far as this rank knows."""

    every: int | None
    """The user's interval in steps, 0 for no comparisons; None: by the budget."""
    epoch: int = -1
    """The epoch that `next_at` belongs to."""
    next_at: int = 0

    def seen(self, step: int, epoch: int) -> "CompareSchedule":
        """Return the schedule for a step of an epoch. The first step of a new epoch is always compared.

        All ranks enter an epoch at the same step. A joining rank knows no more than that, and a loss may have kept some
        ranks from hearing the last decision.
        """
        if epoch == self.epoch:
            return self
        return dataclasses.replace(self, epoch=epoch, next_at=step + 1)

    def is_due(self, step: int) -> bool:
        """Whether a comparison is due after so many steps."""
        if self.every == 0 or not step:
            return False
        is_users_step = self.every is not None and step % self.every == 0
        return is_users_step or step == self.next_at or (self.every is None and step > self.next_at)

    def compared(self, step: int, measured: Sequence[Measured], budget: float) -> "CompareSchedule":
        """Return the schedule after a comparison, from the measurements of all ranks."""
        if self.every is not None:
            return dataclasses.replace(self, next_at=0)
        return dataclasses.replace(self, next_at=step + steps_until_next(measured, budget))
