"""What a run has told, step by step and recovery by recovery: all that a verdict and a report look at."""

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
class Said[Event]:
    """One event of a kind, and who told it when."""

    at: float
    slot: str
    event: Event


@dataclasses.dataclass(kw_only=True, slots=True)
class History:
    """Of one run."""

    began: list[Said[Began]] = dataclasses.field(default_factory=list)
    commits: dict[int, dict[str, Said[Committed]]] = dataclasses.field(default_factory=dict)
    """Step -> slot -> the newest that it has told of this step."""
    taken_again: set[int] = dataclasses.field(default_factory=set)
    """Steps that were over, and were taken once more."""
    recoveries: dict[int, dict[str, Said[Recovered]]] = dataclasses.field(default_factory=dict)
    """Epoch -> slot -> when it went on."""
    gone: list[Said[RankLost]] = dataclasses.field(default_factory=list)
    injected: list[Said[FaultInjected]] = dataclasses.field(default_factory=list)
    restored: list[Said[Restored]] = dataclasses.field(default_factory=list)
    troubles: list[Said[CopyTrouble]] = dataclasses.field(default_factory=list)
    corrupted: list[Said[Corrupted]] = dataclasses.field(default_factory=list)
    weighed: dict[str, Weighed] = dataclasses.field(default_factory=dict)
    """Slot -> what it ended with."""
    ended: list[str] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, told: Iterable[RecordedEvent]) -> "History":
        """From the whole record, in the order in which it was told."""
        self = cls()
        for one in sorted(told, key=lambda one: one.at):
            self.hear(one)
        return self

    def hear(self, told: RecordedEvent) -> None:
        """One event."""
        event: Any = told.event
        said = Said(at=told.at, slot=told.slot, event=event)
        match event:
            case Began():
                self.began.append(said)
            case Committed():
                self._commit(said)
            case Recovered():
                self.recoveries.setdefault(event.epoch, {})[told.slot] = said
            case RankLost():
                self.gone.append(said)
            case FaultInjected():
                self.injected.append(said)
            case Restored():
                self.restored.append(said)
            case CopyTrouble():
                self.troubles.append(said)
            case Corrupted():
                self.corrupted.append(said)
            case Weighed():
                self.weighed[told.slot] = event
            case Ended():
                self.ended.append(told.slot)

    def _commit(self, said: Said[Committed]) -> None:
        step = self.commits.setdefault(said.event.step, {})
        if said.slot in step:  # what others have told of the attempt before counts no more
            self.taken_again.add(said.event.step)
            for slot in [slot for slot, before in step.items() if before.event.epoch < said.event.epoch]:
                del step[slot]
        step[said.slot] = said

    # ------------------------------------------------ what follows from it

    @property
    def slots(self) -> list[str]:
        """All that have ever begun."""
        return sorted({said.slot for said in self.began})

    @property
    def numbers(self) -> dict[str, int]:
        """Slot -> its number, as supervisors know it."""
        return {said.slot: said.event.number for said in self.began}

    @property
    def began_at(self) -> float:
        """When training began."""
        return min((said.at for said in self.began), default=0.0)

    @property
    def losses(self) -> dict[int, float]:
        """Step -> the first of its losses."""
        told = {step: next(iter(slots.values())).event.losses for step, slots in sorted(self.commits.items()) if slots}
        return {step: next(iter(losses.values())) for step, losses in told.items() if losses}

    def samples(self, step: int) -> list[int]:
        """What its slots have told that they drew for it, sorted."""
        return sorted(sample for said in self.commits.get(step, {}).values() for sample in said.event.samples)

    def committed_at(self, step: int) -> float:
        """When the last slot had done it."""
        return max(said.at for said in self.commits[step].values())

    def layout_of(self, step: int) -> tuple[list[list[int]], list[int]]:
        """Widths and micro-batches in which it was committed."""
        epoch = min(said.event.epoch for said in self.commits[step].values())
        if epoch in self.recoveries:
            event = next(iter(self.recoveries[epoch].values())).event
            return event.widths, event.micro_batches
        first = self.began[0].event
        return [[first.tp] * first.stages] * first.replicas, first.micro_batches
