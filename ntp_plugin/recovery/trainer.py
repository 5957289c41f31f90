"""What an adapter provides, so that the driver can take its job through a recovery.

The driver knows epochs, members and groups; the trainer knows steps, state and batches. The trainer keeps three
promises. Before it enters the vote on a step it holds the reduced gradients (`prepared`), and until the vote it has
applied nothing; on a device it asks `groups.confirm()` before both. What it reports is true at that moment, and does
not change until `resume_from`. `resume_from` leaves it either on the decided step, with the state that every other
member has, or with an exception.
"""

from collections.abc import Collection
from typing import Protocol

from ntp_plugin.membership.agreement import Agreed
from ntp_plugin.membership.protocol import Report


class LeavesOut(Exception):
    """Raised by `plan`, on all members alike: some cannot train without others that are not there."""

    def __init__(self, slots: Collection[int], *, why: str, awaits: bool) -> None:
        """`awaits`: the others may be just coming in."""
        super().__init__(why)
        self.slots, self.why, self.awaits = tuple(slots), why, awaits


class Trainer(Protocol):
    """One job, as the driver sees it."""

    def report(self) -> Report:
        """Where this member stands; the driver adds the offer."""

    def plan(self, agreed: Agreed) -> str:
        """Decide what this member will do in the new view; returns a digest that is equal on all members."""

    def resume_from(self, agreed: Agreed) -> None:
        """Carry the plan out in the new groups: move state, verify it, stand on the decided step."""
