"""The tokens that TRL's trainers count in `compute_loss`, by a gather over the ranks, and report as `num_tokens`.

While ranks are lost, a rank computes other ranks' micro-batches as well, and its gathers return its own values as if
all nominal ranks had them (`world.py`). A step may also be computed twice. So the count of a step is taken from the
vote on it, in which each rank reports the tokens of its share, and the trainer's total is set to that.
"""

from typing import Any

_TOTAL, _METRICS, _REPORTED = "_total_train_tokens", "_metrics", "num_tokens"


class TrlTokens:
    """The total of one trainer; of one that counts none it is 0."""

    def __init__(self, trainer: Any, *, nominal: int) -> None:
        self._trainer, self._nominal = trainer, nominal
        self._before = self._kept = 0
        self._repeats = False

    @property
    def total(self) -> int:
        """The trainer's own total."""
        return int(getattr(self._trainer, _TOTAL, 0))

    def begin_micro_batch(self, before: int, *, first: bool, repeats: bool) -> None:
        """Note a micro-batch that is about to be computed.

        Args:
            before: The total before its step.
            first: Whether it is the first of this rank's share: the step may have been begun before.
            repeats: Whether it repeats the one before, and counts for nothing.
        """
        if first:
            self._before = before
            self.set(before)
        self._repeats, self._kept = repeats, self.total

    def of_share(self) -> float:
        """Return the tokens of this rank's share of the step; the sum over the ranks is the step's."""
        return ((self._kept if self._repeats else self.total) - self._before) / self._nominal

    def end_micro_batch(self) -> None:
        """Take back what a repeated micro-batch has counted."""
        if self._repeats:
            self.set(self._kept)

    def set(self, total: int) -> None:
        """Set the total, also where it is reported in the next log line."""
        if not hasattr(self._trainer, _TOTAL):
            return
        setattr(self._trainer, _TOTAL, total)
        metrics = getattr(self._trainer, _METRICS, {}).get("train", {})
        if _REPORTED in metrics:
            metrics[_REPORTED] = [total]
