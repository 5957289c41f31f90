"""Draw a run from a seed: the job, its links, and which fault happens after how many events."""

import dataclasses
from random import Random

from ntp_plugin.membership.gathering import FAN

KILL, FREEZE, HANG, HOST, CUT, DOUBT, BREAK = "kill", "freeze", "hang", "host dies", "link cut", "doubt", "break"
KINDS = (KILL, KILL, KILL, FREEZE, HANG, HOST, CUT, DOUBT, BREAK)
"""A death is the most common fault. A doubt is a supervisor's error, a break an edit of the groups that failed while
nobody was lost."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProtocolFault:
    """Befalls a slot, or its host, once so many events have passed."""

    after: int
    kind: str
    slot: int
    thaws_after_s: float
    """Of a freeze; above every threshold where it never thaws by itself."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunSchedule:
    """Everything that tells one run from another; the seed also drives every delay."""

    seed: int
    slots: int
    hosts: int
    steps: int
    kept: int
    """How many steps back a rank can return: 0 where an update is made in place."""
    mean_delay_s: float
    loss: float
    compute_s: float
    respawns: int
    faults: tuple[ProtocolFault, ...]
    fan: int
    """So many members' values are put together into one: with two that is done in the smallest jobs too."""


def draw(seed: int) -> RunSchedule:
    """The same seed, the same schedule, on every machine."""
    random = Random(seed)
    slots = random.randint(2, 4)
    hosts = random.randint(1, min(slots, 3))
    faults = [_fault(random, slots) for _ in range(random.choice((0, 1, 1, 2, 2, 3)))]
    return RunSchedule(
        seed=seed,
        slots=slots,
        hosts=hosts,
        steps=random.randint(1, 3),
        kept=random.choice((0, 0, 1)),
        mean_delay_s=random.choice((0.0005, 0.005, 0.03)),
        loss=random.choice((0.0, 0.0, 0.02, 0.1)),
        compute_s=random.choice((0.001, 0.02)),
        respawns=random.choice((0, 0, 1, 2)),
        faults=tuple(sorted(faults, key=lambda fault: fault.after)),
        fan=random.choice((2, FAN)),
    )


def _fault(random: Random, slots: int) -> ProtocolFault:
    return ProtocolFault(
        after=random.randint(0, 160),
        kind=random.choice(KINDS),
        slot=random.randrange(slots),
        thaws_after_s=random.choice((0.05, 0.4, 1.0, 60.0)),
    )
