"""Runs a framework's training loop as numbered sections, each of which ends with a vote.

A section is a training step, an evaluation, or a checkpoint. All ranks number sections in the same order, and members
report and agree on these numbers in a recovery. Before the vote nothing has been applied, so all members can run the
section again. A member that has left the vote knows that all have reached it. It applies the section; members that a
loss kept from leaving the vote apply it in the next recovery (`roll_forward`).

The vote is one sum of a few numbers over the world, so all members that leave it know the results of the section. A
member that rolls forward gets them from one of these.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ntp_plugin.groups.process_groups import ElasticGroups
from ntp_plugin.groups.small_sums import sum_of_all
from ntp_plugin.recovery.driver import Driver


class Recalled(Protocol):
    """The state of the surrounding loop when a section began."""

    def restore(self) -> None:
        """Restore that state: the section runs again, from its beginning."""


class Surroundings(Protocol):
    """The framework's loop around the sections."""

    def recall(self) -> Recalled:
        """Capture its current state."""

    def begin_work(self) -> None:
        """Called when a section begins, for the first time or again."""


class Loop:
    """The place of this rank in the sequence of sections."""

    def __init__(self, groups: ElasticGroups, surroundings: Surroundings, *, joiner: bool) -> None:
        self._groups, self._surroundings = groups, surroundings
        self.driver: Driver | None = None
        """Set once the job is driven."""
        self.done = 0
        """Sections that are over on all ranks."""
        self.prepared = False
        """Whether this rank has reached the vote of the section in flight."""
        self.outcome = torch.zeros(0)
        """The sums of the last vote."""
        self.voted_in = 0
        """The epoch of the last vote, also if what follows the vote runs in a later one."""
        self.kinds: Mapping[str, int] | None = None
        """The losses that a step's vote sums: name -> how many numbers. All ranks know them once a step is done."""
        self.in_step = False
        """Whether the section in flight is a training step."""
        self.not_finite: Callable[[], None] = _nothing_to_compare
        """Called by all ranks together if a sum of a vote is not finite, before anything is applied."""
        self._apply: Callable[[bool], Any] = _nothing
        self.inside = False
        """Whether a section is in flight."""
        self._number = 0
        """The number of the newest section that this process has begun."""
        self.has_begun = False
        """Whether this process has been in a section; a joining rank begins beside others that have been in some."""
        self._apart = joiner
        """Whether others may be past the work between here and the next section, as they are when a joining rank
        starts."""

    def section[Result](
        self, work: Callable[[], Result], replayed: Callable[[], Result], *, is_step: bool = False
    ) -> Result:
        """Run a section through any losses, and return its result.

        Args:
            work: Does the section; it calls `vote` once.
            replayed: Returns the section's result if a loss followed the vote.
            is_step: Whether the section is a training step.
        """
        if self.inside:  # a part of another section
            return work()
        assert self.driver is not None, "sections are part of a driven job"
        self._number = number = self.done + 1
        recalled, first = self._surroundings.recall(), True

        def attempt() -> Result:
            nonlocal first
            if self.done == number:
                self._apart = True
                return replayed()
            if not first:
                recalled.restore()
            first, self._apart = False, False
            self._surroundings.begin_work()
            return work()

        self.inside, self.in_step, self.has_begun = True, is_step, True
        try:
            return self.driver.run_with_recovery(attempt)
        finally:
            self.inside = self.in_step = False

    @property
    def is_over(self) -> bool:
        """Whether the section in flight is over, and this rank has only to return its result."""
        return self.inside and self.done >= self._number

    def vote[Result](self, apply: Callable[[bool], Result], numbers: torch.Tensor) -> Result:
        """Wait for all members, sum these numbers over them, and apply.

        `apply` gets whether it shall change the training: not if a recovery has put other state in its place.
        """
        self._groups.confirm()
        self._apply, self.prepared, self.voted_in = apply, True, self._groups.epoch
        self.outcome = self._sum(numbers)
        if not bool(torch.isfinite(self.outcome).all()):
            self.not_finite()
        result: Result = self.apply()
        return result

    def vote_again[Result](self, apply: Callable[[torch.Tensor], Result], numbers: torch.Tensor) -> Result:
        """Vote on a step that was over before, and runs again within this section."""
        self._groups.confirm()
        return apply(self._sum(numbers))

    def _sum(self, numbers: torch.Tensor) -> torch.Tensor:
        summed = sum_of_all(numbers)
        self._groups.confirm()
        return summed.cpu()

    def roll_forward(self, *, mine: bool, joiner: bool, really: bool = True) -> None:
        """Give the sums of a vote to members that did not leave it, and apply the section there.

        All members call this together; `mine` says that this one did not leave the vote.
        """
        outcomes: list[list[float] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, None if mine or joiner else self.outcome.tolist())
        if mine:
            numbers = next(numbers for numbers in outcomes if numbers is not None)
            self.outcome = torch.tensor(numbers, dtype=torch.float64)
            self.apply(really=really)

    def apply(self, *, really: bool = True) -> Any:
        """Apply the section in flight, which ends it."""
        assert self.prepared, "nothing is applied before the vote"
        result = self._apply(really)
        self._apply, self.prepared, self.done = _nothing, False, self.done + 1
        return result

    def begin_again(self) -> None:
        """Forget the vote of the section in flight: it is not over, and runs again."""
        self._apply, self.prepared = _nothing, False

    def between[Result](self, work: Callable[[], Result], instead: Callable[[], Result]) -> Result:
        """Run optional work of the framework between two sections, or `instead` if others may not come to it."""
        if self.inside or (self.driver is None and not self._apart):
            return work()
        if self.driver is not None and not self._apart:
            result = self.driver.run_or_skip(work)
            if result is not None:
                return result[0]
            self._apart = True
        return instead()


def _nothing(_: bool) -> None:
    """A section that only waits for other members applies nothing."""


def _nothing_to_compare() -> None:
    """The job has no replicas to compare."""
