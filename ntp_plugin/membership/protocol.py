"""Agreement on epoch, members and the step to resume from, over a store whose keys are written once.

The first process to create a key sets its value, which never changes. So a late read is never a wrong read:

    view/E          the members from epoch E on. Made from view/E-1 by any process that noticed a loss, or joins
    report/E/SLOT   that member's progress: the step it applied, and the step it holds reduced gradients for
    entry/E/SLOT    the digest of the plan that it made from all reports of epoch E
    arrived/E/SLOT  that member has come to the end of its work, and has one thing left to do with all others
    done/E/SLOT     that member has nothing left to do; once all of epoch E have reported this, the job ends

Values that all members read of all members are aggregated on the way (`gathering.py`).

A member goes through  RUNNING -> REPORTING -> GATHERING -> PLANNING -> ENTERING -> RUNNING,  and from any of these back
to REPORTING when a newer view exists: a second and third loss need no rule of their own. A member that is not in the
newest view is EXCLUDED and must end: this fences a rank that was frozen and thawed, or cut off. The `incarnation` tells
the processes of a slot apart, so that the old process of a slot that was given to another one is fenced as well.

The job ends with a view without members that says so. Either that view comes next or a loss does, never both, so that
no member leaves while another one still needs its report.

Decisions need no message: reports are written once and every member reads all of them before it decides.

All resume from the newest step that every survivor can resume from. A member can resume from any step between its
`oldest` and its `applied`, and from the one after, if it holds the reduced gradients (it had entered the vote) and some
member knows the result of the vote (it has applied it). A member that completed a vote knows that all had entered it,
so whatever one member has applied, all can apply: no applied step is undone as long as its members survive in memory.

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
    """A slot (its nominal rank) and the incarnation of the process in it."""

    slot: int
    incarnation: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """The members from an epoch on, ascending by slot, and which of them joined with it."""

    epoch: int
    member_ids: tuple[MemberId, ...]
    joiners: tuple[int, ...] = ()
    over: bool = False
    """All members reported that they were done. A view after the loss of all members is empty too, but not over."""

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
    """A member's progress when it leaves the epoch before.

    `prepared`: it had entered the vote on step `applied + 1`. `vote` is the result of the vote on `applied`. A joining
    rank holds nothing yet and can resume from any step. `offer` holds the addresses by which others connect to it in
    the new epoch, and `held` describes the state that it has, in a format of its trainer.
    """

    applied: int
    oldest: int
    prepared: bool = False
    vote: int = 0
    joiner: bool = False
    addresses: Mapping[str, str] = dataclasses.field(default_factory=dict)
    held: str = ""

    def encode(self) -> str:
        return json.dumps(dataclasses.astuple(self))

    @classmethod
    def decode(cls, text: str) -> "Report":
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**dict(zip(names, json.loads(text), strict=True)))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The step that all resume from, the result of the vote on it, and who must still apply or undo a step."""

    step: int
    vote: int
    roll_forward: tuple[int, ...]
    roll_back: tuple[int, ...]


class Phase(enum.Enum):
    """A member's phase in the recovery through one epoch."""

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
    """Key of the view of an epoch."""
    return f"view/{epoch}"


def reports_of(view: View, fan: int = FAN) -> Gathering:
    """The members' reports."""
    return Gathering(kind="report", epoch=view.epoch, slots=view.slots, fan=fan)


def entries_of(view: View, fan: int = FAN) -> Gathering:
    """The digests of the members' plans."""
    return Gathering(kind="entry", epoch=view.epoch, slots=view.slots, fan=fan)


def arrived_of(view: View, fan: int = FAN) -> Gathering:
    """Marks of members that have come to the end of their work, and have one thing left to do with all others."""
    return Gathering(kind="arrived", epoch=view.epoch, slots=view.slots, fan=fan)


def done_of(view: View, fan: int = FAN) -> Gathering:
    """Marks of members that have nothing left to do."""
    return Gathering(kind="done", epoch=view.epoch, slots=view.slots, fan=fan)


