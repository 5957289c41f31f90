"""Agreement on a real TCPStore, one step of one member at a time: hypothesis drives, invariants are checked after each.

This does not repeat the exhaustive search of `tests/unit`: there a step is atomic, here a member reads the store over
its own connection, and its writes may arrive later, after anything that others do. So do those of a frozen member: when
it thaws, it writes what it had prepared.
"""

import itertools
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import Phase as Stage
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ntp_plugin.errors import Excluded
from ntp_plugin.membership import protocol
from ntp_plugin.membership.agreement import Agreed, Agreement, publish_lost
from ntp_plugin.membership.gathering import FAN, Write
from ntp_plugin.membership.protocol import Member, MemberId, Phase, Report, View, the_end
from ntp_plugin.membership.store import TorchStore
from ntp_plugin.recovery.rank_context import first_view
from tests.unit.membership_model import Violation, vote_on
from tests.unit.test_membership_protocol import ask_for_the_most, report_like_others_do, run_in_a_stale_view

RUNS = itertools.count()
MOST_PROCESSES, LAST_STEP = 6, 3
ANYBODY = st.integers(0, MOST_PROCESSES - 1)


@pytest.fixture(scope="module")
def connections():
    """A connection for each process, one for the supervisor, one for the checker."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    clients = [
        dist.TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=60)) for _ in range(MOST_PROCESSES + 2)
    ]
    return server, clients


class Process:
    """A member with its training state, as far as agreement depends on it; `late` is a write that is still to come."""

    def __init__(self, store, member, *, joiner=False):
        self.store, self.member, self.joiner = store, member, joiner
        self.applied, self.prepared, self.plan, self.late = 0, False, None, None
        self.alive, self.frozen, self.left = True, False, False

    @property
    def member_id(self):
        return self.member.member_id

    @property
    def acts(self):
        return self.alive and not self.frozen and self.member.phase is not Phase.EXCLUDED

    def report(self):
        step = self.applied
        return Report(applied=step, oldest=step, prepared=self.prepared, vote=vote_on(step), joiner=self.joiner)


class Racing(TorchStore):
    """Lets others get in between a joining rank's look and its first write."""

    def __init__(self, connection, meanwhile, **of):
        super().__init__(connection, **of)
        self._meanwhile = meanwhile

    def create(self, key, value):
        meanwhile, self._meanwhile = self._meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return super().create(key, value)


