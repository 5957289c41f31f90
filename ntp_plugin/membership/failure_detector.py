"""Who is gone: from signals to verdicts. Pure; time is an argument.

Five things tell that a rank is gone, and each has its own proof:

    ended     its process ended before the job was over, with whatever code. Certain at once.
    frozen    for `frozen_s` nothing has told that it runs, neither its heart nor the system, and the system says that
              the process is stopped. A rank that is only starved of CPU is runnable or sleeping, not stopped, so that
              load alone never makes this verdict.
    silent    its heart has not beaten for `silent_s`, whatever the system says: the Python lock is held, the host is
              cut off, or the machine is dying. Who has said that it ends has half a minute, or `hung_s` if that is
              longer: taking a process down is no work that beats.
    hung      its heart beats, but it has neither moved nor waited for others for `hung_s`, while everybody else waits.
              Whoever stands in a collective waits for others and is innocent, as long as its wait goes on polling: a
              signal handler that never returns stops the loop of a wait and leaves the rank's word that it waits as it
              was. The one they wait for is not innocent. Time for which it was ready to run and got no CPU does not
              count (`heartbeat.py`). Who waits for the end of the job has nothing left to do: the others may take
              `end_s` until they are done too, each with work of its own; where they wait in a collective it is the
              one that they wait for.
    cut off   everybody waits, and the rank's host and some other host cannot reach each other.

A rank that has never beaten is starting, and is given `start_s`. One that joins is frozen like any other when it is
stopped meanwhile; of those that found the job somebody may be stopped, and nothing is lost. When the job is over a
process that never joined it is not needed, and one that did may end its script in peace, unless it is stopped.

The first three are judged by the rank's own host. The others take everybody's word: each host tells its `Standstill`,
and `judge` looks at all of them. If everybody waits, and some hosts cannot reach each other, links are cut; then the
largest part that is whole goes on, and the others are out, so that there are never two parts that both go on.
"""

import collections
import dataclasses
from collections.abc import Collection, Mapping

from ntp_plugin.errors import ConfigError

NOT_NEEDED = "not needed"
"""The kind of a verdict on a process that is no loss to anybody."""
_ASKED_IN_FROZEN_S = 6
"""So often the system is asked in that time whether a process is stopped."""
_POLLING_IN_HUNG_S = 4
"""Whose wait has polled within a quarter of that time waits; whose has not for all of it hangs; between the two nobody
is judged. A wait polls ten times a second."""
_LEAVING_S = 30.0
"""For a process that ends: a busy machine takes so long to unload its libraries."""
_HEARTBEATS_IN_SILENT_S, _HEARTBEATS_IN_HUNG_S = 4, 10
"""At least: three that are missed mean something, and a hang is told of by no more than a tenth of its limit later."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Thresholds:
    """How long each proof takes, in seconds."""

    heartbeat_s: float = 0.25
    """Between two beats, at most (`heartbeat_interval_s`): a thread of the rank wakes for each, which takes 0.2 ms of
    a processor that computes."""
    frozen_s: float = 0.3
    """Longer than somebody stops a process who only looks at it. Who is stopped for less than five sixths of it is left
    alone: so far before the stop the system may have been asked."""
    silent_s: float = 5.0
    """A Python lock held for so long is a fault; loading a checkpoint or compiling gives it back within tenths."""
    hung_s: float = 30.0
    """Longer than the longest pause of a healthy step between two collectives, a checkpoint on one rank say."""
    end_s: float = 600.0
    """For what one rank alone does when all others are done: it writes the last checkpoint, say. `hung_s` at least."""
    start_s: float = 600.0
    """From the start of a process to its first beat: imports and file systems of large clusters take minutes."""
    host_heartbeat_s: float = 0.25
    """Between two beats of a host's supervisor on the job's store."""
    host_s: float = 3.0
    """Twelve beats of a host missed: it is dead or cut off from the store. A packet that is lost twice comes in one."""
    store_s: float = 10.0
    """A host that has no answer from the store for so long ends its workers: the others have gone on without it."""

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
                way_out="three missed beats are the least that means anything",
            )
        if self.store_s <= self.host_s:
            raise ConfigError(f"store_s = {self.store_s} must be above host_s = {self.host_s}")
        if self.hung_s <= self.frozen_s:
            raise ConfigError(f"hung_s = {self.hung_s} must be above frozen_s = {self.frozen_s}")

    @property
    def heartbeat_interval_s(self) -> float:
        """Between two beats."""
        return min(self.heartbeat_s, self.silent_s / _HEARTBEATS_IN_SILENT_S, self.hung_s / _HEARTBEATS_IN_HUNG_S)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pulse:
    """What is known of one rank. Times are of one clock, that of whoever watches."""

    started_at: float
    joining: bool = False
    """It comes into a job that others have begun."""
    heartbeat_at: float | None = None
    moved_at: float | None = None
    """When it last entered or left a collective, as it tells itself: a late beat does not make it later."""
    polled_at: float | None = None
    """When the loop of the wait that it stands in last turned; None: it does not wait for others."""
    done: bool = False
    """It waits for the end of the job, and for nothing else."""
    leaving: bool = False
    """It said that it ends, with its last beat."""
    stopped: bool = False
    """The system says that the process is stopped."""
    asked_at: float = 0.0
    """When it was asked last."""
    ran_at: float = 0.0
    """When it is known to have run last."""
    ended: int | None = None
    """Its exit code, once it has ended."""
    over: bool = False
    """It ended after all members had said that they are done: nobody misses it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankFailure:
    """A rank that is gone, and why, in words with the numbers."""

    slot: int
    kind: str
    reason: str


