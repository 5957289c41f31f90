"""Who is gone: from signals to verdicts. Pure; time is an argument.

Four things tell that a rank is gone, and each has its own proof:

    ended     its process ended before the job was over, with whatever code. Certain at once.
    frozen    its heart has not beaten for `frozen_s`, and the system says that the process is stopped. A rank that is
              only starved of CPU is runnable or sleeping, not stopped, so that load alone never makes this verdict.
    silent    its heart has not beaten for `silent_s`, whatever the system says: the Python lock is held, the host is
              cut off, or the machine is dying.
    hung      its heart beats, but it has neither moved nor waited for others for `hung_s`, while everybody else waits.
              Whoever stands in a collective waits for others and is innocent; the one they wait for is not.

A rank that has never beaten is starting, and is given `start_s`.
"""

import dataclasses
from collections.abc import Mapping

from ntp_plugin.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Thresholds:
    """How long each proof takes, in seconds."""

    beat_s: float = 0.02
    """Between two beats: a beat is a write of some bytes to shared memory, a microsecond."""
    frozen_s: float = 0.3
    """Fifteen beats missed in a stopped process; who is stopped for less than that is left alone."""
    silent_s: float = 5.0
    """A Python lock held for so long is a fault; loading a checkpoint or compiling gives it back within tenths."""
    hung_s: float = 30.0
    """Longer than the longest pause of a healthy step between two collectives, a checkpoint on one rank say."""
    start_s: float = 600.0
    """From the start of a process to its first beat: imports and file systems of large clusters take minutes."""

    def __post_init__(self) -> None:
        if not 0 < self.beat_s < self.frozen_s / 3:
            raise ConfigError(
                f"beat_s = {self.beat_s} must be above 0 and below a third of frozen_s = {self.frozen_s}",
                way_out="three missed beats are the least that means anything",
            )
        if not self.frozen_s <= self.silent_s <= self.start_s:
            raise ConfigError(
                f"silent_s = {self.silent_s} must lie between frozen_s = {self.frozen_s} and start_s = {self.start_s}"
            )
        if self.hung_s <= self.frozen_s:
            raise ConfigError(f"hung_s = {self.hung_s} must be above frozen_s = {self.frozen_s}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pulse:
    """What is known of one rank. Times are of one clock, that of whoever watches."""

    started_at: float
    beat_at: float | None = None
    moves: int = 0
    """How many collectives and steps it has entered and left."""
    moved_at: float | None = None
    waiting: bool = False
    """It stands in a collective."""
    stopped: bool = False
    """The system says that the process is stopped."""
    ended: int | None = None
    """Its exit code, once it has ended."""
    over: bool = False
    """It ended after all members had said that they are done: nobody misses it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A rank that is gone, and why, in words with the numbers."""

    slot: int
    kind: str
    reason: str


def heard(pulse: Pulse, *, now: float, moves: int, waiting: bool) -> Pulse:
    """After a beat that told so many moves, and whether the rank waits for others."""
    moved = moves != pulse.moves or waiting != pulse.waiting or pulse.moved_at is None
    return dataclasses.replace(
        pulse, beat_at=now, moves=moves, waiting=waiting, moved_at=now if moved else pulse.moved_at
    )


def verdicts(pulses: Mapping[int, Pulse], thresholds: Thresholds, *, now: float) -> list[Verdict]:
    """Everybody who is gone by now, ascending by slot."""
    living = {slot: pulse for slot, pulse in pulses.items() if pulse.ended is None}
    found = [_judge_alone(slot, pulse, thresholds, now) for slot, pulse in sorted(pulses.items())]
    gone = [verdict for verdict in found if verdict is not None]
    # Only when nobody is gone in a plainer way: whoever waits for a dead rank seems to wait for a hung one.
    return gone or _judge_together(living, thresholds, now)


def _judge_alone(slot: int, pulse: Pulse, thresholds: Thresholds, now: float) -> Verdict | None:
    if pulse.ended is not None:
        reason = f"its process ended with code {pulse.ended}" + ("" if pulse.ended else " before the job was over")
        return None if pulse.over else Verdict(slot=slot, kind="ended", reason=reason)
    if pulse.beat_at is None:
        silence, limit = now - pulse.started_at, thresholds.start_s
        reason = f"no beat in {silence:.1f} s since its start (limit {limit} s)"
        return Verdict(slot=slot, kind="silent", reason=reason) if silence > limit else None
    silence = now - pulse.beat_at
    if pulse.stopped and silence > thresholds.frozen_s:
        reason = f"its process is stopped, no beat in {silence:.2f} s (limit {thresholds.frozen_s} s)"
        return Verdict(slot=slot, kind="frozen", reason=reason)
    if silence > thresholds.silent_s:
        reason = f"no beat in {silence:.1f} s (limit {thresholds.silent_s} s)"
        return Verdict(slot=slot, kind="silent", reason=reason)
    return None


def _judge_together(living: Mapping[int, Pulse], thresholds: Thresholds, now: float) -> list[Verdict]:
    """The ranks that all others wait for; none where everybody waits (a deadlock of the job) or nobody does."""
    limit = thresholds.hung_s
    still = {slot: now - pulse.moved_at for slot, pulse in living.items() if pulse.moved_at is not None}
    idle = [slot for slot, since in sorted(still.items()) if since > limit and not living[slot].waiting]
    waiting = [slot for slot, since in still.items() if since > limit and living[slot].waiting]
    if not waiting or len(idle) + len(waiting) < len(living):
        return []
    told = f"while {len(waiting)} others wait (limit {limit} s)"
    return [Verdict(slot=slot, kind="hung", reason=f"it has not moved for {still[slot]:.1f} s {told}") for slot in idle]
