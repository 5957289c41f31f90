"""Decide which fault comes next, from what the job has recorded so far. PURE: no clock; it draws from its own seed.

Faults of a recipe that name a slot and a step are ordered before the job starts. All others wait: for training to
begin, for a time, or, if drawn at random, until the previous fault is over and lost slots have rejoined. A random slot
is a live one whose loss leaves every unit with a live holder; while there is none the fault waits.

Kinds and fault points are dealt like cards: each pair once, in random order, then all again; a missed fault is dealt
again. A fault inside a recovery needs a recovery: it is ordered together with a kill of another slot, and is skipped
while only one slot may be lost.
"""

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence, Set

from ntp_plugin.chaos.faults import INJECTED_BY_WORKER, STORE, SUPERVISOR, OrderedFault, RequestedFaults, Unordered
from ntp_plugin.chaos.recipe import ANY, FaultSpec, Recipe
from ntp_plugin.recovery.fault_points import RECOVERY_FAULT_POINTS
from ntp_plugin.telemetry.job_state import JobState, SlotState

_AHEAD = 2
"""How many steps ahead a fault with a drawn slot is ordered."""
_BEFORE = "-before"
type _Card = tuple[str, str]
"""Kind of the fault, and its fault point."""


class FaultSchedule:
    """The progress of one recipe."""

    def __init__(self, recipe: Recipe, *, named: str = "") -> None:
        """`named`: prefix of the faults' names, if the run may have had others before."""
        self._random, self._named = recipe.random, named
        self._dice = random.Random(recipe.random.seed)
        self._deck = list[_Card]()
        self._dealt: dict[str, _Card] = {}
        """By the names of the faults."""
        self._missed = set[str]()
        self._waiting = [(f"{named}{number}", fault) for number, fault in enumerate(recipe.faults, start=1)]
        self._settled_at: int | None = None

    def at_start(self) -> list[OrderedFault]:
        """Return the faults to order before the job starts."""
        now = [(name, fault) for name, fault in self._waiting if _is_known(fault)]
        self._waiting = [pair for pair in self._waiting if pair not in now]
        return [_order(name, fault, fault.slot) for name, fault in now]

    def next(
        self, job: JobState, *, seconds: float, pending: Sequence[str] = (), missed: Set[str] = frozenset()
    ) -> list[OrderedFault]:
        """Return the faults to order now. `seconds`: since training began; `pending`: slots of earlier faults that are
        not over; `missed`: names of drawn faults that never happened, and are drawn again."""
        if not job.slots:
            return []
        anew = missed & self._dealt.keys() - self._missed
        self._deck += (self._dealt[name] for name in sorted(anew))
        self._missed |= anew
        faults, waiting = list[OrderedFault](), []
        for name, fault in self._waiting:
            injected = (*pending, *(ordered.slot for ordered in faults))
            slot = self._slot(fault, job, injected) if _is_due(fault, job, seconds) else None
            if slot is None:
                waiting.append((name, fault))
            else:
                faults.append(_order(name, fault, slot))
        self._waiting = waiting
        return faults + self._drawn_now(job, unsettled=bool(pending or faults))

    @property
    def has_given_all(self) -> bool:
        """Whether there is nothing left to order."""
        return not self._waiting and len(self._dealt) >= self._random.count + len(self._missed)

    def has_drawn(self, ordered: OrderedFault) -> bool:
        """Return whether a fault was drawn at random, or is the kill that comes with such a fault."""
        return ordered.name.removesuffix(_BEFORE) in self._dealt

    def asked(self, job: JobState, *, seconds: float, ordered: Sequence[OrderedFault]) -> RequestedFaults:
        """Return all faults of the recipe, when the job is over."""
        left = (
            Unordered(fault=_order(name, fault, fault.slot), why=_why_it_waits(fault, job, seconds))
            for name, fault in self._waiting
        )
        return RequestedFaults(
            faults=tuple(ordered),
            unordered=tuple(left),
            drawn=tuple(name for name in self._dealt if name not in self._missed),
            to_be_drawn=self._random.count,
        )

    # ------------------------------------------------ random faults

    def _drawn_now(self, job: JobState, *, unsettled: bool) -> list[OrderedFault]:
        if len(self._dealt) >= self._random.count + len(self._missed):
            return []
        if unsettled:
            self._settled_at = None
            return []
        self._settled_at = job.step if self._settled_at is None else self._settled_at
        waited = job.step - self._settled_at
        if waited < self._random.every_steps or not (job.whole or waited >= self._random.whole_within_steps):
            return []
        self._settled_at = None
        return [dataclasses.replace(ordered, may_miss=True) for ordered in self._draw(job)]

    def _draw(self, job: JobState) -> list[OrderedFault]:
        candidates = survivable(job)
        if not candidates:
            return []
        slot = self._dice.choice(candidates)
        others = survivable(job, lost=(slot,))
        card = self._deal(may_be_in_a_recovery=bool(others))
        if card is None:
            return []
        name, (what, during) = f"{self._named}random-{len(self._dealt) + 1}", card
        self._dealt[name] = card
        seconds, soon = self._random.seconds, job.step + _AHEAD
        if what not in INJECTED_BY_WORKER:
            return [OrderedFault(name=name, what=what, slot=slot, seconds=seconds)]
        if not _is_in_a_recovery(card):
            return [OrderedFault(name=name, what=what, slot=slot, during=during, step=soon, seconds=seconds)]
        first = self._dice.choice(others)
        return [
            OrderedFault(name=f"{name}{_BEFORE}", what="kill", slot=first, during="forward", step=soon),
            OrderedFault(name=name, what=what, slot=slot, during=during, epoch=job.epoch + 1, seconds=seconds),
        ]

    def _deal(self, *, may_be_in_a_recovery: bool) -> _Card | None:
        """Return the next card that can be played now."""

        def playable() -> _Card | None:
            return next((card for card in self._deck if may_be_in_a_recovery or not _is_in_a_recovery(card)), None)

        card = playable()
        if card is None:
            again = [card for card in self._random.deck() if card not in self._deck]
            self._dice.shuffle(again)
            self._deck += again
            card = playable()
        if card is not None:
            self._deck.remove(card)
        return card

    def _slot(self, fault: FaultSpec, job: JobState, injected: Sequence[str]) -> str | None:
        """Return the slot of a fault; None if any will do and the job can lose none at present."""
        if fault.what in (SUPERVISOR, STORE):
            return "host0" if fault.what == SUPERVISOR else "store"
        if fault.slot != ANY:
            return fault.slot
        candidates = survivable(job, lost=injected)
        return self._dice.choice(candidates) if candidates else None