def heard(
    pulse: Pulse,
    *,
    now: float,
    moved_at: float,
    polled_at: float | None = None,
    done: bool = False,
    leaving: bool = False,
) -> Pulse:
    """After a beat that told when the rank last moved, and when its wait for others last polled, if it waits."""
    return dataclasses.replace(
        pulse, heartbeat_at=now, moved_at=moved_at, polled_at=polled_at, done=done, leaving=leaving, ran_at=now
    )


def is_to_be_asked_about(pulse: Pulse, thresholds: Thresholds, *, now: float) -> bool:
    """Whether it is time to ask the system again if the process is stopped; while it is so, each time."""
    return pulse.ended is None and (pulse.stopped or now - pulse.asked_at >= thresholds.frozen_s / _ASKED_IN_FROZEN_S)


def answered(pulse: Pulse, thresholds: Thresholds, *, now: float, stopped: bool) -> Pulse:
    """After the system has said whether the process is stopped. Who asks late knows no more of the time before."""
    ran_at = pulse.ran_at if stopped else now
    if stopped and not pulse.stopped:
        ran_at = max(ran_at, now - thresholds.frozen_s / _ASKED_IN_FROZEN_S)
    return dataclasses.replace(pulse, stopped=stopped, asked_at=now, ran_at=ran_at)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Standstill:
    """A host on which no rank has moved for `hung_s`."""

    waiting: int
    """How many of its ranks wait for others, and poll."""
    idle: Mapping[int, float]
    """Slot -> for how long it has neither moved nor polled."""
    hanging: tuple[int, ...] = ()
    """Those of them that hang in a wait: they do no work of their own, which others would have to wait for."""
    done: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """Slot -> for how long it has waited for the end of the job."""
    unreachable: tuple[int, ...] = ()
    """Hosts that this one cannot connect to."""


def gone(pulses: Mapping[int, Pulse], thresholds: Thresholds, *, now: float) -> list[RankFailure]:
    """The ranks of a host that are gone by their own proof, ascending by slot."""
    found = [_judge_alone(slot, pulse, thresholds, now) for slot, pulse in sorted(pulses.items())]
    return [verdict for verdict in found if verdict is not None]


def left_over(
    pulses: Mapping[int, Pulse], joined: Collection[int], thresholds: Thresholds, *, over_for: float
) -> list[RankFailure]:
    """The processes of a host that hold up the end of a job that has been over for so long, ascending by slot."""
    found = []
    for slot, pulse in sorted(pulses.items()):
        stood = pulse.asked_at - pulse.ran_at
        if pulse.ended is not None:
            continue
        if slot not in joined:
            reason = "the job is over, and it had not joined"
            if over_for > thresholds.silent_s:  # one that runs ends by itself
                found.append(RankFailure(slot=slot, kind=NOT_NEEDED, reason=reason))
        elif pulse.stopped and stood > thresholds.silent_s:
            reason = f"its process is stopped since {stood:.2f} s (limit {thresholds.silent_s} s), and the job is over"
            found.append(RankFailure(slot=slot, kind="frozen", reason=reason))
    return found


def standstill(pulses: Mapping[int, Pulse], thresholds: Thresholds) -> Standstill | None:
    """What a host tells of its ranks; None while one of them moves or starts."""
    living = {slot: pulse for slot, pulse in sorted(pulses.items()) if pulse.ended is None}
    still = {
        slot: pulse.heartbeat_at
        - pulse.moved_at  # what it has told itself: whoever beats late may have moved meanwhile
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
    """For how long it has shown neither that it moves nor that it waits, if it has not moved for `still` seconds."""
    assert pulse.heartbeat_at is not None, "it has beaten"
    return still if pulse.polled_at is None else pulse.heartbeat_at - pulse.polled_at


def judge(
    told: Mapping[int, Standstill | None], slots: Mapping[int, Collection[int]], thresholds: Thresholds
) -> list[RankFailure]:
    """Who holds all others up, from what each host told, and the slots of each host.

    Nobody does where somebody moves, where nobody waits (a long computation), or where all are `hung`.
    """
    known = {host: still for host, still in told.items() if still is not None}
    waiting = sum(still.waiting for still in known.values())
    done = {slot: since for still in known.values() for slot, since in still.done.items()}
    if len(known) < len(told) or not (waiting or done):
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


def hung(told: Mapping[int, Standstill | None]) -> int:
    """How many wait for each other, where all do and all hosts reach each other: a deadlock of the job. Else 0."""
    known = {host: still for host, still in told.items() if still is not None}
    somebody_is_late = len(known) < len(told) or any(still.idle or still.done for still in known.values())
    if somebody_is_late or cut_off({host: still.unreachable for host, still in known.items()}):
        return 0
    return sum(still.waiting for still in known.values())


def cut_off(unreachable: Mapping[int, Collection[int]]) -> tuple[int, ...]:
    """The hosts to leave out so that all others reach each other: always the one with the most broken links first.

    When a network falls into two parts, each host of the smaller part has more broken links, so the larger goes on; of
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
    """Whether its process has ended and nobody misses it: the job is over, or it never was of those that beat."""
    return pulse.ended is not None and (pulse.over or (pulse.ended == 0 and pulse.heartbeat_at is None))


def _judge_alone(slot: int, pulse: Pulse, thresholds: Thresholds, now: float) -> RankFailure | None:
    if is_done(pulse):
        return None
    if pulse.ended is not None:
        reason = f"its process ended with code {pulse.ended}" + ("" if pulse.ended else " before the job was over")
        return RankFailure(slot=slot, kind="ended", reason=reason)
    stood = pulse.asked_at - pulse.ran_at
    if pulse.stopped and stood > thresholds.frozen_s and (pulse.joining or pulse.heartbeat_at is not None):
        reason = f"its process is stopped, and did not run for {stood:.2f} s (limit {thresholds.frozen_s} s)"
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
