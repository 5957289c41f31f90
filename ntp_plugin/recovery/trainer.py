"""What an adapter provides, so that the driver can recover its job.

The driver knows epochs, members and groups; the trainer knows steps, state and batches. The trainer keeps three
promises:

1. Before it enters the vote on a step it holds the reduced gradients (`prepared`), and until the vote it has applied
   nothing. On a device it calls `groups.confirm()` before both.
2. What it reports is true at that moment, and does not change until `resume_from`.
3. `resume_from` leaves it on the agreed step, with the state that every other member has, or raises an exception.
"""

from collections.abc import Collection
from typing import Protocol

from ntp_plugin.membership.agreement import Agreed
from ntp_plugin.membership.protocol import Report


class LeavesOut(Exception):
    """Raised by `plan`, on all members alike: some members cannot train without others that are missing."""

    def __init__(self, slots: Collection[int], *, why: str, awaits: bool) -> None:
        """`slots` cannot train; `awaits` says whether the missing ones may be about to join."""
        super().__init__(why)
        self.slots, self.why, self.awaits = tuple(slots), why, awaits


class Trainer(Protocol):
    """One job, as the driver sees it."""

    def report(self) -> Report:
        """Report the state of this member; the driver adds the handles of its process groups."""

    def plan(self, agreed: Agreed) -> str:
        """Decide what this member will do in the new view; returns a digest that is equal on all members."""

    def resume_from(self, agreed: Agreed) -> None:
        """Apply the recovery plan: transfer state in the new groups, verify its digests, and resume from the agreed
        step."""
