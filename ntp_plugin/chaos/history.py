"""The events of a run, by step and by recovery: all that a verdict and a report use."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from ntp_plugin.telemetry.events import (
    Began,
    Committed,
    CopyTrouble,
    Corrupted,
    Ended,
    FaultInjected,
    RankLost,
    Recovered,
    Restored,
    Weighed,
)
from ntp_plugin.telemetry.record import RecordedEvent


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Recorded[Event]:
    """An event, with the time and the slot that recorded it."""

    at: float
    slot: str
    event: Event


@dataclasses.dataclass(kw_only=True, slots=True)
class History:
    """The history of one run."""

    began: list[Recorded[Began]] = dataclasses.field(default_factory=list)
    commits: dict[int, dict[str, Recorded[Committed]]] = dataclasses.field(default_factory=dict)
    """Step -> slot -> its newest event of this step."""
    taken_again: set[int] = dataclasses.field(default_factory=set)
    """Steps that were complete, and were repeated."""
    recoveries: dict[int, dict[str, Recorded[Recovered]]] = dataclasses.field(default_factory=dict)
    """Epoch -> slot -> its event at the end of the recovery."""
    ranks_lost: list[Recorded[RankLost]] = dataclasses.field(default_factory=list)
    injected: list[Recorded[FaultInjected]] = dataclasses.field(default_factory=list)
    restored: list[Recorded[Restored]] = dataclasses.field(default_factory=list)
    troubles: list[Recorded[CopyTrouble]] = dataclasses.field(default_factory=list)
    corrupted: list[Recorded[Corrupted]] = dataclasses.field(default_factory=list)
    weighed: dict[str, Weighed] = dataclasses.field(default_factory=dict)
    """Slot -> digests of its final weights."""
    ended: list[str] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[RecordedEvent]) -> "History":
        """Build the history from the whole record, in order of time."""
        self = cls()
        for one in sorted(events, key=lambda one: one.at):
            self.receive(one)
        return self

    def receive(self, read: RecordedEvent) -> None:
        """Add one event."""
        event: Any = read.event
        recorded = Recorded(at=read.at, slot=read.slot, event=event)
        match event:
            case Began():
                self.began.append(recorded)
            case Committed():
                self._commit(recorded)
            case Recovered():
                self.recoveries.setdefault(event.epoch, {})[read.slot] = recorded
            case RankLost():
                self.ranks_lost.append(recorded)
            case FaultInjected():
                self.injected.append(recorded)
            case Restored():
                self.restored.append(recorded)
            case CopyTrouble():
                self.troubles.append(recorded)
            case Corrupted():
                self.corrupted.append(recorded)
            case Weighed():
                self.weighed[read.slot] = event
            case Ended():
                self.ended.append(read.slot)

    def _commit(self, recorded: Recorded[Committed]) -> None:
        step = self.commits.setdefault(recorded.event.step, {})
        if recorded.slot in step:  # events of the previous attempt no longer count
            self.taken_again.add(recorded.event.step)
            for slot in [slot for slot, before in step.items() if before.event.epoch < recorded.event.epoch]:
                del step[slot]
        step[recorded.slot] = recorded

    # ------------------------------------------------ derived from it

    @property
    def slots(self) -> list[str]:
        """All slots that ever began."""
        return sorted({recorded.slot for recorded in self.began})

    @property
    def numbers(self) -> dict[str, int]:
        """Slot -> its rank number."""
        return {recorded.slot: recorded.event.number for recorded in self.began}

    @property
    def began_at(self) -> float:
        """When training began."""
        return min((recorded.at for recorded in self.began), default=0.0)

    @property
    def losses(self) -> dict[int, float]:
        """Step -> its first loss."""
        by_step = {
            step: next(iter(slots.values())).event.losses for step, slots in sorted(self.commits.items()) if slots
        }
        return {step: next(iter(losses.values())) for step, losses in by_step.items() if losses}

    def samples(self, step: int) -> list[int]:
        """Return the samples that its slots recorded for a step, sorted."""
        return sorted(sample for recorded in self.commits.get(step, {}).values() for sample in recorded.event.samples)

    def committed_at(self, step: int) -> float:
        """Return when the last slot had committed a step."""
        return max(recorded.at for recorded in self.commits[step].values())

    def layout_of(self, step: int) -> tuple[list[list[int]], list[int]]:
        """Return the widths and micro-batches with which a step was committed."""
        epoch = min(recorded.event.epoch for recorded in self.commits[step].values())
        if epoch in self.recoveries:
            event = next(iter(self.recoveries[epoch].values())).event
            return event.widths, event.micro_batches
        first = self.began[0].event
        return [[first.tp] * first.stages] * first.replicas, first.micro_batches
