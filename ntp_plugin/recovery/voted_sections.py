"""A framework's training loop as a sequence of sections, each of which ends with a vote.

A section is a training step, an evaluation, or a checkpoint. It is numbered, in the same order on all ranks; its number
is what members report, and decide on, in a recovery. Before the vote nothing has been applied, so that everybody does
the section again. Whoever has left the vote knows that all have come to it: it applies, and if a loss keeps others from
leaving, they apply in the next recovery (`roll_forward`).

The vote is one sum over the world, of a few numbers, so that what is to be told of a section is known to
all who left it; who rolls forward is told by one of them.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ntp_plugin.groups.process_groups import ElasticGroups
from ntp_plugin.groups.small_sums import sum_of_all
from ntp_plugin.recovery.driver import Driver


class Recalled(Protocol):
    """What the loop around the sections was like when one of them began."""

    def restore(self) -> None:
        """Have it so again: the section is done once more, from its beginning."""


class Surroundings(Protocol):
    """The loop around the sections."""

    def recall(self) -> Recalled:
        """What it is like now."""

    def begin_work(self) -> None:
        """A section is begun, for the first time or again."""


class Loop:
    """Where this rank is in the sequence."""

    def __init__(self, groups: ElasticGroups, surroundings: Surroundings, *, joiner: bool) -> None:
        self._groups, self._surroundings = groups, surroundings
        self.driver: Driver | None = None
        """Once the job is driven."""
        self.done = 0
        """Sections that are over, everywhere."""
        self.prepared = False
        """Whether this rank came to the vote of the section in flight."""
        self.outcome = torch.zeros(0)
        """The numbers that the last vote summed."""
        self.voted_in = 0
        """The epoch that it was held in: whose work it was on, also where what follows it comes in a later one."""
        self.kinds: Mapping[str, int] | None = None
        """Of the losses that a step's vote sums: name -> how many numbers. Once a step is done all know them."""
        self.in_step = False
        """Whether the section in flight is a training step."""
        self.not_finite: Callable[[], None] = _nothing_to_compare
        """Called by all ranks together where the numbers of a vote are not finite, before anything is applied."""
        self._apply: Callable[[bool], Any] = _nothing
        self.inside = False
        """Whether there is a section in flight."""
        self._apart = joiner
        """Others may be past what lies between here and the next section; where a joining rank starts, they are."""

    def section[Result](
        self, work: Callable[[], Result], told: Callable[[], Result], *, is_step: bool = False
    ) -> Result:
        """Do it, through whatever losses. `work` calls `vote` once; `told` says its result where the vote was followed
        by a loss."""
        if self.inside:  # a part of another section
            return work()
        assert self.driver is not None, "sections are part of a driven job"
        number, recalled = self.done + 1, self._surroundings.recall()
        first = True

        def attempt() -> Result:
            nonlocal first
            if self.done == number:
                self._apart = True
                return told()
            if not first:
                recalled.restore()
            first, self._apart = False, False
            self._surroundings.begin_work()
            return work()

        self.inside, self.in_step = True, is_step
        try:
            return self.driver.carry_through(attempt)
        finally:
            self.inside = self.in_step = False

    def vote[Result](self, apply: Callable[[bool], Result], numbers: torch.Tensor) -> Result:
        """Wait for all to come here, have the sums of these numbers, and apply.

        `apply` is told whether it shall change the training: not where a recovery has other state put in its place.
        """
        self._groups.confirm()
        self._apply, self.prepared, self.voted_in = apply, True, self._groups.epoch
        self.outcome = self._sum(numbers)
        if not bool(torch.isfinite(self.outcome).all()):
            self.not_finite()
        result: Result = self.apply()
        return result

    def vote_again[Result](self, apply: Callable[[torch.Tensor], Result], numbers: torch.Tensor) -> Result:
        """The vote on a step that was over before, and is taken again within this section."""
        self._groups.confirm()
        return apply(self._sum(numbers))

    def _sum(self, numbers: torch.Tensor) -> torch.Tensor:
        summed = sum_of_all(numbers)
        self._groups.confirm()
        return summed.cpu()

    def roll_forward(self, *, mine: bool, joiner: bool, really: bool = True) -> None:
        """All members call this when some left the vote and others, this one if `mine`, did not."""
        told: list[list[float] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(told, None if mine or joiner else self.outcome.tolist())
        if mine:
            numbers = next(numbers for numbers in told if numbers is not None)
            self.outcome = torch.tensor(numbers, dtype=torch.float64)
            self.apply(really=really)

    def apply(self, *, really: bool = True) -> Any:
        """What the section in flight was about; it is over with that."""
        assert self.prepared, "nothing is applied before the vote"
        result = self._apply(really)
        self._apply, self.prepared, self.done = _nothing, False, self.done + 1
        return result

    def begin_again(self) -> None:
        """The section in flight is not over: whoever was ready for its vote does it again."""
        self._apply, self.prepared = _nothing, False

    def between[Result](self, work: Callable[[], Result], instead: Callable[[], Result]) -> Result:
        """Something that the framework does together between two sections, and can do without."""
        if self.inside or (self.driver is None and not self._apart):
            return work()
        if self.driver is not None and not self._apart:
            result = self.driver.let_go(work)
            if result is not None:
                return result[0]
            self._apart = True
        return instead()


def _nothing(_: bool) -> None:
    """Sections that only wait for each other apply nothing."""


def _nothing_to_compare() -> None:
    """There are no replicas that could be compared."""