_AWAITED = {Phase.GATHERING: reports_of, Phase.ENTERING: entries_of}


def awaited_of(member: Member, fan: int = FAN) -> Gathering | None:
    """The values that the member waits for in its phase, besides the next view."""
    of = _AWAITED.get(member.phase)
    return of(member.view, fan) if of else None


def newest_view(read: Read, since: View) -> View:
    """Return the last view of the chain; views are created in order, so the first gap is its end."""
    while (text := read(view_key(since.epoch + 1))) is not None:
        since = View.decode(text)
    return since


def without(view: View, lost: Iterable[int]) -> View:
    """Return the view after `view`, without the slots in `lost`."""
    leaving = set(lost)
    return View(
        epoch=view.epoch + 1,
        member_ids=tuple(member_id for member_id in view.member_ids if member_id.slot not in leaving),
    )


def with_joiners(view: View, member_ids: Sequence[MemberId]) -> View:
    """Return the view after `view` with these members added; they replace the processes in their slots."""
    taken = {member_id.slot for member_id in member_ids}
    staying = [member_id for member_id in view.member_ids if member_id.slot not in taken]
    return View(epoch=view.epoch + 1, member_ids=tuple(sorted((*staying, *member_ids))), joiners=tuple(sorted(taken)))


def the_end(view: View) -> View:
    """Return the view after `view`, without members: the job is over."""
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
    """Take one step as a member that knows the slots in `lost` to be lost, and has `digest` of its plan, if any."""
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
    return _publish(member, report, digest, fan)


def _publish(member: Member, report: Report, digest: str | None, fan: int) -> Step:
    view, slot = member.view, member.member_id.slot
    if member.phase is Phase.REPORTING:
        write = Write(key=reports_of(view, fan).own_key(slot), value=report.encode())
        return dataclasses.replace(member, phase=Phase.GATHERING), write
    if member.phase is Phase.PLANNING and digest is not None:
        write = Write(key=entries_of(view, fan).own_key(slot), value=digest)
        return dataclasses.replace(member, phase=Phase.ENTERING), write
    return member, None


def _await_all(member: Member, awaited: Gathering, read: Read) -> Step:
    due = awaited.due(member.member_id.slot, read)
    if due is not None or not awaited.complete(read):
        return member, due
    following = Phase.PLANNING if member.phase is Phase.GATHERING else Phase.RUNNING
    return dataclasses.replace(member, phase=following), None


def finish(member: Member, read: Read, fan: int = FAN) -> tuple[bool | None, Write | None]:
    """Take one step as a running member that has nothing left to do.

    Returns:
        True: the job is over. False: a newer view came first, and must agree. None: look again. And a key to write.
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
    """Take one step as a running member that has come to the end of its work.

    Returns:
        True: all others have, too. False: a newer view must agree first. None: look again. And a key to write.
    """
    view, slot = member.view, member.member_id.slot
    if read(view_key(view.epoch + 1)) is not None:
        return False, None
    arrived = arrived_of(view, fan)
    if read(arrived.own_key(slot)) is None:
        return None, Write(key=arrived.own_key(slot), value="arrived")
    due = arrived.due(slot, read)
    return (True, None) if due is None and arrived.complete(read) else (None, due)


def read_reports(view: View, read: Read, fan: int = FAN) -> dict[int, Report]:
    """Return all reports of a view whose members have all reported."""
    return {slot: Report.decode(text) for slot, text in reports_of(view, fan).values(read).items()}


def decide(reports: Mapping[int, Report]) -> Decision:
    """Choose the newest step that every survivor can resume from.

    Raises:
        StateLost: No member holds training state, or the survivors have no step in common.
    """
    veterans = {slot: report for slot, report in reports.items() if not report.joiner}
    if not veterans:
        raise StateLost(
            f"all {len(reports)} members are joining ranks, and none of them holds training state",
            fix="restart from the last checkpoint",
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
        fix="restart from the last checkpoint",
    )