class AgreementMachine(RuleBasedStateMachine):
    clients: list

    @initialize(slots=st.integers(2, 4), moves=st.integers(0, 16), fan=st.sampled_from((2, FAN)))
    def found(self, slots, moves, fan):
        self.fan = fan
        self.corner = f"machine{next(RUNS)}"
        self.first = first_view(slots)
        self.views = {0: self.first}
        self.agreed: dict[int, Agreed] = {}
        self.sent = set()
        self.checker = self.connect(MOST_PROCESSES)
        self.supervising = self.connect(MOST_PROCESSES + 1)
        self.processes = []
        for index, member_id in enumerate(self.first.member_ids):
            member = Member(member_id=member_id, view=self.first, phase=Phase.RUNNING)
            self.processes.append(Process(self.connect(index), member))
        self.train(range(moves))

    def connect(self, index, kind=TorchStore, *more):
        return kind(self.clients[index], *more, corner=self.corner, token="a token")

    def publish_lost(self, member_id):
        publish_lost(self.supervising, self.first, [member_id])

    def pick(self, index, *, acting=False):
        among = [process for process in self.processes if process.acts] if acting else self.processes
        return among[index % len(among)]

    # ------------------------------------------------ what members do

    @precondition(lambda self: any(process.acts for process in self.processes))
    @rule(index=ANYBODY, times=st.integers(1, 6), doubted=st.none() | ANYBODY, late=st.booleans())
    def step(self, index, times, doubted, late):
        """Some steps in the agreement, with a suspicion, false or not; or up to a write, which stays behind."""
        process = self.pick(index, acting=True)
        lost = (
            frozenset()
            if doubted is None
            else frozenset({self.pick(doubted).member_id.slot}) - {process.member_id.slot}
        )
        for _ in range(times):
            self.advance(process, lost, late=late)
            if process.late is not None:
                break

    def advance(self, process, lost=frozenset(), *, late=False):
        self.catch_up(process)
        if not process.acts:
            return
        before = process.member
        if before.phase is Phase.PLANNING and process.plan is None and not self.make_plan(process):
            return
        digest = None if process.plan is None else repr(process.plan.decision)
        process.member, process.late = protocol.advance(
            before, process.store.read, lost=lost, report=process.report(), digest=digest, fan=self.fan
        )
        if process.member.view.epoch > before.view.epoch:
            process.plan = None
        if not late:
            self.catch_up(process)
        if before.phase is Phase.ENTERING and process.member.phase is Phase.RUNNING:
            self.stand(process)

    def catch_up(self, process):
        """The write that was still to come."""
        if not process.acts or process.late is None:
            return
        write, process.late = process.late, None
        existed = self.checker.present([write.key])
        process.store.create(write.key, write.value)
        if existed:
            return
        kind, epoch, *_ = write.key.split("/")
        since = int(epoch) - (kind == "view")
        self.one_view_for_each_epoch()
        if process.member_id not in self.views[since].member_ids:
            raise Violation(f"{process.member_id} wrote {write.key} without being in epoch {since}")

    def make_plan(self, process):
        """Whether there is one: joining ranks alone end, and say why."""
        view = process.member.view
        reports = protocol.read_reports(view, process.store.read, self.fan)
        process.alive = any(not report.joiner for report in reports.values())
        try:
            if process.alive:
                process.plan = Agreed(view=view, reports=reports, decision=protocol.decide(reports))
        except protocol.StateLost as error:
            raise Violation(str(error)) from None
        return process.alive

    def stand(self, process):
        view, agreed, plan = process.member.view, process.plan, process.plan.decision
        if self.agreed.setdefault(view.epoch, agreed) != agreed:
            raise Violation(f"epoch {view.epoch} knows {self.agreed[view.epoch]} and {agreed}")
        plans = {self.checker.read(protocol.entries_of(view).own_key(slot)) for slot in view.slots}
        if plans != {repr(plan)}:
            raise Violation(f"the members of epoch {view.epoch} made different plans: {plans}")
        if not process.joiner and not process.applied <= plan.step <= process.applied + process.prepared:
            raise Violation(f"slot {process.member_id.slot} is at {process.applied} and cannot resume from {plan.step}")
        survivors = [p for p in self.processes if p.alive and not p.joiner and p.member_id in view.member_ids]
        if any(p.applied > plan.step for p in survivors):
            raise Violation(f"epoch {view.epoch} goes back to step {plan.step}, and a survivor has applied more")
        if plan.vote != vote_on(plan.step):
            raise Violation(f"the vote on step {plan.step} is told wrongly")
        process.applied, process.prepared, process.joiner, process.plan = plan.step, False, False, None

    @precondition(lambda self: any(process.acts for process in self.processes))
    @rule(order=st.lists(ANYBODY, min_size=1, max_size=12))
    def train(self, order):
        """Members contribute to the next step, enter its vote and apply it, as far as the others let them."""
        for index in order:
            process = self.pick(index, acting=True)
            view, step = process.member.view, process.applied + 1
            if process.member.phase is not Phase.RUNNING or step > LAST_STEP:
                continue
            here, mine = (view.epoch, step), process.member_id.slot
            if not process.prepared:
                self.sent.add(("gradients", *here, mine))
                if all(("gradients", *here, slot) in self.sent for slot in view.slots):
                    self.sent.add(("vote", *here, mine))
                    process.prepared = True
            elif all(("vote", *here, slot) in self.sent for slot in view.slots):
                process.applied, process.prepared = step, False

    @precondition(lambda self: any(process.acts for process in self.processes))
    @rule(index=ANYBODY, times=st.integers(1, 3))
    def finish(self, index, times):
        """A member that has applied the last step says so, and looks whether all have."""
        process = self.pick(index, acting=True)
        for _ in range(times):
            if self.may_finish(process):
                self.take_leave(process)

    def may_finish(self, process):
        running = process.member.phase is Phase.RUNNING and process.late is None
        return process.acts and running and process.applied == LAST_STEP

    def take_leave(self, process):
        over, write = protocol.finish(process.member, process.store.read, self.fan)
        if write is not None:
            process.store.create(write.key, write.value)
        if over:
            missed = [
                p.member_id
                for p in self.processes
                if p.member_id in process.member.view.member_ids and p.applied < LAST_STEP
            ]
            if missed:
                raise Violation(f"the job is over, and {missed} had not applied the last step")
            process.left, process.alive = True, False
        elif over is not None:  # a loss came first
            self.advance(process)

    # ------------------------------------------------ what happens to them

    @precondition(lambda self: sum(process.acts for process in self.processes) > 1)
    @rule(index=ANYBODY, published=st.booleans())
    def die(self, index, published):
        """In whatever phase it is; what it had not written yet is never written."""
        process = self.pick(index)
        process.alive = False
        if published:
            self.publish_lost(process.member_id)

    @rule(index=ANYBODY)
    def publish(self, index):
        """A supervisor reports a loss: of a dead or a frozen process, or a false one."""
        if sum(process.acts for process in self.processes) > 2 or not self.pick(index).acts:
            self.publish_lost(self.pick(index).member_id)

    @precondition(lambda self: sum(process.acts for process in self.processes) > 1)
    @rule(index=ANYBODY)
    def freeze(self, index):
        self.pick(index).frozen = True

    @precondition(lambda self: any(process.frozen for process in self.processes))
    @rule(index=ANYBODY)
    def thaw(self, index):
        frozen = [process for process in self.processes if process.frozen]
        frozen[index % len(frozen)].frozen = False

    @precondition(lambda self: len(self.processes) < MOST_PROCESSES)
    @rule(index=ANYBODY, raced=st.none() | ANYBODY)
    def join(self, index, raced):
        """A new process joins for a slot whose old one is dead, or evicted; another loss may come in between."""
        old = self.pick(index)
        rivals = [p for p in self.processes if p.member_id.slot == old.member_id.slot and p is not old]
        if any(p.alive and p.member_id in self.newest().member_ids for p in (old, *rivals)):
            return
        member_id = MemberId(slot=old.member_id.slot, incarnation=f"{old.member_id.slot}/{len(self.processes)}")
        meanwhile = None if raced is None else lambda: self.publish_lost(self.pick(raced).member_id)
        store = self.connect(len(self.processes), Racing, meanwhile)
        if self.newest().over:
            with pytest.raises(Excluded, match="comes too late"):
                Agreement.joining(store, self.first, member_id)
            return
        member = Agreement.joining(store, self.first, member_id).member
        self.processes.append(Process(store, member, joiner=True))

    # ------------------------------------------------ what must hold

    def newest(self):
        self.one_view_for_each_epoch()
        return max(self.views.values(), key=lambda view: view.epoch)

    @invariant()
    def holds(self):
        if hasattr(self, "processes"):
            self.one_view_for_each_epoch()
            self.members_of_an_epoch_are_of_one_mind()

    def one_view_for_each_epoch(self):
        while (text := self.checker.read(protocol.view_key(len(self.views)))) is not None:
            epoch, view = len(self.views), View.decode(text)
            if view.epoch != epoch:
                raise Violation(f"the view of epoch {view.epoch} stands at {epoch}")
            self.views[epoch] = view

    def members_of_an_epoch_are_of_one_mind(self):
        for process in self.processes:
            view = process.member.view
            if process.alive and self.views[view.epoch] != view:
                raise Violation(
                    f"{process.member_id} takes epoch {view.epoch} for {view}, which is {self.views[view.epoch]}"
                )
            running = [
                p.applied
                for p in self.processes
                if p.alive and (p.member.view, p.member.phase) == (view, Phase.RUNNING)
            ]
            if running and max(running) - min(running) > 1:
                raise Violation(f"members of epoch {view.epoch} run {running} steps apart")

    def come_to_rest(self):
        """Everybody takes a step in a round. A late write may make a view of its own, and each view takes six steps."""
        for _ in range(6 * (len(self.processes) + 1)):
            before = self.all_that_changes()
            for process in self.processes:
                if self.may_finish(process):
                    self.take_leave(process)
                else:
                    self.advance(process)
                if not process.alive and not process.left:
                    self.publish_lost(process.member_id)
            if before == self.all_that_changes():
                return

    def all_that_changes(self):
        return [(process.member, process.alive) for process in self.processes], self.checker._store.num_keys()

    def teardown(self):
        """Faults stop: everybody alive who is not out comes to run in the newest view, in so many steps."""
        if not hasattr(self, "processes"):
            return
        for process in self.processes:
            process.frozen = False
            if not process.alive and not process.left:
                self.publish_lost(process.member_id)
        self.come_to_rest()
        going_on = [process for process in self.processes if process.acts]
        self.holds()
        beyond = [epoch for epoch in range(1, 4) if self.checker.present([protocol.view_key(len(self.views) + epoch)])]
        if beyond:
            raise Violation(f"a view was made beyond the gap after epoch {len(self.views) - 1}")
        for epoch, view in list(self.views.items())[1:]:
            if View.decode(self.checker.read(protocol.view_key(epoch))) != view:
                raise Violation(f"the view of epoch {epoch} has changed")
        resting = {(process.member.view, process.member.phase) for process in going_on}
        if self.newest().over and going_on:
            raise Violation(f"the job is over without {[p.member for p in going_on]}")
        if going_on and resting != {(self.newest(), Phase.RUNNING)}:
            raise Violation(f"at rest in epoch {self.newest().epoch}: {[p.member for p in going_on]}")


