"""Agreement on epoch, members and the step to stand on, over a store whose keys are written once.

Every key is created by whoever comes first and never changes, so reading late is never reading wrong:

    view/E          who is in from epoch E on. Made from view/E-1 by whoever noticed a loss, or by a newcomer
    report/E/SLOT   where that member stands: what it applied, what it holds reduced gradients for
    entry/E/SLOT    the digest of the plan that it made of all reports of epoch E
    done/E/SLOT     that member has nothing left to do; once all of epoch E have said so, the job ends

A member walks  RUNNING -> REPORTING -> GATHERING -> PLANNING -> ENTERING -> RUNNING,  and from any of these back to
REPORTING when a newer view exists: a second and third loss need no rule of their own. A member that is not in the
newest view is EXCLUDED and must end: that is how a rank that was frozen and thawed, or cut off, is fenced. Who sits in
a slot is told apart by its `occupant`, so that the old process of a slot that was given to another is fenced as well.

The job ends with a view that says so, and that nobody is in. It is the next view or a loss is, never both, so that
nobody leaves while somebody else still needs its report.

Decisions need no message: reports are written once and everybody reads all of them before deciding.

The step to stand on is the newest that every survivor can stand on. A member can stand on any step from its `oldest`
to its `applied`, and on the one after, if it holds the reduced gradients (it had entered the vote) and some member
knows how the vote went (it has applied it). Who completed a vote knows that all had entered it, so whatever anybody
has applied, all can: no applied step is undone as long as its members survive in memory.

Pure: no clock, no store, no torch. `advance` is one atomic step of one member: it reads any keys and writes at most
one.
"""

import dataclasses
import enum
import json
from collections.abc import Callable, Iterable, Mapping, Sequence

from ntp_plugin.errors import StateLost

type Read = Callable[[str], str | None]
"""The value of a key, or None while nobody has created it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Seat:
    """A slot (its nominal rank) and the process that sits in it."""

    slot: int
    occupant: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """Who is in from an epoch on, ascending by slot, and which of them came with it."""

    epoch: int
    seats: tuple[Seat, ...]
    newcomers: tuple[int, ...] = ()
    over: bool = False
    """All members said that they were done; where all were lost, nobody is in either."""

    @property
    def slots(self) -> tuple[int, ...]:
        return tuple(seat.slot for seat in self.seats)

    def encode(self) -> str:
        seats = [[seat.slot, seat.occupant] for seat in self.seats]
        return json.dumps([self.epoch, seats, self.newcomers, self.over])

    @classmethod
    def decode(cls, text: str) -> "View":
        epoch, seats, newcomers, over = json.loads(text)
        return cls(
            epoch=epoch,
            seats=tuple(Seat(slot=slot, occupant=occupant) for slot, occupant in seats),
            newcomers=tuple(newcomers),
            over=over,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Where a member stands when it leaves the epoch before.

    `prepared`: it had entered the vote on step `applied + 1`. `vote` is how the vote on `applied` went. A newcomer
    holds nothing yet and can stand anywhere. `offer` is what others need to reach it in the new epoch, and `held` what
    state it has, in its trainer's words.
    """

    applied: int
    oldest: int
    prepared: bool = False
    vote: int = 0
    newcomer: bool = False
    offer: Mapping[str, str] = dataclasses.field(default_factory=dict)
    held: str = ""

    def encode(self) -> str:
        return json.dumps(dataclasses.astuple(self))

    @classmethod
    def decode(cls, text: str) -> "Report":
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**dict(zip(names, json.loads(text), strict=True)))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The step that everybody stands on, how the vote on it went, and who must still apply it."""

    step: int
    vote: int
    roll_forward: tuple[int, ...]
    roll_back: tuple[int, ...]


class Phase(enum.Enum):
    """Where a member is in the walk through one epoch."""

    RUNNING = "running"
    REPORTING = "reporting"
    GATHERING = "gathering"
    PLANNING = "planning"
    ENTERING = "entering"
    EXCLUDED = "excluded"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One process in the protocol."""

    seat: Seat
    view: View
    phase: Phase


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Write:
    """Create the key with this value, unless somebody has created it before."""

    key: str
    value: str


type Step = tuple[Member, Write | None]


def view_key(epoch: int) -> str:
    """Where the view of an epoch stands."""
    return f"view/{epoch}"


def report_key(epoch: int, slot: int) -> str:
    """Where a member's report stands."""
    return f"report/{epoch}/{slot}"


def entry_key(epoch: int, slot: int) -> str:
    """Where the digest of a member's plan stands."""
    return f"entry/{epoch}/{slot}"


def done_key(epoch: int, slot: int) -> str:
    """Where a member says that it has nothing left to do."""
    return f"done/{epoch}/{slot}"


AWAITED = {Phase.GATHERING: report_key, Phase.ENTERING: entry_key}
"""The phases that wait for a key of every member."""


