"""What a job looks like by what it has told so far. It does not grow with the length of the run.

What does not fit the layout that was told first is passed over, as lines are that make no sense: a slot that is none,
another number of replicas. Who looks on goes by the layout, and must not stumble.
"""

import dataclasses
import enum
import math
from collections.abc import Iterable

from ntp_plugin.telemetry.events import Began, Committed, Compared, Copied, Corrupted, Ended, Hung, RankLost, Recovered
from ntp_plugin.telemetry.record import RecordedEvent

_MOST_SLOTS = 1 << 20
"""More than any job has: nobody is to wait for the list of as many as a spoilt line says."""


class SlotState(enum.StrEnum):
    """What is known of a slot."""

    STARTING = "starting"
    ALIVE = "alive"
    LOST = "lost"
    BACK = "back"


@dataclasses.dataclass(kw_only=True, slots=True)
class JobState:
    """Everything that was heard of one run, brought up to date event by event."""

    replicas: int = 0
    stages: int = 0
    tp: int = 0
    slots: dict[str, SlotState] = dataclasses.field(default_factory=dict)
    pids: dict[str, int] = dataclasses.field(default_factory=dict)
    machines: dict[str, str] = dataclasses.field(default_factory=dict)
    """Slot -> where the newest process was that has begun there."""
    numbers: dict[str, int] = dataclasses.field(default_factory=dict)
    widths: list[list[int]] = dataclasses.field(default_factory=list)
    """Replica by replica, of each stage."""
    micro_batches: list[int] = dataclasses.field(default_factory=list)
    settings: dict[str, str] = dataclasses.field(default_factory=dict)
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    step: int = 0
    epoch: int = 0
    losses: dict[str, float] = dataclasses.field(default_factory=dict)
    step_s: float = 0.0
    recoveries: int = 0
    recovery_s: float = 0.0
    """Of the newest one, on the slot that told it first."""
    copied_step: int = 0
    copied_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    """Of the newest copy of each slot."""
    compared_step: int = 0
    """After which replicas last compared what they hold alike."""
    began_at: float = 0.0
    """When the first slot began, by the clock on the wall."""
    heard_at: float = 0.0
    useful_s: float = 0.0
    """Spent in steps that count, recoveries within them left out."""
    ended: bool = False
    _recovering_s: float = 0.0
    _corrupted: set[tuple[int, str]] = dataclasses.field(default_factory=set)
    """The steps after which replicas differed, and in what."""
    _begun_pids: dict[int, int] = dataclasses.field(default_factory=dict)
    """Slot's number -> the newest process that has begun there."""
    _lost_pids: dict[int, int] = dataclasses.field(default_factory=dict)
    """Slot's number -> the newest process that was lost there; 0 where that is not known."""
    _hung_in: int = -1
    """The epoch in which all waited for each other."""

    @property
    def whole(self) -> bool:
        """Whether every slot is there."""
        return bool(self.slots) and all(slot in (SlotState.ALIVE, SlotState.BACK) for slot in self.slots.values())

    @property
    def goodput(self) -> float:
        """The part of the time since training began that went into steps that count."""
        passed = self.heard_at - self.began_at
        return min(1.0, self.useful_s / passed) if passed > 0 else 1.0

    def hear(self, told: RecordedEvent) -> bool:
        """One event; whether it says something that nobody else had said before."""
        self.heard_at, news = max(self.heard_at, told.at), True
        match told.event:
            case Began():
                news = self._began(told, told.event)
            case Committed():
                news = self._committed(told.event)
            case Recovered():
                news = self._recovered(told.event)
            case RankLost():
                news = self._gone(told.event)
            case Hung():
                news, self._hung_in = self._hung_in != self.epoch, self.epoch
            case Copied():
                if told.slot in self.slots:
                    self.copied_bytes[told.slot] = told.event.size
                news, self.copied_step = told.event.step > self.copied_step, max(self.copied_step, told.event.step)
            case Compared():
                news, self.compared_step = (
                    told.event.step > self.compared_step,
                    max(self.compared_step, told.event.step),
                )
            case Corrupted():
                found = told.event.step, told.event.what
                news = found not in self._corrupted
                self._corrupted.add(found)
            case Ended():
                news, self.ended = not self.ended, True
        return news

    def _began(self, told: RecordedEvent, began: Began) -> bool:
        first, slots = not self.slots, self.slots or _starting(began)
        if told.slot not in slots or (not first and _layout(began) != (self.replicas, self.stages, self.tp)):
            return False
        if first:
            (self.replicas, self.stages, self.tp), self.slots = _layout(began), slots
            self.widths = [[began.tp] * began.stages for _ in range(began.replicas)]
            self.micro_batches, self.began_at = began.micro_batches, told.at
            self.settings, self.versions = began.settings, began.versions
        self.pids[told.slot], self.numbers[told.slot] = began.pid, began.number
        self.machines[told.slot] = began.machine
        self._begun_pids[began.number] = began.pid
        if not began.joiner:
            self.slots[told.slot] = SlotState.ALIVE
        return first

    def _gone(self, gone: RankLost) -> bool:
        """Its own host tells which process it was; the other hosts, where they tell of it too, do not know."""
        before = self._lost_pids.get(gone.number)
        self._lost_pids[gone.number] = gone.pid or self._begun_pids.get(gone.number, 0)
        self._lose([slot for slot, number in self.numbers.items() if number == gone.number])
        return before != self._lost_pids[gone.number]

    def _lose(self, slots: Iterable[str]) -> None:
        """Nobody has their places, until somebody says that he begins there."""
        for slot in slots:
            self.slots[slot] = SlotState.LOST
            self.pids.pop(slot, None)

    def _committed(self, committed: Committed) -> bool:
        if committed.step <= self.step:
            return False
        self.step, self.losses, self.step_s = committed.step, committed.losses, committed.seconds
        self.useful_s += max(0.0, committed.seconds - self._recovering_s)
        self._recovering_s = 0.0
        return True

    def _recovered(self, recovered: Recovered) -> bool:
        stages = [len(widths) for widths in recovered.widths]
        shapes = stages == [self.stages] * self.replicas and len(recovered.micro_batches) == self.replicas
        if recovered.epoch <= self.epoch or not shapes:
            return False
        self.epoch, self.widths, self.micro_batches = recovered.epoch, recovered.widths, recovered.micro_batches
        self.recoveries, self.recovery_s = self.recoveries + 1, recovered.seconds
        self._recovering_s += recovered.seconds
        self._lose(slot for slot in recovered.lost if slot in self.slots)
        for slot in self.slots.keys() & recovered.back:
            self.slots[slot] = SlotState.BACK
        return True


def _layout(began: Began) -> tuple[int, int, int]:
    return began.replicas, began.stages, began.tp


def _starting(began: Began) -> dict[str, SlotState]:
    """All slots of its layout; none where it can be none."""
    layout = _layout(began)
    if min(layout) < 1 or math.prod(layout) > _MOST_SLOTS or len(began.micro_batches) != began.replicas:
        return {}
    places = ((r, s, t) for r in range(began.replicas) for s in range(began.stages) for t in range(began.tp))
    return {f"r{r}.s{s}.t{t}": SlotState.STARTING for r, s, t in places}
