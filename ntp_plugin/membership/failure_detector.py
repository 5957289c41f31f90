"""Finds lost ranks: turns signals into failures. Pure; time is an argument.

There are five kinds of failure, each with its own proof:

    ended     The process ended before the job was over, with any exit code. Certain at once.
    frozen    For `frozen_s` neither its heartbeat nor the system has shown that it runs, and the system reports the
              process as stopped. A rank that is only starved of CPU is runnable or sleeping, not stopped, so load alone
              never causes this failure.
    silent    It has sent no heartbeat for `silent_s`, whatever the system reports: the Python lock is held, the host is
              cut off, or the machine is dying. A process that has announced its end has half a minute, or `hung_s` if
              that is longer: no heartbeat is sent while a process is taken down.
    hung      It sends heartbeats, but has neither moved nor waited for others for `hung_s`, while everyone else waits.
              A rank in a collective waits for others and is innocent, as long as its wait keeps polling: a signal
              handler that never returns stops the wait loop, while the rank still shows as waiting. The rank that the
              others wait for is not innocent. Time in which it was ready to run and got no CPU does not count
              (`heartbeat.py`). A rank that waits for the end of the job has nothing left to do: the others may take
              `end_s` until they are done too, each with work of its own; if they wait in a collective, they wait for
              that rank.
    cut off   Everyone waits, and the rank's host and some other host cannot reach each other.

A rank that has never sent a heartbeat is starting, and has `start_s`. A joining rank counts as frozen like any other if
it is stopped while it starts; a founding rank may be stopped then, and nothing is lost. When the job is over, a process
that never joined it is not needed, and one that did may finish its script in peace, unless it is stopped.

A rank's own host judges the first three. The others need all hosts: each reports its `Standstill`, and `judge` looks at
all of them. If everyone waits and some hosts cannot reach each other, links are cut; the largest connected part then
continues and the others are evicted, so that two parts never continue at once.
"""

import collections
import dataclasses
from collections.abc import Collection, Mapping

from ntp_plugin.errors import ConfigError

