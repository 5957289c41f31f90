"""Waits that a break-out can end.

Every wait on a collective goes in slices of 20 ms, and looks between them whether a break-out is under way. A send or
receive must not be sliced: gloo takes a wait that runs out for an error and tears down a healthy group. It waits whole
on a helper thread, and the main thread leaves that thread behind if gloo has lost the operation (it then ends at the
group's own time limit).

`Work.wait` is the one place where torch waits for gloo, whoever called; it is replaced while waits are attached, and
only works of registered groups are treated. A work is recognised by identity, and kept alive until it is waited for.
"""

import concurrent.futures
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

from torch._C._distributed_c10d import Work

from ntp_plugin.comm.helpers import Helpers
from ntp_plugin.errors import PeerLost

SLICE_S = 0.02
GRACE_S = 0.1
"""After a break-out gloo gets so long to fail an operation by itself; what still stands then is lost."""

MOST_KEPT = 4096
_EXPIRED = "Operation timed out!"
_POINT_TO_POINT = ("SEND", "RECV")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Known:
    work: Work
    collective: bool
    until: float
    """From then on the wait is whole again, so that the group's own time limit is told in torch's words."""


class BreakableWaits:
    """Waits on the works of some groups."""

    def __init__(self) -> None:
        self._works: dict[int, _Known] = {}
        self._helpers = Helpers()
        self._original: Callable[..., bool] | None = None
        self._give_up_at: float | None = None
        self._lock = threading.Lock()
        self._moved_at = time.monotonic()
        self._waiting = 0

    def attach(self) -> None:
        """Replace `Work.wait`."""
        assert self._original is None, "waits are attached once"
        original, waits = Work.wait, self
        self._original = original

        def wait(work: Work, timeout: timedelta | None = None) -> bool:
            if timeout is not None and timeout != timedelta():
                return original(work, timeout)
            return waits._wait(work)

        Work.wait = wait  # type: ignore[assignment,method-assign]

    def detach(self) -> None:
        """Give `Work.wait` back, and let go of all works."""
        assert self._original is not None, "waits are attached"
        Work.wait = self._original  # type: ignore[method-assign]
        self._original = None
        self._works.clear()
        self._helpers.close()

    def register(self, operation: str, work: Work, timeout: timedelta) -> bool:
        """Treat waits on this work from now on; whether it is a collective."""
        collective = operation not in _POINT_TO_POINT
        with self._lock:
            until = time.monotonic() + timeout.total_seconds()
            self._forget_the_oldest()
            self._works[id(work)] = _Known(work=work, collective=collective, until=until)
        return collective

    def _forget_the_oldest(self) -> None:
        """Works hold their tensors, also if nobody waits: the ended and the too many are waited for as torch does."""
        while self._works:
            oldest = next(iter(self._works))
            if len(self._works) < MOST_KEPT and not self._works[oldest].work.is_completed():
                return
            del self._works[oldest]

    def moved(self) -> tuple[float, bool]:
        """When a wait was last entered or left, and whether one is going on: what a heart tells."""
        return self._moved_at, self._waiting > 0

    def begin_break_out(self) -> None:
        """From now on waits leave operations that gloo does not end within the grace."""
        self._give_up_at = time.monotonic() + GRACE_S

    def given_up(self) -> bool:
        """Whether what gloo has not ended by now counts as lost; always so where nothing is broken off."""
        return self._give_up_at is None or time.monotonic() > self._give_up_at

    def end_break_out(self) -> None:
        """The groups are whole again."""
        self._give_up_at = None

    def beside[Result](self, call: Callable[[], Result]) -> Result:
        """Call on a helper thread; raises `PeerLost` where a break-out finds the call lost, and leaves it behind."""
        calling = self._helpers.submit(call)
        with self.standing():
            while not concurrent.futures.wait([calling], SLICE_S).done:
                self._leave_if_lost()
            return calling.result()

    def _wait(self, work: Work) -> bool:
        assert self._original is not None, "waits are attached"
        with self._lock:
            known = self._works.pop(id(work), None)
        if known is None or known.work is not work:
            return self._original(work)
        original = self._original
        try:
            if known.collective:
                with self.standing():
                    return self._wait_sliced(work, known.until)
            return self.beside(lambda: original(work))
        except RuntimeError as error:
            if self._give_up_at is None:
                raise
            raise PeerLost("an operation broke because the membership changes") from error

    def _wait_sliced(self, work: Work, until: float) -> bool:
        assert self._original is not None, "waits are attached"
        while time.monotonic() < until:
            try:
                return self._original(work, timedelta(seconds=SLICE_S))
            except RuntimeError as error:
                if _EXPIRED not in str(error):
                    raise
            if not work.is_completed():  # else the slice ran out just as the work ended: look again
                self._leave_if_lost()
        return self._original(work)

    @contextlib.contextmanager
    def standing(self) -> Iterator[None]:
        """What a heart is told: that this process waits for others."""
        self._moved_at, self._waiting = time.monotonic(), self._waiting + 1
        try:
            yield
        finally:
            self._moved_at, self._waiting = time.monotonic(), self._waiting - 1

    def _leave_if_lost(self) -> None:
        if self._give_up_at is not None and self.given_up():
            raise PeerLost("an operation was left behind because the membership changes")
