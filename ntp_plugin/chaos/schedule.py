"""Which strike comes next, by what the job has told so far. PURE: it has no clock, and draws from its own seed.

Faults of a recipe that name a slot and a step are ordered before the job starts. All others wait: for training to have
begun, for a time, or, where they are drawn, for the one before to be over and for whoever can come back. A slot is
drawn among those that are there and whose loss leaves every unit with a living holder; while there is none it waits.

Kinds and moments are dealt like cards: each once, in an order that is drawn, then all again; who has missed its moment
gets another turn. A fault in a moment of a recovery needs one: it comes with a kill of another slot, in the same order,
and is passed over while only one slot may be lost.
"""

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence, Set

from ntp_plugin.chaos.faults import BY_ITS_OWN_HAND, STORE, SUPERVISOR, OrderedFault, RequestedFaults, Unordered
from ntp_plugin.chaos.recipe import ANY, FaultSpec, Recipe
from ntp_plugin.recovery.fault_points import OF_RECOVERIES
from ntp_plugin.telemetry.job_state import JobState, SlotState

_AHEAD = 2
"""So many steps before its own a strike is ordered whose slot is drawn."""
_BEFORE = "-before"
type _Card = tuple[str, str]
"""What breaks, and during which moment."""


class FaultSchedule:
    """One recipe, as it goes."""

    def __init__(self, recipe: Recipe, *, named: str = "") -> None:
        """`named`: how its strikes' names begin, where others of the same run have had theirs."""
        self._random, self._named = recipe.random, named
        self._dice = random.Random(recipe.random.seed)
        self._deck = list[_Card]()
        self._dealt: dict[str, _Card] = {}
        """By the names of their strikes."""
        self._missed = set[str]()
        self._waiting = [(f"{named}{number}", fault) for number, fault in enumerate(recipe.faults, start=1)]
        self._settled_at: int | None = None

    def at_start(self) -> list[OrderedFault]:
        """Ordered before there is a job."""
        now = [(name, fault) for name, fault in self._waiting if _is_known(fault)]
        self._waiting = [pair for pair in self._waiting if pair not in now]
        return [_order(name, fault, fault.slot) for name, fault in now]

    def next(
        self, job: JobState, *, seconds: float, pending: Sequence[str] = (), missed: Set[str] = frozenset()
    ) -> list[OrderedFault]:
        """What is to be ordered now. `seconds`: since training began; `pending`: the slots of strikes before that are
        not over; `missed`: the names of those that were drawn and never struck, for which others are."""
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
        """Whether there is nothing more to be ordered."""
        return not self._waiting and len(self._dealt) >= self._random.count + len(self._missed)

    def has_drawn(self, ordered: OrderedFault) -> bool:
        """Or the kill that comes with one that was drawn."""
        return ordered.name.removesuffix(_BEFORE) in self._dealt

    def asked(self, job: JobState, *, seconds: float, ordered: Sequence[OrderedFault]) -> RequestedFaults:
        """All of the recipe, by what the job has told until its end."""
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

    # ------------------------------------------------ what is drawn

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
        if what not in BY_ITS_OWN_HAND:
            return [OrderedFault(name=name, what=what, slot=slot, seconds=seconds)]
        if not _is_in_a_recovery(card):
            return [OrderedFault(name=name, what=what, slot=slot, during=during, step=soon, seconds=seconds)]
        first = self._dice.choice(others)
        return [
            OrderedFault(name=f"{name}{_BEFORE}", what="kill", slot=first, during="forward", step=soon),
            OrderedFault(name=name, what=what, slot=slot, during=during, epoch=job.epoch + 1, seconds=seconds),
        ]

    def _deal(self, *, may_be_in_a_recovery: bool) -> _Card | None:
        """The next one that can be played now."""

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
        """Whom it strikes. Where any slot will do, nobody while there is none that the job could lose as well."""
        if fault.what in (SUPERVISOR, STORE):
            return "host0" if fault.what == SUPERVISOR else "store"
        if fault.slot != ANY:
            return fault.slot
        candidates = survivable(job, lost=injected)
        return self._dice.choice(candidates) if candidates else None


def survivable(job: JobState, *, lost: Sequence[str] = ()) -> list[str]:
    """Slots that are there, and that all replicas but one may lose: what they hold is held by another replica, and
    some replica has somebody in every stage without them. One replica alone lives by copies, and is struck as long as
    somebody is left of it. Who is said to be back, and has not yet said so itself, is not struck: which process it is
    is not known."""
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
    return what in BY_ITS_OWN_HAND and during in OF_RECOVERIES


def _is_known(fault: FaultSpec) -> bool:
    return fault.slot != ANY and fault.what in BY_ITS_OWN_HAND and fault.at_s is None


def _is_due(fault: FaultSpec, job: JobState, seconds: float) -> bool:
    if fault.at_s is not None:
        return seconds >= fault.at_s
    ahead = _AHEAD if fault.what in BY_ITS_OWN_HAND else 1
    return fault.at_step is None or job.step >= fault.at_step - ahead


def _why_it_waits(fault: FaultSpec, job: JobState, seconds: float) -> str:
    if not job.slots:
        return "training never began"
    if not _is_due(fault, job, seconds):
        when = f"{fault.at_s:g} s after training began" if fault.at_s is not None else f"step {fault.at_step}"
        return f"it was for {when}, and the job was over after {seconds:.1f} s, in step {job.step}"
    if fault.slot == ANY and not survivable(job):
        return "in the end nobody could be spared: without any other slot the job could not have gone on"
    return f"the job was over, after {seconds:.1f} s, before it could be ordered"


def _order(name: str, fault: FaultSpec, slot: str) -> OrderedFault:
    inside = fault.what in BY_ITS_OWN_HAND
    return OrderedFault(
        name=name,
        what=fault.what,
        slot=slot,
        during=fault.during,
        step=fault.at_step if inside else None,
        epoch=fault.epoch if fault.during in OF_RECOVERIES else None,
        seconds=fault.seconds,
        factor=fault.factor,
        may_miss=fault.may_miss,
    )
