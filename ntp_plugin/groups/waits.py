"""Makes waits on collectives interruptible.

Every wait on a collective runs in slices, and checks between them for an interrupt. A slice that expires is an
exception in gloo, and costs 0.1 to 0.2 ms of a processor that others may be waiting for. So a slice lasts 100 ms, and
20 once an interrupt is under way: with 20 ms always, a wait takes 1 % of a processor. Gloo fails nearly every operation
by itself when its sockets are shut; for an operation that it has lost, the slice is the delay until that is noticed.

Two kinds cannot be sliced. A send or receive: gloo treats an expired wait as an error and tears down a healthy group.
And a reduce-scatter: torch builds it from an all-reduce; its work waits for that without a limit, and never reports
that it is completed. They wait whole on a helper thread, and the main thread leaves that thread behind if gloo has lost
the operation (it then ends at the group's own time limit). Polling costs little there, so the first slice is 20 ms, and
the next ones as long as the wait has lasted.

torch waits for gloo in one place only, `Work.wait`, whoever called. It is replaced while waits are attached, and treats
only works of registered groups. A work is recognised by identity, and kept until it is waited for: while it is kept, no
other work has its identity.

A step has hundreds of operations, and each pays for this code. So an operation is a work and a `Manner`, made once for
all operations of a kind and group; and its wait is one slice, unless that expires.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import Work

from ntp_plugin.errors import PeerLost
from ntp_plugin.groups.helper_threads import Helpers
from ntp_plugin.membership.wait_progress import CollectiveWait, Movement

_SHORTEST_S, _LONGEST_S = 0.02, 0.1
"""Shortest and longest slice of a wait."""
GRACE_S = 0.1
"""Time for gloo to fail an operation by itself after an interrupt; an operation that lasts longer is lost."""

MOST_KEPT = 4096
_FORGOTTEN_AT_ONCE = 8
_EXPIRED = "Operation timed out!"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Manner:
    """How to wait for the operations of a kind in a group."""

    sliced: bool
    """True if waits are sliced; a work then also reports its end. Otherwise it ends with its wait."""
    limit_s: float
    """After so long a wait continues unsliced, so that torch itself reports the group's own time limit."""
    holder: object = None
    """The backend whose thread an operation occupies until it is over."""


class InterruptibleWaits:
    """Interruptible waits on the works of registered groups."""

    def __init__(self) -> None:
        self._works: dict[int, tuple[Work, Manner]] = {}
        """Works that were started, and not yet waited for to their end. Several threads use it without a lock: each
        look-up and change is one call, which no other thread interrupts."""
        self._helpers = Helpers()
        self._original: Callable[..., bool] | None = None
        self._give_up_at: float | None = None
        self._collective_wait = CollectiveWait()
        self._slice = timedelta(seconds=_LONGEST_S)

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
        """Restore `Work.wait`, and release all works."""
        assert self._original is not None, "waits are attached"
        Work.wait = self._original  # type: ignore[method-assign]
        self._original = None
        self._works.clear()
        self._helpers.close()

    def register(self, work: Work, manner: Manner) -> None:
        """Make waits on this work interruptible from now on."""
        if self._works:
            self._forget_the_oldest()
        self._works[id(work)] = work, manner

    def _forget_the_oldest(self) -> None:
        """Drop ended works, and the oldest of too many, which hold their tensors; they are waited for as in torch."""
        for key, (work, manner) in list(itertools.islice(self._works.items(), _FORGOTTEN_AT_ONCE)):
            if len(self._works) < MOST_KEPT and not (manner.sliced and work.is_completed()):
                return
            self._works.pop(key, None)

    def busy(self, holder: object) -> bool:
        """Return True if an operation occupies a thread of this holder."""
        return any(
            manner.holder is holder and not (manner.sliced and work.is_completed())
            for work, manner in list(self._works.values())
        )

    def forget(self, holder: object) -> None:
        """Drop the operations of this holder."""
        for key, (_, manner) in list(self._works.items()):
            if manner.holder is holder:
                self._works.pop(key, None)

    def moved(self) -> Movement:
        """Return the times that the heartbeat reports for these waits."""
        return self._collective_wait.movement()

    def begin_interrupt(self) -> None:
        """From now on waits abandon operations that gloo does not end within the grace time."""
        self._give_up_at, self._slice = time.monotonic() + GRACE_S, timedelta(seconds=_SHORTEST_S)

    def given_up(self) -> bool:
        """Return True if operations that gloo has not ended by now count as lost; always without an interrupt."""
        return self._give_up_at is None or time.monotonic() > self._give_up_at

    def end_interrupt(self) -> None:
        """Return to normal waits: the groups are edited."""
        self._give_up_at, self._slice = None, timedelta(seconds=_LONGEST_S)

    def beside[Result](self, call: Callable[[], Result]) -> Result:
        """Run a call on a helper thread; raises `PeerLost` and abandons the call if an interrupt finds it lost."""
        calling = self._helpers.submit(call)
        try:
            with self._collective_wait as collective_wait:
                began = time.monotonic()
                while not concurrent.futures.wait([calling], self._slice_s(time.monotonic() - began)).done:
                    collective_wait.poll()
                    self._leave_if_lost()
                return calling.result()
        finally:
            del calling  # it holds the error, which holds this frame: only the garbage collector would free them

    def _wait(self, work: Work) -> bool:
        assert self._original is not None, "waits are attached"
        known = self._works.get(id(work))
        if known is None:
            return self._original(work)
        _, manner = known
        try:
            if not manner.sliced:
                return self.beside(functools.partial(self._wait_whole, work, manner.limit_s))
            with self._collective_wait:
                ended = self._wait_sliced(work, manner.limit_s)
        except RuntimeError as error:
            if self._give_up_at is None:
                raise
            raise PeerLost("an operation broke because the membership changes") from error
        self._works.pop(id(work), None)
        return ended

    def _wait_whole(self, work: Work, limit_s: float) -> bool:
        """Wait up to the group's own limit. Without one a send or receive takes that of the connection, which is the
        short limit of the last edit."""
        assert self._original is not None, "waits are attached"
        try:
            return self._original(work, timedelta(seconds=limit_s))
        finally:
            self._works.pop(id(work), None)

    def _wait_sliced(self, work: Work, limit_s: float) -> bool:
        assert self._original is not None, "waits are attached"
        until = None
        while until is None or time.monotonic() < until:
            try:
                return self._original(work, self._slice)
            except RuntimeError as error:
                if _EXPIRED not in str(error):
                    raise
            self._collective_wait.poll()
            until = until or time.monotonic() + limit_s
            if not work.is_completed():  # else the slice expired just as the work ended: wait again
                self._leave_if_lost()
        return self._original(work)

    def _slice_s(self, wanted: float) -> float:
        """Length of the next slice of a wait."""
        if self._give_up_at is not None:
            return _SHORTEST_S
        return min(max(_SHORTEST_S, wanted), _LONGEST_S)

    def collective_wait(self) -> CollectiveWait:
        """A context that shows the heartbeat that this process waits for others; the wait loop must poll it."""
        return self._collective_wait

    def _leave_if_lost(self) -> None:
        if self._give_up_at is not None and self.given_up():
            raise PeerLost("an operation was left behind because the membership changes")