NOT_NEEDED = "not needed"
"""Kind of the failure of a process that the job does not need."""
_ASKED_IN_FROZEN_S = 6
"""How many times within `frozen_s` the system is asked whether a process is stopped."""
_POLLING_IN_HUNG_S = 4
"""A wait that has polled within a quarter of `hung_s` is alive; one that has not polled for all of it is hung; between
the two no rank is judged. A wait polls ten times a second."""
_LEAVING_S = 30.0
"""Time for a process to end: a busy machine takes so long to unload its libraries."""
_HEARTBEATS_IN_SILENT_S, _HEARTBEATS_IN_HUNG_S = 4, 10
"""Fewest heartbeats per limit: three missed ones mean something, and a hang is found within 1.1 times its limit."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Thresholds:
    """Seconds that each proof takes."""

    heartbeat_s: float = 0.25
    """Longest interval between two heartbeats (`heartbeat_interval_s`): a thread of the rank wakes for each, which
    takes 0.2 ms of a processor that computes."""
    frozen_s: float = 0.3
    """Longer than somebody stops a process only to inspect it. A stop shorter than five sixths of it is ignored: the
    last query before the stop may be a sixth of it old."""
    silent_s: float = 5.0
    """A Python lock held for so long is a fault; loading a checkpoint or compiling releases it within tenths."""
    hung_s: float = 30.0
    """Longer than the longest pause of a healthy step between two collectives, a checkpoint on one rank say."""
    end_s: float = 600.0
    """Time for work of one rank when all others are done, e.g. its last checkpoint. At least `hung_s`."""
    start_s: float = 600.0
    """From the start of a process to its first heartbeat: imports and file systems of large clusters take minutes."""
    host_heartbeat_s: float = 0.25
    """Interval between two heartbeats of a host's supervisor on the job's store."""
    host_s: float = 3.0
    """Twelve missed heartbeats of a host: it is dead or cut off from the store. A packet lost twice comes within
    one."""
    store_s: float = 10.0
    """A host without an answer from the store for so long ends its workers: the others have continued without it."""

    def __post_init__(self) -> None:
        if not 0 < self.frozen_s <= self.silent_s <= self.start_s:
            raise ConfigError(
                f"silent_s = {self.silent_s} must lie between frozen_s = {self.frozen_s}, which is above 0, and"
                f" start_s = {self.start_s}"
            )
        if not self.heartbeat_s > 0:
            raise ConfigError(f"heartbeat_s = {self.heartbeat_s} must be above 0")
        if not 0 < self.host_heartbeat_s < self.host_s / 3:
            raise ConfigError(
                f"host_heartbeat_s = {self.host_heartbeat_s} must be above 0 and below a third of host_s = "
                f"{self.host_s}",
                fix="three missed heartbeats are the least that means anything",
            )
        if self.store_s <= self.host_s:
            raise ConfigError(f"store_s = {self.store_s} must be above host_s = {self.host_s}")
        if self.hung_s <= self.frozen_s:
            raise ConfigError(f"hung_s = {self.hung_s} must be above frozen_s = {self.frozen_s}")

    @property
    def heartbeat_interval_s(self) -> float:
        """Interval between two heartbeats."""
        return min(self.heartbeat_s, self.silent_s / _HEARTBEATS_IN_SILENT_S, self.hung_s / _HEARTBEATS_IN_HUNG_S)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pulse:
    """The observations of one rank. All times are on the clock of the supervisor that watches it."""

    started_at: float
    joining: bool = False
    """It joins a job that others have begun."""
    heartbeat_at: float | None = None
    moved_at: float | None = None
    """When it last entered or left a collective, as it reports itself: a late heartbeat does not make it later."""
    polled_at: float | None = None
    """When the loop of its current wait last polled; None: it does not wait for others."""
    done: bool = False
    """It waits for the end of the job only."""
    leaving: bool = False
    """Its last heartbeat announced that it ends."""
    stopped: bool = False
    """The system reports the process as stopped."""
    asked_at: float = 0.0
    """When the system was last asked."""
    ran_at: float = 0.0
    """When it is last known to have run."""
    ended: int | None = None
    """Its exit code, once it has ended."""
    over: bool = False
    """It ended after all members had reported that they are done: no member misses it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankFailure:
    """A lost rank, the kind of its failure, and the reason with its numbers."""

    slot: int
    kind: str
    reason: str


def after_heartbeat(
    pulse: Pulse,
    *,
    now: float,
    moved_at: float,
    polled_at: float | None = None,
    done: bool = False,
    leaving: bool = False,
) -> Pulse:
    """Update a pulse after a heartbeat that carried these values."""
    return dataclasses.replace(
        pulse, heartbeat_at=now, moved_at=moved_at, polled_at=polled_at, done=done, leaving=leaving, ran_at=now
    )


def is_stop_query_due(pulse: Pulse, thresholds: Thresholds, *, now: float) -> bool:
    """Return True if the system should be asked again whether the process is stopped; while it is, each time."""
    return pulse.ended is None and (pulse.stopped or now - pulse.asked_at >= thresholds.frozen_s / _ASKED_IN_FROZEN_S)


def after_stop_query(pulse: Pulse, thresholds: Thresholds, *, now: float, stopped: bool) -> Pulse:
    """Update a pulse after the system has answered. A late query says nothing about the time before it."""
    ran_at = pulse.ran_at if stopped else now
    if stopped and not pulse.stopped:
        ran_at = max(ran_at, now - thresholds.frozen_s / _ASKED_IN_FROZEN_S)
    return dataclasses.replace(pulse, stopped=stopped, asked_at=now, ran_at=ran_at)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Standstill:
    """Reported by a host on which no rank has moved for `hung_s`."""

    waiting: int
    """Number of its ranks that wait for others, and poll."""
    idle: Mapping[int, float]
    """Slot -> seconds for which it has neither moved nor polled."""
    hanging: tuple[int, ...] = ()
    """The idle ranks that hang in a wait: they do no work of their own that others would have to wait for."""
    done: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """Slot -> seconds for which it has waited for the end of the job."""
    unreachable: tuple[int, ...] = ()
    """Hosts that this one cannot connect to."""


