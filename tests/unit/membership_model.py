"""Explore every interleaving of a few members: the real `advance` and `decide` on a store of a dict.

One transition is one atomic step of one member, or one event: a death, a suspicion (of a dead slot, or a false one), a
process that joins a free slot. Training is modelled as far as agreement depends on it: a member contributes its
gradients for step s, holds the reduced ones once all members of its view have contributed (`prepared`: it enters the
vote), and applies once all members of its view have entered the vote. What a member has sent into a collective stays
sent when it leaves; what a dead member sent before it died counts too. A member that has taken the last step reports
that it is done, and leaves when all of its view have reported it.
"""

import dataclasses
from collections import deque

from ntp_plugin.membership import protocol
from ntp_plugin.membership.gathering import FAN
from ntp_plugin.membership.protocol import Decision, Member, MemberId, Phase, Report, View


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    member: Member
    applied: int
    kept: int
    """How many steps back it can return: 0 where an update is made in place."""
    prepared: bool = False
    joiner: bool = False
    alive: bool = True
    finished: bool = False
    plan: Decision | None = None

    def report(self) -> Report:
        return Report(
            applied=self.applied,
            oldest=max(0, self.applied - self.kept),
            prepared=self.prepared,
            vote=vote_on(self.applied),
            joiner=self.joiner,
        )


def vote_on(step):
    return step % 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class State:
    processes: tuple[Process, ...]
    store: frozenset = frozenset()
    sent: frozenset = frozenset()
    """("gradients" | "vote", epoch, step, slot) for everything that went into a collective."""
    resumed: frozenset = frozenset()
    """(epoch, step) for every decision that was acted on."""
    kills: int
    doubts: int
    joins: int
    fan: int


class Violation(AssertionError):
    pass


def start(slots, *, kept=0, kills=1, doubts=0, joins=0, fan=FAN):
    member_ids = tuple(MemberId(slot=slot, incarnation=f"first{slot}") for slot in range(slots))
    view = View(epoch=0, member_ids=member_ids)
    processes = tuple(
        Process(member=Member(member_id=member_id, view=view, phase=Phase.RUNNING), applied=0, kept=kept)
        for member_id in member_ids
    )
    return State(processes=processes, kills=kills, doubts=doubts, joins=joins, fan=fan)


def explore(initial, *, last_step=2, limit=2_000_000):
    """Visit every reachable state once; raises `Violation` with the trace to a bad one. Returns how many there are."""
    came_from, waiting = {initial: None}, deque([initial])
    while waiting:
        state = waiting.popleft()
        try:
            reached = list(transitions(state, last_step))
            check_rest(state, reached)
            for _, following in reached:
                check(following)
        except Violation as bad:
            raise Violation(f"{bad}; after: {' '.join(trace(came_from, state))}") from None
        for name, following in reached:
            if following not in came_from:
                came_from[following] = (state, name)
                waiting.append(following)
        assert len(came_from) < limit, "the model is larger than it was meant to be"
    return len(came_from)


def trace(came_from, state):
    names = []
    while came_from[state]:
        state, name = came_from[state]
        names.append(name)
    return reversed(names)


# ---------------------------------------------------------------- what may happen


def transitions(state, last_step):
    store = dict(state.store)
    living = [process for process in state.processes if process.alive]
    dead_or_replaced = {process.member.member_id for process in state.processes if not process.alive}
    for index, process in enumerate(state.processes):
        if not process.alive or process.finished:
            continue
        slot = process.member.member_id.slot
        if state.kills and len(living) > 1:
            dead = dataclasses.replace(process, alive=False)
            yield f"kill{slot}", replace(state, index, dead, kills=state.kills - 1)
        if process.member.phase is Phase.EXCLUDED:
            continue
        if process.member.phase is Phase.RUNNING and process.applied == last_step:
            yield from finishing_steps(state, store, index, process)
            if next_view_is_the_end(process.member, store):
                continue  # it learns of that by finishing alone
        yield from agreement_steps(state, store, index, process, dead_or_replaced)
        yield from training_steps(state, index, process, last_step)
    if state.joins:
        yield from joining_steps(state, store)


def next_view_is_the_end(member, store):
    text = store.get(protocol.view_key(member.view.epoch + 1))
    return text is not None and View.decode(text).over


def finishing_steps(state, store, index, process):
    slot = process.member.member_id.slot
    over, write = protocol.finish(process.member, store.get, state.fan)
    if over:
        yield f"leave{slot}", replace(state, index, dataclasses.replace(process, finished=True))
    elif write is not None:
        yield f"done{slot}", dataclasses.replace(state, store=state.store | {(write.key, write.value)})


def agreement_steps(state, store, index, process, dead):
    slot, others = (
        process.member.member_id.slot,
        [s for s in process.member.view.member_ids if s != process.member.member_id],
    )
    lost_slots = frozenset(member_id.slot for member_id in others if member_id in dead)
    doubts = [(f"step{slot}", frozenset(), 0)]
    doubts += [(f"notice{slot}", lost_slots, 0)] if lost_slots else []
    if state.doubts:
        doubts += [
            (f"doubt{slot}-{member_id.slot}", frozenset({member_id.slot}), 1)
            for member_id in others
            if member_id.slot not in lost_slots
        ]
    for name, lost, price in doubts:
        member, write = protocol.advance(
            process.member, store.get, lost=lost, report=process.report(), digest=repr(process.plan), fan=state.fan
        )
        following = state
        if write is not None and write.key not in store:
            following = dataclasses.replace(following, store=following.store | {(write.key, write.value)})
        if member != process.member:
            following = enter(following, store, index, dataclasses.replace(process, member=member))
        if following != state:
            yield name, dataclasses.replace(following, doubts=following.doubts - price)


