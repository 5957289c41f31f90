"""The state of a job, rebuilt from the events that it has recorded so far. Its size does not grow with the run.

Events that contradict the first recorded layout (an unknown slot, another number of replicas) are skipped, as malformed
lines are: a reader that displays the job must not fail.
"""

import dataclasses
import enum
import math
from collections.abc import Iterable

from ntp_plugin.telemetry.events import Began, Committed, Compared, Copied, Corrupted, Ended, Hung, RankLost, Recovered
from ntp_plugin.telemetry.record import RecordedEvent

_MOST_SLOTS = 1 << 20
"""More slots than any job has; a corrupt line must not make a reader allocate what it claims."""


class SlotState(enum.StrEnum):
    """What is known of a slot."""

    STARTING = "starting"
    ALIVE = "alive"
    LOST = "lost"
    BACK = "back"


@dataclasses.dataclass(kw_only=True, slots=True)
class JobState:
    """The state of one run, updated event by event."""

    replicas: int = 0
    stages: int = 0
    tp: int = 0
    slots: dict[str, SlotState] = dataclasses.field(default_factory=dict)
    pids: dict[str, int] = dataclasses.field(default_factory=dict)
    machines: dict[str, str] = dataclasses.field(default_factory=dict)
    """Slot -> the machine of the newest process that has begun there."""
    numbers: dict[str, int] = dataclasses.field(default_factory=dict)
    widths: list[list[int]] = dataclasses.field(default_factory=list)
    """Width of each stage, replica by replica."""
    micro_batches: list[int] = dataclasses.field(default_factory=list)
    settings: dict[str, str] = dataclasses.field(default_factory=dict)
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    step: int = 0
    epoch: int = 0
    losses: dict[str, float] = dataclasses.field(default_factory=dict)
    step_s: float = 0.0
    recoveries: int = 0
    recovery_s: float = 0.0
    """Duration of the newest recovery, on the slot that recorded it first."""
    copied_step: int = 0
    copied_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    """Size of the newest copy of each slot."""
    compared_step: int = 0
    """The step after which replicas last compared their replicated state."""
    began_at: float = 0.0
    """Wall-clock time at which the first slot began."""
    heard_at: float = 0.0
    useful_s: float = 0.0
    """Time spent in steps that count, without the recoveries in them."""
    ended: bool = False
    _recovering_s: float = 0.0
    _corrupted: set[tuple[int, str]] = dataclasses.field(default_factory=set)
    """The steps after which replicas differed, and what differed."""
    _begun_pids: dict[int, int] = dataclasses.field(default_factory=dict)
    """Number of a slot -> the pid of the newest process that has begun there."""
    _lost_pids: dict[int, int] = dataclasses.field(default_factory=dict)
    """Number of a slot -> the pid of the newest process that was lost there; 0 if it is not known."""
    _hung_in: int = -1
    """The epoch in which all ranks waited for each other."""

    @property
    def whole(self) -> bool:
        """True if every slot is alive."""
        return bool(self.slots) and all(slot in (SlotState.ALIVE, SlotState.BACK) for slot in self.slots.values())

    @property
    def goodput(self) -> float:
        """The fraction of the time since training began that went into steps that count."""
        passed = self.heard_at - self.began_at
        return min(1.0, self.useful_s / passed) if passed > 0 else 1.0

    def receive(self, entry: RecordedEvent) -> bool:
        """Apply one event; return True if no other process has recorded the same before."""
        self.heard_at, news = max(self.heard_at, entry.at), True
        match entry.event:
            case Began():
                news = self._began(entry, entry.event)
            case Committed():
                news = self._committed(entry.event)
            case Recovered():
                news = self._recovered(entry.event)
            case RankLost():
                news = self._lost(entry.event)
            case Hung():
                news, self._hung_in = self._hung_in != self.epoch, self.epoch
            case Copied():
                if entry.slot in self.slots:
                    self.copied_bytes[entry.slot] = entry.event.size
                news, self.copied_step = entry.event.step > self.copied_step, max(self.copied_step, entry.event.step)
            case Compared():
                news, self.compared_step = (
                    entry.event.step > self.compared_step,
                    max(self.compared_step, entry.event.step),
                )
            case Corrupted():
                found = entry.event.step, entry.event.what
                news = found not in self._corrupted
                self._corrupted.add(found)
            case Ended():
                news, self.ended = not self.ended, True
        return news

    def _began(self, entry: RecordedEvent, began: Began) -> bool:
        first, slots = not self.slots, self.slots or _starting(began)
        if entry.slot not in slots or (not first and _layout(began) != (self.replicas, self.stages, self.tp)):
            return False
        if first:
            (self.replicas, self.stages, self.tp), self.slots = _layout(began), slots
            self.widths = [[began.tp] * began.stages for _ in range(began.replicas)]
            self.micro_batches, self.began_at = began.micro_batches, entry.at
            self.settings, self.versions = began.settings, began.versions
        self.pids[entry.slot], self.numbers[entry.slot] = began.pid, began.number
        self.machines[entry.slot] = began.machine
        self._begun_pids[began.number] = began.pid
        if not began.joiner:
            self.slots[entry.slot] = SlotState.ALIVE
        return first

    def _lost(self, lost: RankLost) -> bool:
        """The slot's own host knows the pid; other hosts that report the loss do not."""
        before = self._lost_pids.get(lost.number)
        self._lost_pids[lost.number] = lost.pid or self._begun_pids.get(lost.number, 0)
        self._lose([slot for slot, number in self.numbers.items() if number == lost.number])
        return before != self._lost_pids[lost.number]

    def _lose(self, slots: Iterable[str]) -> None:
        """Mark slots as lost until a new process begins there."""
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
    """All slots of the layout; empty if the layout is impossible."""
    layout = _layout(began)
    if min(layout) < 1 or math.prod(layout) > _MOST_SLOTS or len(began.micro_batches) != began.replicas:
        return {}
    places = ((r, s, t) for r in range(began.replicas) for s in range(began.stages) for t in range(began.tp))
    return {f"r{r}.s{s}.t{t}": SlotState.STARTING for r, s, t in places}
