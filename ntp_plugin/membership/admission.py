"""Joiners come in where the members let them: between two steps, so that nobody's work is interrupted.

A joining rank asks, on the job's store, and waits. One member looks whether somebody asks, tells the others with its
next vote, and opens; then all wait a moment for the view with the joining rank in it, which breaks nothing off.
Askings of one epoch are numbered, so that one who asked and died does not hold the members up twice.

Where slots can only train together joining ranks ask together: each says that it has come, and asks once all others of
its replica have said so. The first makes the view that it is in, the others the next ones. Who had said so and has
died is waited for there by the driver, for a moment.
"""

import math
import time
from collections.abc import Callable, Collection

from ntp_plugin.errors import Excluded
from ntp_plugin.membership.protocol import View, newest_view
from ntp_plugin.membership.store import KeyStore

_POLL_S = 0.01
"""A joining rank's look at the store, and a member's for the view that it has opened for."""
_LOOK_S = 0.25
"""From one look of the members to the next: one costs some tenths of a millisecond, and steps may be short."""
_WAIT_S = 2.0
"""From the opening to the joining rank's view: it takes some milliseconds, unless the joining rank has just died."""


def _asked(epoch: int, number: int, settings: str) -> str:
    """Where a process asks that trains by these settings: members look for their own only."""
    return f"asked/{epoch}/{number}" + f"/{settings}" * bool(settings)


def _opened(epoch: int, number: int) -> str:
    return f"opened/{epoch}/{number}"


def _has_come(epoch: int, slot: int) -> str:
    return f"come/{epoch}/{slot}"


def wait_to_be_let_in(
    store: KeyStore, first: View, *, slot: int, together: Collection[int] = (), settings: str = ""
) -> None:
    """As a joining rank: ask, again in each epoch, until a member opens; also who asks with others is let in.
    `together`: slots without which this one cannot train; `settings`: the digest of what this process trains by."""
    view, number = newest_view(store.read, first), 0
    while not view.over:  # whoever joins then is told that it comes too late
        if not view.member_ids:
            raise Excluded("all members have left the job, and nobody is there to let this process in")
        if together:
            store.create(_has_come(view.epoch, slot), "")
            if set(view.joiners) & set(together):  # the members wait for this one
                return
            if not _have_come(store, view, together):
                time.sleep(_POLL_S)
                view = newest_view(store.read, view)
                continue
        while store.present([_opened(view.epoch, number)]):  # for those who asked before
            number += 1
        store.create(_asked(view.epoch, number, settings), "")
        while (newest := newest_view(store.read, view)) == view:
            if store.present([_opened(view.epoch, number)]):
                return
            time.sleep(_POLL_S)
        view, number = newest, 0


def _have_come(store: KeyStore, view: View, slots: Collection[int]) -> bool:
    """And none of them is a member that is about to leave, because this slot is lost."""
    return not set(slots) & set(view.slots) and store.present([_has_come(view.epoch, slot) for slot in slots])


class AdmissionControl:
    """The members' side, in each of them; one of them is the one who looks."""

    def __init__(
        self,
        store: KeyStore,
        epoch: Callable[[], int],
        newer_view_exists: Callable[[], bool],
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._epoch, self._newer_view_exists, self._now = store, epoch, newer_view_exists, now
        self._of_epoch, self._number = 0, 0
        self._looks_at = -math.inf
        self.settings = ""
        """The digest of what the job trains by: who asks under another one is not let in."""

    def somebody_asks(self) -> bool:
        """Whether the door should be opened, as far as was looked by now."""
        now = self._now()
        if now < self._looks_at:
            return False
        self._looks_at = now + _LOOK_S
        self._begin_epoch()
        return self._store.present([_asked(self._epoch(), self._number, self.settings)])

    def open(self, *, mine: bool) -> bool:
        """All members call this, and it is `mine` to say on one. Whether somebody is coming in."""
        self._begin_epoch()
        if mine:
            self._store.create(_opened(self._epoch(), self._number), "")
        self._number += 1
        deadline = time.monotonic() + _WAIT_S
        while not self._newer_view_exists():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _begin_epoch(self) -> None:
        if self._of_epoch != self._epoch():
            self._of_epoch, self._number = self._epoch(), 0
