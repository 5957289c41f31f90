"""Shared code of live runs of all frameworks: ranks that die, and rejoin at a given step."""

import dataclasses
import os
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ntp_plugin.errors import NtpError
from ntp_plugin.testing.faults import Fault
from ntp_plugin.testing.ranks import PATIENCE_S, Rank, Ranks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asking:
    """Joining ranks, and the step or section at which the others wait until each asks."""

    awaited: Mapping[str, int] = dataclasses.field(default_factory=dict)
    sooner: bool = False
    """A started joiner asks at once, even before the others have arrived: they wait for it there at the latest."""
    before_admission: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Where they wait before that, until the joiner has started and is about to ask."""


def asking_of(back: Mapping[int, int], before_admission: Mapping[int, int] | None = None) -> Asking:
    """`back`: slots that restart after their death, in this order, and where the others wait for each."""
    incarnations = {slot: f"{slot}/{number}" for number, slot in enumerate(back, start=1)}
    return Asking(
        awaited={incarnations[slot]: where for slot, where in back.items()},
        before_admission={incarnations[slot]: where for slot, where in (before_admission or {}).items()},
    )


def played(
    count: int,
    play: Callable[[Rank], Any],
    *,
    faults: Sequence[Fault],
    fault_points: Collection[str],
    back: Collection[int],
    leaving: Sequence[int],
    timeout_s: float = PATIENCE_S,
) -> tuple[dict[int, Any], list[list[Any]]]:
    """Results of the surviving ranks, and the rows of all. `leaving`: slots that end with an error, and return
    nothing."""
    with Ranks(count, play, faults=faults, fault_points=fault_points) as ranks:
        for slot in back:
            ranks.wait_for_death(slot, timeout_s)
            ranks.start_again(slot)
        outcomes = ranks.wait(timeout_s, but=leaving)
        for slot in leaving:
            ranks.wait_for_death(slot, timeout_s)
    return outcomes, ranks.rows


def wait_until_they_ask(rank: Rank, asking: Asking, where: Callable[[], int], check: Callable[[], None]) -> None:
    """Wait as a member until the joining ranks ask."""
    for incarnation, awaited in asking.awaited.items():
        if where() == awaited:
            _note(rank, "awaited", incarnation).touch()
    for says, those in (("started", asking.before_admission), ("asks", asking.awaited)):
        for incarnation, awaited in those.items():
            while where() == awaited and not _note(rank, says, incarnation).exists():
                time.sleep(0.01)
                check()


def report_request(rank: Rank, asking: Asking, store: Any) -> None:
    """Report the request of a joining rank once it is in the store, where members find it in the very next step. The
    rank asks no sooner than it is awaited: otherwise the step at which it joins would depend on the load of the
    machine."""
    create, mine = store.create, rank.member_id.incarnation
    waits = mine in asking.awaited and not asking.sooner

    def reporting_create(key: str, value: str) -> Any:
        if not key.startswith(("asked/", "come/")):
            return create(key, value)
        _note(rank, "started", mine).touch()
        while waits and not _note(rank, "awaited", mine).exists():
            time.sleep(0.01)
        there = create(key, value)
        _note(rank, "asks", mine).touch()
        return there

    store.create = reporting_create


def _note(rank: Rank, says: str, incarnation: str) -> Path:
    """An empty file, which all ranks see."""
    return Path(rank.folder) / f"{says}-{incarnation.replace('/', '-')}"


def quietly[Result](slot: int, play: Callable[[], Result]) -> Result:
    """Play with output redirected to the file named by NTP_TOLD."""
    log = os.open(os.environ.get("NTP_TOLD", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        return play()
    except NtpError:
        traceback.print_exc()
        raise
    except BaseException:
        traceback.print_exc()
        raise RuntimeError(f"rank {slot}:\n{traceback.format_exc()[-6000:]}") from None