def find_lost(pulses: Mapping[int, Pulse], thresholds: Thresholds, *, now: float) -> list[RankFailure]:
    """Find the ranks of a host that are lost by their own proof, ascending by slot."""
    found = [_judge_alone(slot, pulse, thresholds, now) for slot, pulse in sorted(pulses.items())]
    return [failure for failure in found if failure is not None]


def left_over(
    pulses: Mapping[int, Pulse], joined: Collection[int], thresholds: Thresholds, *, over_for: float
) -> list[RankFailure]:
    """Find the processes of a host that delay the end of a job that has been over for so long, ascending by slot."""
    found = []
    for slot, pulse in sorted(pulses.items()):
        pause_s = pulse.asked_at - pulse.ran_at
        if pulse.ended is not None:
            continue
        if slot not in joined:
            reason = "the job is over, and it had not joined"
            if over_for > thresholds.silent_s:  # one that runs ends by itself
                found.append(RankFailure(slot=slot, kind=NOT_NEEDED, reason=reason))
        elif pulse.stopped and pause_s > thresholds.silent_s:
            reason = (
                f"its process is stopped since {pause_s:.2f} s (limit {thresholds.silent_s} s), and the job is over"
            )
            found.append(RankFailure(slot=slot, kind="frozen", reason=reason))
    return found


def standstill(pulses: Mapping[int, Pulse], thresholds: Thresholds) -> Standstill | None:
    """Report that no rank of a host moves; None while one of them moves or starts."""
    living = {slot: pulse for slot, pulse in sorted(pulses.items()) if pulse.ended is None}
    still = {
        slot: pulse.heartbeat_at
        - pulse.moved_at  # by the rank's own report: a rank whose heartbeat is late may have moved meanwhile
        for slot, pulse in living.items()
        if pulse.heartbeat_at is not None and pulse.moved_at is not None
    }
    if len(still) < len(living) or any(since <= thresholds.hung_s for since in still.values()):
        return None
    unpolled = {slot: _without_a_poll(living[slot], since) for slot, since in still.items()}
    polling_s = thresholds.hung_s / _POLLING_IN_HUNG_S
    if any(polling_s < since <= thresholds.hung_s for since in unpolled.values()):
        return None
    idle = {slot: since for slot, since in unpolled.items() if since > thresholds.hung_s}
    hanging = tuple(slot for slot in idle if living[slot].polled_at is not None)
    done = {slot: since for slot, since in still.items() if living[slot].done and slot not in idle}
    return Standstill(waiting=len(still) - len(idle) - len(done), idle=idle, hanging=hanging, done=done)


def _without_a_poll(pulse: Pulse, still: float) -> float:
    """Seconds for which a rank has shown neither that it moves nor that it waits, if it has not moved for `still`."""
    assert pulse.heartbeat_at is not None, "it has sent a heartbeat"
    return still if pulse.polled_at is None else pulse.heartbeat_at - pulse.polled_at