def look(machine_settings):
    run_state_machine_as_test(AgreementMachine, settings=machine_settings)


def test_no_run_on_the_real_store_breaks_the_agreement(connections, monkeypatch):
    monkeypatch.setattr(AgreementMachine, "clients", connections[1], raising=False)
    look(settings(max_examples=100, stateful_step_count=40))


def overwrite(_sound):
    """The last writer wins."""

    def broken(store, key, value):
        store._store.set(key, store._signed(key, value))
        return value

    return "create", broken


def end_alone(sound):
    """A finished member takes all others for finished."""

    def broken(member, read, fan):
        over, write = sound(member, read, fan)
        if over is None and write is None:
            write = Write(key=protocol.view_key(member.view.epoch + 1), value=the_end(member.view).encode())
        return over, write

    return "finish", broken


PLANTED = [
    (protocol, end_alone),
    (protocol, report_like_others_do),
    (protocol, ask_for_the_most),
    (protocol, run_in_a_stale_view),
    (TorchStore, overwrite),
]


@pytest.mark.parametrize(("owner", "planted"), PLANTED, ids=[planted.__name__ for _, planted in PLANTED])
def test_a_planted_bug_is_found(connections, monkeypatch, owner, planted):
    monkeypatch.setattr(AgreementMachine, "clients", connections[1], raising=False)
    name = planted(None)[0]
    monkeypatch.setattr(owner, name, planted(getattr(owner, name))[1])
    with pytest.raises(Violation):
        look(
            settings(
                max_examples=2000, stateful_step_count=40, derandomize=True, database=None, phases=[Stage.generate]
            )
        )
