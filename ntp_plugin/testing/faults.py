"""Plan what happens to a rank, and when: `kill(3, during="reduce", step=5)`.

A fault point is a name that the function under test reports (`Rank.reached`), with its step, or, inside a recovery,
with the epoch that the recovery leads to. The rank injects the fault into itself, right there.
"""

import dataclasses
import functools
import os
import time
from collections.abc import Callable
from typing import Required, TypedDict, Unpack

from ntp_plugin.testing import harm


class When(TypedDict, total=False):
    """The fault point, its step or epoch, and whether the test may end without reaching it."""

    during: Required[str]
    step: int
    epoch: int
    may_miss: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What happens to a rank, and when; the functions of this module make it."""

    slot: int
    fault_point: str
    step: int | None = None
    epoch: int | None = None
    by: Callable[[], object] | None
    """None: it hangs, and its heartbeat goes on."""
    lasting: bool = False
    """It happens at every step from this one on."""
    may_miss: bool = False
    """It is no error if it never happens."""

    def is_for(self, slot: int, fault_point: str, step: int | None, epoch: int | None) -> bool:
        """Return whether it happens to this slot here."""
        if (self.slot, self.fault_point, self.epoch) != (slot, fault_point, epoch):
            return False
        if self.lasting and self.step is not None and step is not None:
            return step >= self.step
        return self.step == step

    def inject(self) -> None:
        """Let it happen; most never return."""
        if self.by is not None:
            self.by()
        while self.by is None:
            time.sleep(3600)

    def __str__(self) -> str:
        at = f"step {self.step}" if self.epoch is None else f"epoch {self.epoch}"
        return f"slot {self.slot} during {self.fault_point!r} of {at}"


def kill(slot: int, **when: Unpack[When]) -> Fault:
    """The rank kills itself by SIGKILL."""
    return _fault(slot, harm.kill, when)


def freeze(slot: int, **when: Unpack[When]) -> Fault:
    """The rank stops itself by SIGSTOP: nothing of it runs, until `Ranks.thaw`."""
    return _fault(slot, harm.stop, when)


def hang(slot: int, **when: Unpack[When]) -> Fault:
    """Its main thread sleeps, and its heartbeat goes on."""
    return _fault(slot, None, when)


def hold_lock(slot: int, **when: Unpack[When]) -> Fault:
    """It sleeps in C code that holds the interpreter lock, so that no thread of it runs."""
    return _fault(slot, harm.hold_lock, when)


def segfault(slot: int, **when: Unpack[When]) -> Fault:
    """It reads from an address that is not mapped (SIGSEGV)."""
    return _fault(slot, harm.segfault, when)


def leave(slot: int, code: int = 0, **when: Unpack[When]) -> Fault:
    """Its process exits with `code`, without a report to the others."""
    return _fault(slot, functools.partial(os._exit, code), when)


def fail(slot: int, error: Exception, **when: Unpack[When]) -> Fault:
    """It raises `error` there."""
    return _fault(slot, functools.partial(_raise, error), when)


def slow(slot: int, seconds: float, *, during: str, from_step: int = 1) -> Fault:
    """It takes `seconds` longer, in `from_step` and every step after it."""
    by = functools.partial(time.sleep, seconds)
    return Fault(slot=slot, fault_point=during, step=from_step, by=by, lasting=True)


def _fault(slot: int, by: Callable[[], object] | None, when: When) -> Fault:
    step, epoch = when.get("step"), when.get("epoch")
    assert (step is None) != (epoch is None), "a moment is of a step, or of the recovery that leads to an epoch"
    return Fault(
        slot=slot, fault_point=when["during"], step=step, epoch=epoch, by=by, may_miss=when.get("may_miss", False)
    )


def _raise(error: Exception) -> None:
    raise error