def enter(state, store, index, process):
    """A member plans when it has gathered the reports, and resumes from the decided step when it is RUNNING again."""
    if process.member.phase is Phase.PLANNING:
        try:
            plan = protocol.decide(protocol.read_reports(process.member.view, store.get, state.fan))
        except protocol.StateLost as error:
            if process.joiner:
                return replace(state, index, dataclasses.replace(process, alive=False))  # it ends, and says why
            raise Violation(str(error)) from None
        return replace(state, index, dataclasses.replace(process, plan=plan))
    if process.member.phase is Phase.RUNNING:
        check_plan(store, process)
        state = dataclasses.replace(state, resumed=state.resumed | {(process.member.view.epoch, process.plan.step)})
        process = dataclasses.replace(process, applied=process.plan.step, prepared=False, joiner=False, plan=None)
    return replace(state, index, process)


def check_plan(store, process):
    view, plan = process.member.view, process.plan
    if None in own_values(protocol.reports_of(view), store) or len(own_values(protocol.entries_of(view), store)) > 1:
        raise Violation(f"the members of epoch {view.epoch} made different plans, or have not all made theirs")
    reports = [Report.decode(text) for text in own_values(protocol.reports_of(view), store)]
    newest = max(report.applied for report in reports if not report.joiner)
    if plan.step < newest:
        raise Violation(f"step {newest} was applied, and epoch {view.epoch} goes back to {plan.step}")
    if plan.vote != vote_on(plan.step):
        raise Violation(f"the vote on step {plan.step} is told wrongly")
    reachable = process.applied + process.prepared
    if not process.joiner and not process.applied - process.kept <= plan.step <= reachable:
        raise Violation(f"slot {process.member.member_id.slot} cannot resume from step {plan.step}")


def own_values(by_all, store):
    """The values that members wrote themselves, however they are combined; None if one has not."""
    return {store.get(by_all.own_key(slot)) for slot in by_all.slots}


def training_steps(state, index, process, last_step):
    member, step = process.member, process.applied + 1
    if member.phase is not Phase.RUNNING or step > last_step:
        return
    slot, epoch = member.member_id.slot, member.view.epoch

    def all_sent(what):
        return all((what, epoch, step, other) in state.sent for other in member.view.slots)

    if ("gradients", epoch, step, slot) not in state.sent:
        yield f"backward{slot}", dataclasses.replace(state, sent=state.sent | {("gradients", epoch, step, slot)})
    elif not process.prepared:
        if all_sent("gradients"):
            voting = dataclasses.replace(state, sent=state.sent | {("vote", epoch, step, slot)})
            yield f"vote{slot}", replace(voting, index, dataclasses.replace(process, prepared=True))
    elif all_sent("vote"):
        yield f"apply{slot}", replace(state, index, dataclasses.replace(process, applied=step, prepared=False))


def joining_steps(state, store):
    view = protocol.newest_view(
        store.get,
        View(
            epoch=0,
            member_ids=tuple(
                p.member.member_id for p in state.processes if p.member.member_id.incarnation.startswith("first")
            ),
        ),
    )
    if view.over:
        return
    for index, process in enumerate(state.processes):
        slot = process.member.member_id.slot
        if slot in view.slots or (process.alive and process.member.phase is not Phase.EXCLUDED):
            continue
        member_id = MemberId(slot=slot, incarnation=f"next{state.joins}-{slot}")
        entering = protocol.with_joiners(view, [member_id])
        member = Member(member_id=member_id, view=entering, phase=Phase.REPORTING)
        joiner = Process(member=member, applied=0, kept=process.kept, joiner=True)
        joined = dataclasses.replace(
            state, store=state.store | {(protocol.view_key(entering.epoch), entering.encode())}, joins=state.joins - 1
        )
        yield f"join{slot}", replace(joined, index, joiner)


def replace(state, index, process, **changed):
    processes = (*state.processes[:index], process, *state.processes[index + 1 :])
    return dataclasses.replace(state, processes=processes, **changed)


# ---------------------------------------------------------------- what must hold


def check(state):
    epochs = [epoch for epoch, _ in state.resumed]
    if len(epochs) != len(set(epochs)):
        raise Violation(f"one epoch resumed from two steps: {sorted(state.resumed)}")
    running = [p for p in state.processes if p.alive and p.member.phase is Phase.RUNNING]
    for process in running:
        together = [p.applied for p in running if p.member.view == process.member.view]
        if max(together) - min(together) > 1:
            raise Violation(f"members of epoch {process.member.view.epoch} are {together} steps apart")
        if process.finished and min(together) < process.applied:
            raise Violation(f"slot {process.member.member_id.slot} has left, and others of its view have steps to take")


def check_rest(state, reached):
    """When nothing but deaths, doubts and joins can happen, everybody who is not fenced has left the job together."""
    if any(not name.startswith(("kill", "doubt", "join")) for name, _ in reached):
        return
    going_on = [p for p in state.processes if p.alive and p.member.phase is not Phase.EXCLUDED]
    if not all(p.finished for p in going_on):
        raise Violation(
            "somebody waits for ever: "
            + ", ".join(f"{p.member.member_id.slot} {p.member.phase.value}" for p in going_on)
        )
    if len({p.member.view for p in going_on}) > 1:
        raise Violation("the job has ended in two views")
