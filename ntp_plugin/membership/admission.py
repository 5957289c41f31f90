"""Admits joining ranks between two steps, so that no member's work is interrupted.

A joining rank writes a request to the job's store, and waits. One member checks for requests, tells the others with its
next vote, and opens the admission. All members then wait a moment for the view that contains the joining rank, which
interrupts nothing. Requests of an epoch are numbered, so that one whose process died does not delay the members twice.

If slots can only train together, their joining ranks ask together: each announces that it is ready, and asks once all
others of its replica have done so. The first one creates the view that contains it, the others the next ones. If one
that was announced has died, the driver waits for it there, for a moment.
"""

import math
import time
from collections.abc import Callable, Collection

from ntp_plugin.errors import Excluded
from ntp_plugin.membership.protocol import View, newest_view
from ntp_plugin.membership.store import KeyStore

_POLL_S = 0.01
"""Polling interval of a joining rank, and of a member that waits for the view after an admission."""
_LOOK_S = 0.25
"""Interval between two checks for requests: one costs some tenths of a millisecond, and steps may be short."""
_WAIT_S = 2.0
"""Longest wait from the admission to the new view: that takes milliseconds, unless the joining rank has just died."""


def _asked(epoch: int, number: int, settings: str) -> str:
    """Key of a request. It contains the process's settings: members only look for their own."""
    return f"asked/{epoch}/{number}" + f"/{settings}" * bool(settings)


def _opened(epoch: int, number: int) -> str:
    return f"opened/{epoch}/{number}"


def _has_come(epoch: int, slot: int) -> str:
    return f"come/{epoch}/{slot}"


def wait_for_admission(
    store: KeyStore, first: View, *, slot: int, together: Collection[int] = (), settings: str = ""
) -> None:
    """Ask for admission as a joining rank, again in each epoch, until a member grants it.

    Args:
        store: The job's store.
        first: The view to begin the search for the newest one from.
        slot: The slot of this process.
        together: Slots without which this one cannot train.
        settings: Digest of the settings that this process trains by.

    Raises:
        Excluded: All members have left the job.
    """
    view, number = newest_view(store.read, first), 0
    while not view.over:  # after the end, `Agreement.joining` raises an error that says so
        if not view.member_ids:
            raise Excluded("all members have left the job, and none is left to admit this process")
        if together:
            store.create(_has_come(view.epoch, slot), "")
            if set(view.joiners) & set(together):  # the members wait for this rank too
                return
            if not _have_come(store, view, together):
                time.sleep(_POLL_S)
                view = newest_view(store.read, view)
                continue
        while store.present([_opened(view.epoch, number)]):  # admissions of earlier requests
            number += 1
        store.create(_asked(view.epoch, number, settings), "")
        while (newest := newest_view(store.read, view)) == view:
            if store.present([_opened(view.epoch, number)]):
                return
            time.sleep(_POLL_S)
        view, number = newest, 0


def _have_come(store: KeyStore, view: View, slots: Collection[int]) -> bool:
    """True if all these slots are ready, and none is still a member (one that leaves because this slot is lost)."""
    return not set(slots) & set(view.slots) and store.present([_has_come(view.epoch, slot) for slot in slots])


class AdmissionControl:
    """The members' side of admission; exists in each of them, and one of them checks for requests."""

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
        """Digest of the settings that the job trains by; requests under another digest are ignored."""

    def is_requested(self) -> bool:
        """Return True if the latest check found a request."""
        now = self._now()
        if now < self._looks_at:
            return False
        self._looks_at = now + _LOOK_S
        self._begin_epoch()
        return self._store.present([_asked(self._epoch(), self._number, self.settings)])

    def open(self, *, mine: bool) -> bool:
        """Open the admission, and wait for the view with the joining rank; return whether it came.

        All members call this; the one with `mine` writes the admission to the store.
        """
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
