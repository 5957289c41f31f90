"""What all ranks of a live job know of its checkpoints: which one is written, and whether the newest failed. PURE.

Joining ranks get it from the others.
"""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveResult:
    """What has become of a save in a section: the step of the checkpoint, or 0."""

    scheduled: int = 0
    written: int = 0
    failed: int = 0
    non_persistent: bool = False
    """Whether it is one that Megatron removes when there is a newer one."""

    def numbers(self, *, counts: bool) -> list[float]:
        """Return the numbers for a vote, to which one rank contributes."""
        numbers = self.scheduled, self.written, self.failed, self.non_persistent
        return [float(number) if counts else 0.0 for number in numbers]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "SaveResult":
        """Return the result that the vote has summed."""
        scheduled, written, failed, non_persistent = map(int, numbers)
        return cls(scheduled=scheduled, written=written, failed=failed, non_persistent=bool(non_persistent))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveProgress:
    """What all ranks know of the newest save."""

    scheduled_in: int | None = None
    """The epoch in which it was scheduled; None if nothing is being written."""
    again: bool = False
    """Whether it was void, and is to be taken again when the step is over."""
    non_persistent: bool = False
    """Whether it is one that Megatron removes when there is a newer one."""
    failed_after: int = 0
    """The step whose checkpoint could not be written, if none of that step or a later one was written since; else 0."""

    def begun(self, result: SaveResult, epoch: int) -> "SaveProgress":
        """Return the progress after a section that may have scheduled a save."""
        if not result.scheduled:
            return self
        return dataclasses.replace(self, scheduled_in=epoch, again=False, non_persistent=result.non_persistent)

    def asked(self, *, void: bool, unfinished: bool) -> "SaveProgress":
        """Return the progress after a question about the save that is being written."""
        if unfinished and not void:
            return self
        return dataclasses.replace(self, scheduled_in=None, again=void)

    def ended(self, result: SaveResult) -> "SaveProgress":
        """Return the progress after a save that was written or has failed, if there was one."""
        if result.failed:
            return dataclasses.replace(self, again=False, failed_after=result.failed)
        if result.written >= self.failed_after:
            return dataclasses.replace(self, failed_after=0)
        return self