def survivable(job: JobState, *, lost: Sequence[str] = ()) -> list[str]:
    """Return live slots whose loss the job survives: another replica holds their state, and without them some replica
    still has a rank in every stage. A single replica recovers from copies: it may lose all slots but one. A slot that
    others report as back, but that has not begun itself, is left out: its pid is unknown."""
    there = [
        slot
        for slot, state in sorted(job.slots.items())
        if state in (SlotState.ALIVE, SlotState.BACK) and slot not in lost
    ]
    holders = Counter(slot.split(".", 1)[1] for slot in there)
    known = [slot for slot in there if slot in job.pids]
    if job.replicas == 1:
        return known if len(there) > 1 else []
    return [
        slot
        for slot in known
        if holders[slot.split(".", 1)[1]] > 1 and _some_replica_has_all_stages(job, {*there} - {slot})
    ]


def _some_replica_has_all_stages(job: JobState, there: Set[str]) -> bool:
    stages = {tuple(slot.split(".")[:2]) for slot in there}
    return any(
        all((f"r{replica}", f"s{stage}") in stages for stage in range(job.stages)) for replica in range(job.replicas)
    )


def _is_in_a_recovery(card: _Card) -> bool:
    what, during = card
    return what in INJECTED_BY_WORKER and during in RECOVERY_FAULT_POINTS


def _is_known(fault: FaultSpec) -> bool:
    return fault.slot != ANY and fault.what in INJECTED_BY_WORKER and fault.at_s is None


def _is_due(fault: FaultSpec, job: JobState, seconds: float) -> bool:
    if fault.at_s is not None:
        return seconds >= fault.at_s
    ahead = _AHEAD if fault.what in INJECTED_BY_WORKER else 1
    return fault.at_step is None or job.step >= fault.at_step - ahead


def _why_it_waits(fault: FaultSpec, job: JobState, seconds: float) -> str:
    if not job.slots:
        return "training did not begin"
    if not _is_due(fault, job, seconds):
        when = f"{fault.at_s:g} s after training began" if fault.at_s is not None else f"step {fault.at_step}"
        return f"it was for {when}, and the job was over after {seconds:.1f} s, in step {job.step}"
    if fault.slot == ANY and not survivable(job):
        return "in the end no slot could be spared: the job could not have survived the loss of any other"
    return f"the job was over after {seconds:.1f} s, before the fault could be ordered"


def _order(name: str, fault: FaultSpec, slot: str) -> OrderedFault:
    inside = fault.what in INJECTED_BY_WORKER
    return OrderedFault(
        name=name,
        what=fault.what,
        slot=slot,
        during=fault.during,
        step=fault.at_step if inside else None,
        epoch=fault.epoch if fault.during in RECOVERY_FAULT_POINTS else None,
        seconds=fault.seconds,
        factor=fault.factor,
        may_miss=fault.may_miss,
    )