def newest_view(read: Read, since: View) -> View:
    """The last view of the chain; views are created in order, so the first gap is its end."""
    while (text := read(view_key(since.epoch + 1))) is not None:
        since = View.decode(text)
    return since


def without(view: View, lost: Iterable[int]) -> View:
    """The view after `view` that the slots in `lost` are no longer in."""
    gone = set(lost)
    return View(epoch=view.epoch + 1, seats=tuple(seat for seat in view.seats if seat.slot not in gone))


def with_newcomers(view: View, seats: Sequence[Seat]) -> View:
    """The view after `view` that these are in as well; who still sits in their slots is in no longer."""
    taken = {seat.slot for seat in seats}
    staying = [seat for seat in view.seats if seat.slot not in taken]
    return View(epoch=view.epoch + 1, seats=tuple(sorted((*staying, *seats))), newcomers=tuple(sorted(taken)))


def the_end(view: View) -> View:
    """The view after `view`, which nobody is in: the job is over."""
    return View(epoch=view.epoch + 1, seats=(), over=True)


def advance(
    member: Member, read: Read, *, lost: frozenset[int] = frozenset(), report: Report, digest: str | None
) -> Step:
    """One step of a member that thinks the slots in `lost` are gone and has `digest` of its plan, once it has one."""
    view = newest_view(read, member.view)
    if member.seat not in view.seats:
        return dataclasses.replace(member, view=view, phase=Phase.EXCLUDED), None
    if view.epoch > member.view.epoch:
        return dataclasses.replace(member, view=view, phase=Phase.REPORTING), None
    if lost & set(view.slots):
        return member, Write(key=view_key(view.epoch + 1), value=without(view, lost).encode())
    return _advance_within_view(member, read, report, digest)


def _advance_within_view(member: Member, read: Read, report: Report, digest: str | None) -> Step:
    epoch, slot = member.view.epoch, member.seat.slot
    following, write = member.phase, None
    if member.phase is Phase.REPORTING:
        following, write = Phase.GATHERING, Write(key=report_key(epoch, slot), value=report.encode())
    elif member.phase is Phase.PLANNING and digest is not None:
        following, write = Phase.ENTERING, Write(key=entry_key(epoch, slot), value=digest)
    elif member.phase in AWAITED and all(read(key) is not None for key in awaited_keys(member)):
        following = Phase.PLANNING if member.phase is Phase.GATHERING else Phase.RUNNING
    return dataclasses.replace(member, phase=following), write


def finish(member: Member, read: Read) -> tuple[bool | None, Write | None]:
    """One step of a running member that has nothing left to do: whether the job is over, None where it must look again.

    It is not where a newer view came first, which must agree.
    """
    view = member.view
    if (text := read(view_key(view.epoch + 1))) is not None:
        return View.decode(text).over, None
    if read(done_key(view.epoch, member.seat.slot)) is None:
        return None, Write(key=done_key(view.epoch, member.seat.slot), value="done")
    if any(read(done_key(view.epoch, slot)) is None for slot in view.slots):
        return None, None
    return None, Write(key=view_key(view.epoch + 1), value=the_end(view).encode())


def awaited_keys(member: Member) -> list[str]:
    """The keys that the member waits for others to create, besides the next view."""
    name = AWAITED.get(member.phase)
    return [name(member.view.epoch, slot) for slot in member.view.slots] if name else []


def read_reports(view: View, read: Read) -> dict[int, Report]:
    """All reports of a view whose members have all reported."""
    texts = {slot: read(report_key(view.epoch, slot)) for slot in view.slots}
    return {slot: Report.decode(text) for slot, text in texts.items() if text is not None}


def decide(reports: Mapping[int, Report]) -> Decision:
    """The newest step that every survivor can stand on."""
    veterans = {slot: report for slot, report in reports.items() if not report.newcomer}
    if not veterans:
        raise StateLost(
            f"all {len(reports)} members are newcomers, and nobody holds training state",
            way_out="restart from the last checkpoint",
        )
    votes = {report.applied: report.vote for report in veterans.values()}

    def can_stand(report: Report, step: int) -> bool:
        return report.oldest <= step <= report.applied or (
            report.prepared and step == report.applied + 1 and step in votes
        )

    for step in range(max(votes), min(report.oldest for report in veterans.values()) - 1, -1):
        if all(can_stand(report, step) for report in veterans.values()):
            return Decision(
                step=step,
                vote=votes.get(step, 0),
                roll_forward=tuple(sorted(slot for slot, report in veterans.items() if report.applied < step)),
                roll_back=tuple(sorted(slot for slot, report in veterans.items() if report.applied > step)),
            )
    raise StateLost(
        "the survivors have no step in common: "
        + ", ".join(
            f"slot {slot} holds {r.oldest} to {r.applied + r.prepared}" for slot, r in sorted(veterans.items())
        ),
        way_out="restart from the last checkpoint",
    )
