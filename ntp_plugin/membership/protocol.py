"""Agreement on epoch, members and the step to stand on, over a store whose keys are written once.

Every key is created by whoever comes first and never changes, so reading late is never reading wrong:

    view/E          who is in from epoch E on. Made from view/E-1 by whoever noticed a loss, or by a joining rank
    report/E/SLOT   where that member stands: what it applied, what it holds reduced gradients for
    entry/E/SLOT    the digest of the plan that it made of all reports of epoch E
    arrived/E/SLOT  that member has come to the end of its work, and has one thing left to do with all others
    done/E/SLOT     that member has nothing left to do; once all of epoch E have said so, the job ends

What all members read of all members is put together on the way (`gathering.py`).

A member recoveries  RUNNING -> REPORTING -> GATHERING -> PLANNING -> ENTERING -> RUNNING,  and from any of these back
to REPORTING when a newer view exists: a second and third loss need no rule of their own. A member that is not in the
newest view is EXCLUDED and must end: that is how a rank that was frozen and thawed, or cut off, is fenced. Who sits in
a slot is told apart by its `incarnation`, so that the old process of a slot that was given to another is fenced as
well.

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
from collections.abc import Iterable, Mapping, Sequence

from ntp_plugin.errors import StateLost
from ntp_plugin.membership.gathering import FAN, Gathering, Read, Write


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, order=True)
class MemberId:
    """A slot (its nominal rank) and the process that sits in it."""

    slot: int
    incarnation: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """Who is in from an epoch on, ascending by slot, and which of them came with it."""

    epoch: int
    member_ids: tuple[MemberId, ...]
    joiners: tuple[int, ...] = ()
    over: bool = False
    """All members said that they were done; where all were lost, nobody is in either."""

    @property
    def slots(self) -> tuple[int, ...]:
        return tuple(member_id.slot for member_id in self.member_ids)

    def encode(self) -> str:
        member_ids = [[member_id.slot, member_id.incarnation] for member_id in self.member_ids]
        return json.dumps([self.epoch, member_ids, self.joiners, self.over])

    @classmethod
    def decode(cls, text: str) -> "View":
        epoch, member_ids, joiners, over = json.loads(text)
        return cls(
            epoch=epoch,
            member_ids=tuple(MemberId(slot=slot, incarnation=incarnation) for slot, incarnation in member_ids),
            joiners=tuple(joiners),
            over=over,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Where a member stands when it leaves the epoch before.

    `prepared`: it had entered the vote on step `applied + 1`. `vote` is how the vote on `applied` went. A joining rank
    holds nothing yet and can stand anywhere. `offer` is what others need to reach it in the new epoch, and `held` what
    state it has, in its trainer's words.
    """

    applied: int
    oldest: int
    prepared: bool = False
    vote: int = 0
    joiner: bool = False
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
    """Where a member is in the recovery through one epoch."""

    RUNNING = "running"
    REPORTING = "reporting"
    GATHERING = "gathering"
    PLANNING = "planning"
    ENTERING = "entering"
    EXCLUDED = "excluded"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One process in the protocol."""

    member_id: MemberId
    view: View
    phase: Phase


type Step = tuple[Member, Write | None]


def view_key(epoch: int) -> str:
    """Where the view of an epoch stands."""
    return f"view/{epoch}"


def reports_of(view: View, fan: int = FAN) -> Gathering:
    """Where the members stand."""
    return Gathering(kind="report", epoch=view.epoch, slots=view.slots, fan=fan)


def entries_of(view: View, fan: int = FAN) -> Gathering:
    """The digests of the plans that the members made."""
    return Gathering(kind="entry", epoch=view.epoch, slots=view.slots, fan=fan)


def arrived_of(view: View, fan: int = FAN) -> Gathering:
    """Who has come to the end of its work, and has one thing left to do with all others."""
    return Gathering(kind="arrived", epoch=view.epoch, slots=view.slots, fan=fan)


def done_of(view: View, fan: int = FAN) -> Gathering:
    """Who has nothing left to do."""
    return Gathering(kind="done", epoch=view.epoch, slots=view.slots, fan=fan)


_AWAITED = {Phase.GATHERING: reports_of, Phase.ENTERING: entries_of}


def awaited_of(member: Member, fan: int = FAN) -> Gathering | None:
    """What the member waits for in its phase, besides the next view."""
    of = _AWAITED.get(member.phase)
    return of(member.view, fan) if of else None


def newest_view(read: Read, since: View) -> View:
    """The last view of the chain; views are created in order, so the first gap is its end."""
    while (text := read(view_key(since.epoch + 1))) is not None:
        since = View.decode(text)
    return since


def without(view: View, lost: Iterable[int]) -> View:
    """The view after `view` that the slots in `lost` are no longer in."""
    gone = set(lost)
    return View(
        epoch=view.epoch + 1, member_ids=tuple(member_id for member_id in view.member_ids if member_id.slot not in gone)
    )


def with_joiners(view: View, member_ids: Sequence[MemberId]) -> View:
    """The view after `view` that these are in as well; who still sits in their slots is in no longer."""
    taken = {member_id.slot for member_id in member_ids}
    staying = [member_id for member_id in view.member_ids if member_id.slot not in taken]
    return View(epoch=view.epoch + 1, member_ids=tuple(sorted((*staying, *member_ids))), joiners=tuple(sorted(taken)))


def the_end(view: View) -> View:
    """The view after `view`, which nobody is in: the job is over."""
    return View(epoch=view.epoch + 1, member_ids=(), over=True)


def advance(
    member: Member,
    read: Read,
    *,
    lost: frozenset[int] = frozenset(),
    report: Report,
    digest: str | None,
    fan: int = FAN,
) -> Step:
    """One step of a member that thinks the slots in `lost` are gone and has `digest` of its plan, once it has one."""
    view = newest_view(read, member.view)
    if member.member_id not in view.member_ids:
        return dataclasses.replace(member, view=view, phase=Phase.EXCLUDED), None
    if view.epoch > member.view.epoch:
        return dataclasses.replace(member, view=view, phase=Phase.REPORTING), None
    if lost & set(view.slots):
        return member, Write(key=view_key(view.epoch + 1), value=without(view, lost).encode())
    awaited = awaited_of(member, fan)
    if awaited is not None:
        return _await_all(member, awaited, read)
    return _say(member, report, digest, fan)


def _say(member: Member, report: Report, digest: str | None, fan: int) -> Step:
    view, slot = member.view, member.member_id.slot
    if member.phase is Phase.REPORTING:
        told = Write(key=reports_of(view, fan).own_key(slot), value=report.encode())
        return dataclasses.replace(member, phase=Phase.GATHERING), told
    if member.phase is Phase.PLANNING and digest is not None:
        told = Write(key=entries_of(view, fan).own_key(slot), value=digest)
        return dataclasses.replace(member, phase=Phase.ENTERING), told
    return member, None


def _await_all(member: Member, awaited: Gathering, read: Read) -> Step:
    due = awaited.due(member.member_id.slot, read)
    if due is not None or not awaited.complete(read):
        return member, due
    following = Phase.PLANNING if member.phase is Phase.GATHERING else Phase.RUNNING
    return dataclasses.replace(member, phase=following), None


def finish(member: Member, read: Read, fan: int = FAN) -> tuple[bool | None, Write | None]:
    """One step of a running member that has nothing left to do: whether the job is over, None where it must look again.

    It is not where a newer view came first, which must agree.
    """
    view, slot = member.view, member.member_id.slot
    if (text := read(view_key(view.epoch + 1))) is not None:
        return View.decode(text).over, None
    done = done_of(view, fan)
    if read(done.own_key(slot)) is None:
        return None, Write(key=done.own_key(slot), value="done")
    due = done.due(slot, read)
    if due is not None or not done.complete(read):
        return None, due
    return None, Write(key=view_key(view.epoch + 1), value=the_end(view).encode())


def arrive(member: Member, read: Read, fan: int = FAN) -> tuple[bool | None, Write | None]:
    """One step of a running member that has come to the end of its work: whether all others have, None where it must
    look again, False where a newer view must agree first."""
    view, slot = member.view, member.member_id.slot
    if read(view_key(view.epoch + 1)) is not None:
        return False, None
    arrived = arrived_of(view, fan)
    if read(arrived.own_key(slot)) is None:
        return None, Write(key=arrived.own_key(slot), value="arrived")
    due = arrived.due(slot, read)
    return (True, None) if due is None and arrived.complete(read) else (None, due)


def read_reports(view: View, read: Read, fan: int = FAN) -> dict[int, Report]:
    """All reports of a view whose members have all reported."""
    return {slot: Report.decode(text) for slot, text in reports_of(view, fan).values(read).items()}


def decide(reports: Mapping[int, Report]) -> Decision:
    """The newest step that every survivor can stand on."""
    veterans = {slot: report for slot, report in reports.items() if not report.joiner}
    if not veterans:
        raise StateLost(
            f"all {len(reports)} members are joining ranks, and nobody holds training state",
            way_out="restart from the last checkpoint",
        )
    votes = {report.applied: report.vote for report in veterans.values()}

    def can_resume(report: Report, step: int) -> bool:
        return report.oldest <= step <= report.applied or (
            report.prepared and step == report.applied + 1 and step in votes
        )

    for step in range(max(votes), min(report.oldest for report in veterans.values()) - 1, -1):
        if all(can_resume(report, step) for report in veterans.values()):
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