def judge(
    standstills: Mapping[int, Standstill | None], slots: Mapping[int, Collection[int]], thresholds: Thresholds
) -> list[RankFailure]:
    """Find the ranks that delay all others, from the reports and the slots of each host.

    There are none if some rank moves, if none waits (a long computation), or if all are `hung`.
    """
    known = {host: still for host, still in standstills.items() if still is not None}
    waiting = sum(still.waiting for still in known.values())
    done = {slot: since for still in known.values() for slot, since in still.done.items()}
    if len(known) < len(standstills) or not (waiting or done):
        return []
    broken = {host: still.unreachable for host, still in known.items()}
    if cut := cut_off(broken):
        why = f"its host is cut off from others, while {waiting} wait (limit {thresholds.hung_s} s)"
        return [RankFailure(slot=slot, kind="cut off", reason=why) for host in cut for slot in sorted(slots[host])]
    idle = {slot: since for still in known.values() for slot, since in still.idle.items()}
    hanging = {slot for still in known.values() for slot in still.hanging}
    others = f"{waiting} others wait" if waiting else f"{len(done)} others are done"

    def limit(slot: int) -> float:
        works_alone = not waiting and slot not in hanging
        return max(thresholds.end_s, thresholds.hung_s) if works_alone else thresholds.hung_s

    hung = [
        (slot, f"it has neither moved nor polled for {since:.1f} s while {others} (limit {limit(slot)} s)")
        for slot, since in idle.items()
        if since > limit(slot)
    ]
    if waiting and not idle:
        left_early = f"while {waiting} others wait in collectives (limit {thresholds.hung_s} s)"
        hung = [(slot, f"it has waited for the end for {since:.1f} s {left_early}") for slot, since in done.items()]
    return [RankFailure(slot=slot, kind="hung", reason=reason) for slot, reason in sorted(hung)]


def hung(standstills: Mapping[int, Standstill | None]) -> int:
    """Count the ranks that wait for each other in a deadlock: all wait, and all hosts are connected. Else 0."""
    known = {host: still for host, still in standstills.items() if still is not None}
    somebody_is_late = len(known) < len(standstills) or any(still.idle or still.done for still in known.values())
    if somebody_is_late or cut_off({host: still.unreachable for host, still in known.items()}):
        return 0
    return sum(still.waiting for still in known.values())


def cut_off(unreachable: Mapping[int, Collection[int]]) -> tuple[int, ...]:
    """Choose the hosts to leave out so that all others reach each other: repeatedly the one with most broken links.

    When a network splits in two, each host of the smaller part has more broken links, so the larger part continues; of
    two equal parts it is the one with the lowest host.
    """
    broken = {
        frozenset((host, other)) for host, others in unreachable.items() for other in others if other in unreachable
    }
    out = []
    while broken:
        links = collections.Counter(host for link in broken for host in link)
        worst = max(links, key=lambda host: (links[host], host))
        out.append(worst)
        broken = {link for link in broken if worst not in link}
    return tuple(sorted(out))


def is_done(pulse: Pulse) -> bool:
    """Return True if the process has ended and no member misses it: the job is over, or it never sent a heartbeat."""
    return pulse.ended is not None and (pulse.over or (pulse.ended == 0 and pulse.heartbeat_at is None))


def _judge_alone(slot: int, pulse: Pulse, thresholds: Thresholds, now: float) -> RankFailure | None:
    if is_done(pulse):
        return None
    if pulse.ended is not None:
        reason = f"its process ended with code {pulse.ended}" + ("" if pulse.ended else " before the job was over")
        return RankFailure(slot=slot, kind="ended", reason=reason)
    pause_s = pulse.asked_at - pulse.ran_at
    if pulse.stopped and pause_s > thresholds.frozen_s and (pulse.joining or pulse.heartbeat_at is not None):
        reason = f"its process is stopped, and did not run for {pause_s:.2f} s (limit {thresholds.frozen_s} s)"
        return RankFailure(slot=slot, kind="frozen", reason=reason)
    if pulse.heartbeat_at is None:
        silence, limit = now - pulse.started_at, thresholds.start_s
        reason = f"no beat in {silence:.1f} s since its start (limit {limit} s)"
        return RankFailure(slot=slot, kind="silent", reason=reason) if silence > limit else None
    silence = now - pulse.heartbeat_at
    limit = max(thresholds.silent_s, thresholds.hung_s, _LEAVING_S) if pulse.leaving else thresholds.silent_s
    if silence > limit:
        reason = f"no beat in {silence:.1f} s (limit {limit} s)" + " after it said that it ends" * pulse.leaving
        return RankFailure(slot=slot, kind="silent", reason=reason)
    return None
