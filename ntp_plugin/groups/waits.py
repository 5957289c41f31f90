"""Waits that a break-out can end.

Every wait on a collective goes in slices, and looks between them whether a break-out is under way. A slice that runs
out is an exception in gloo, and costs 0.1 to 0.2 ms of a processor that others may be waiting for. So a slice is of 100
ms, and of 20 once a break-out is under way: with 20 ms always a wait takes 1 % of a processor. Gloo fails nearly every
operation by itself when its sockets are shut; for one that it has lost the slice is how much later that is found.

Two kinds cannot be sliced. A send or receive: gloo takes a wait that runs out for an error and tears down a healthy
group. And a reduce-scatter: torch makes it of an all-reduce, and its work waits for that without a limit, and never
says that it is completed. They wait whole on a helper thread, and the main thread leaves that thread behind if gloo has
lost the operation (it then ends at the group's own time limit). Looking costs little there, so the first slice is of
20 ms, and the next ones as long as the wait has lasted.

`Work.wait` is the one place where torch waits for gloo, whoever called; it is replaced while waits are attached, and
only works of registered groups are treated. A work is recognised by identity, and kept until it is waited for: while it
is kept, no other has its identity.

A step has hundreds of operations, and each pays for what stands here: so an operation is a work and the manner in which
those of its kind and group are waited for, which is made once; and its wait is one slice, unless that runs out.
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
"""Of the slices of a wait."""
GRACE_S = 0.1
"""After a break-out gloo gets so long to fail an operation by itself; what still stands then is lost."""

MOST_KEPT = 4096
_FORGOTTEN_AT_ONCE = 8
_EXPIRED = "Operation timed out!"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Manner:
    """How the operations of a kind, in a group, are waited for."""

    sliced: bool
    """Then a work says as well when it is over; else it is over when its wait has ended."""
    limit_s: float
    """A wait that lasts so long is whole again, so that the group's own time limit is told in torch's words."""
    holder: object = None
    """Whose thread one has until it is over."""


class BreakableWaits:
    """Waits on the works of some groups."""

    def __init__(self) -> None:
        self._works: dict[int, tuple[Work, Manner]] = {}
        """What was started, and not yet waited for to its end. Several threads come here, and no lock is taken: each
        look and change is one call, which no other thread comes into."""
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
        """Give `Work.wait` back, and let go of all works."""
        assert self._original is not None, "waits are attached"
        Work.wait = self._original  # type: ignore[method-assign]
        self._original = None
        self._works.clear()
        self._helpers.close()

    def register(self, work: Work, manner: Manner) -> None:
        """Treat waits on this work from now on."""
        if self._works:
            self._forget_the_oldest()
        self._works[id(work)] = work, manner

    def _forget_the_oldest(self) -> None:
        """Works hold their tensors, also if nobody waits: the ended and the too many are waited for as torch does."""
        for key, (work, manner) in list(itertools.islice(self._works.items(), _FORGOTTEN_AT_ONCE)):
            if len(self._works) < MOST_KEPT and not (manner.sliced and work.is_completed()):
                return
            self._works.pop(key, None)

    def busy(self, holder: object) -> bool:
        """Whether an operation has a thread of this one."""
        return any(
            manner.holder is holder and not (manner.sliced and work.is_completed())
            for work, manner in list(self._works.values())
        )

    def forget(self, holder: object) -> None:
        """Its operations are nothing to it any more."""
        for key, (_, manner) in list(self._works.items()):
            if manner.holder is holder:
                self._works.pop(key, None)

    def moved(self) -> Movement:
        """What the heartbeat tells of these waits."""
        return self._collective_wait.movement()

    def begin_break_out(self) -> None:
        """From now on waits leave operations that gloo does not end within the grace."""
        self._give_up_at, self._slice = time.monotonic() + GRACE_S, timedelta(seconds=_SHORTEST_S)

    def given_up(self) -> bool:
        """Whether what gloo has not ended by now counts as lost; always so where nothing is broken off."""
        return self._give_up_at is None or time.monotonic() > self._give_up_at

    def end_break_out(self) -> None:
        """The groups are whole again."""
        self._give_up_at, self._slice = None, timedelta(seconds=_LONGEST_S)

    def beside[Result](self, call: Callable[[], Result]) -> Result:
        """Call on a helper thread; raises `PeerLost` where a break-out finds the call lost, and leaves it behind."""
        calling = self._helpers.submit(call)
        try:
            with self._collective_wait as collective_wait:
                began = time.monotonic()
                while not concurrent.futures.wait([calling], self._slice_s(time.monotonic() - began)).done:
                    collective_wait.poll()
                    self._leave_if_lost()
                return calling.result()
        finally:
            del calling  # it has the error, and the error has this frame: nobody but the collector would end them

    def _wait(self, work: Work) -> bool:
        assert self._original is not None, "waits are attached"
        known = self._works.get(id(work))
        if known is None:
            return self._original(work)
        _, manner = known
        try:
            if not manner.sliced:
                return self.beside(functools.partial(self._wait_whole, work))
            with self._collective_wait:
                ended = self._wait_sliced(work, manner.limit_s)
        except RuntimeError as error:
            if self._give_up_at is None:
                raise
            raise PeerLost("an operation broke because the membership changes") from error
        self._works.pop(id(work), None)
        return ended

    def _wait_whole(self, work: Work) -> bool:
        assert self._original is not None, "waits are attached"
        try:
            return self._original(work)
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
            if not work.is_completed():  # else the slice ran out just as the work ended: look again
                self._leave_if_lost()
        return self._original(work)

    def _slice_s(self, wanted: float) -> float:
        """The next one of a wait."""
        if self._give_up_at is not None:
            return _SHORTEST_S
        return min(max(_SHORTEST_S, wanted), _LONGEST_S)

    def collective_wait(self) -> CollectiveWait:
        """A context that tells the heartbeat that this process waits for others; what it gives is to be polled."""
        return self._collective_wait

    def _leave_if_lost(self) -> None:
        if self._give_up_at is not None and self.given_up():
            raise PeerLost("an operation was left behind because the membership changes")
