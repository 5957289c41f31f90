"""One simulated rank: it trains, agrees, resumes, and leaves.

Training is here as far as agreement depends on it. A step is a contribution to every other member, the vote once all
contributions have come, and the update once all votes have. What has been sent stays sent; who has left an epoch takes
no more part in its collectives. A joining rank holds nothing until a veteran has sent it its state.
"""

import dataclasses
import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from ntp_plugin.errors import StateLost
from ntp_plugin.membership import protocol
from ntp_plugin.membership.failure_detector import Pulse
from ntp_plugin.membership.gathering import Read
from ntp_plugin.membership.protocol import Decision, Member, MemberId, Phase, Report, View
from ntp_plugin.simulator.protocol import laws

if TYPE_CHECKING:
    from ntp_plugin.simulator.protocol.job import VirtualJob

GRADIENTS, VOTE, STATE = "gradients", "vote", "state"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """From member to member, in a collective or a transfer of one epoch."""

    what: str
    epoch: int
    step: int
    sender: int
    state: int | None = None


class SimulatedProcess:
    """What one process knows and does; nothing of it outlives its death."""

    def __init__(self, job: "VirtualJob", member: Member, host: int, *, joiner: bool) -> None:
        self._job, self.member, self.host, self.joiner = job, member, host, joiner
        self.applied, self.prepared = 0, False
        self.state: int | None = None if joiner else laws.lineage(0)
        self.alive, self.frozen, self.left = True, False, False
        self.started_at = self.moved_at = job.time.now
        self.hung_at: float | None = None
        self.stopped_at: float | None = None
        """When it died or was frozen: it has sent no heartbeat since."""
        self._computing: tuple[int, int] | None = None
        """Epoch and step that it works at, outside of every collective."""
        self._own_report: Report | None = None
        self._decision: Decision | None = None
        self._reports: dict[int, Report] = {}
        self._inbox: set[Message] = set()
        self._looking = self._again = False
        """An answer of the store is on its way; what comes meanwhile makes it look once more."""
        self._put_off: list[Callable[[], None]] = []

    @property
    def member_id(self) -> MemberId:
        return self.member.member_id

    @property
    def acts(self) -> bool:
        """It lives, and its main thread runs."""
        return self.alive and not self.left and self.member.phase is not Phase.EXCLUDED

    @property
    def hung(self) -> bool:
        """Its main thread does nothing any more."""
        return self.hung_at is not None

    # ------------------------------------------------ what befalls it

    def die(self) -> None:
        self.alive = False
        self.stopped_at = self._job.time.now if self.stopped_at is None else self.stopped_at

    def freeze(self) -> None:
        self.frozen, self.stopped_at = True, self._job.time.now

    def thaw(self) -> None:
        """What it would have done meanwhile it does now."""
        if not self.alive or not self.frozen:
            return
        self.frozen, self.stopped_at = False, None
        put_off, self._put_off = self._put_off, []
        for work in put_off:
            self._do(work)

    def hang(self) -> None:
        """Its main thread hangs wherever it is, also in a wait for others; its heartbeat goes on."""
        self.hung_at = self._job.time.now
        if self._computing is not None:
            self.moved_at = self.hung_at

    def pulse(self, now: float, heartbeat_s: float) -> Pulse:
        """What its host's supervisor knows of it."""
        until = now if self.stopped_at is None else min(now, self.stopped_at)
        heartbeat_at = max(self.started_at, until - until % heartbeat_s)
        polled_at = heartbeat_at if self.hung_at is None else min(heartbeat_at, self.hung_at)
        return Pulse(
            started_at=self.started_at,
            heartbeat_at=heartbeat_at,
            moved_at=self.moved_at,
            polled_at=polled_at if self._computing is None else None,
            stopped=self.frozen,
            asked_at=now,
            ran_at=until,
            ended=None if self.alive and not self.left else 0 if self.left else -9,
            over=self.left,
        )

    def _do(self, work: Callable[[], None]) -> None:
        if self.frozen:
            self._put_off.append(work)
        elif self.acts and not self.hung:
            self.moved_at = self._job.time.now
            work()

    # ------------------------------------------------ agreement

    def stir(self) -> None:
        """Look at the store, and do what follows."""
        self._again = self._looking  # what is on its way may be from before
        if self._looking or not self.acts:
            return
        self._looking = True
        self._do(lambda: self._job.store.look(lambda read: self._do(lambda: self._turn(read))))

    def _turn(self, read: Read) -> None:
        """One look at a time, as on one connection: an old answer never comes after a newer one."""
        self._looking = False
        self._take_turn(read)
        if self._again:
            self.stir()

    def _take_turn(self, read: Read) -> None:
        self._job.check_view(self)
        if self._is_done() and self._take_leave(read):
            return
        before = self.member
        if before.phase is Phase.REPORTING and self._own_report is None:
            self._own_report = self._report()
        if before.phase is Phase.PLANNING and self._decision is None and not self._plan(read):
            return
        self.member, write = self._job.rules.advance(
            before,
            read,
            report=self._own_report or Report(applied=0, oldest=0),
            digest=self._digest(),
            fan=self._job.schedule.fan,
        )
        if self.member.view != before.view:  # whatever it computed or gathered was of an epoch that is over
            self._own_report = self._decision = self._computing = None
        if before.phase is Phase.ENTERING and self.member.phase is Phase.RUNNING:
            self._stand()
        if write is not None:
            self._write(write.key, write.value)
        elif self.member != before:
            self.stir()

    def _digest(self) -> str | None:
        if self._decision is None:
            return None
        plan = repr((self.member.view, self._reports, self._decision))
        return hashlib.blake2b(plan.encode(), digest_size=4).hexdigest()

    def _write(self, key: str, value: str) -> None:
        self._looking = True  # it waits for the store's answer

        def written(_: str) -> None:
            self._looking = False
            self.stir()

        self._job.store.write(key, value, lambda stands: self._do(lambda: written(stands)))

    def _report(self) -> Report:
        return Report(
            applied=self.applied,
            oldest=max(0, self.applied - self._job.schedule.kept),
            prepared=self.prepared,
            vote=laws.vote_on(self.applied),
            joiner=self.joiner,
        )

    def _plan(self, read: Read) -> bool:
        """Whether there is a plan: joining ranks alone end, and say why."""
        self._reports = protocol.read_reports(self.member.view, read, self._job.schedule.fan)
        try:
            self._decision = self._job.rules.decide(self._reports)
        except StateLost as error:
            if not all(report.joiner for report in self._reports.values()):
                raise laws.Violation(str(error)) from None
            self._job.lose_all_state(self)
            return False
        return True

    def _stand(self) -> None:
        view, decision, reports = self.member.view, self._decision, self._reports
        assert decision is not None, "nobody enters an epoch without a plan"
        laws.require_one_mind(view, self._job.entries(view))
        laws.require_standable(view, reports, decision)
        if not self.joiner:
            self.state = laws.lineage(self.applied - 1) if decision.step < self.applied else self.state
            if decision.step > self.applied:
                self.state = laws.after(self.state or 0, decision.step)
            self.applied = decision.step
            laws.require_true_state(self.member_id.slot, self.state, self.applied)
            if self.member_id.slot == min(slot for slot, report in reports.items() if not report.joiner):
                joiners = [slot for slot, report in reports.items() if report.joiner]
                self._job.send(self, self._message(STATE, decision.step, self.state), joiners)
        self.prepared, self._own_report, self._decision = False, None, None
        self.progress()

    # ------------------------------------------------ training

    def hear(self, message: Message) -> None:
        """A message from another member, or its own."""
        self._do(lambda: self._take(message))

    def _take(self, message: Message) -> None:
        self._inbox.add(message)
        self.progress()

    def progress(self) -> None:
        """Train on as far as the others let it."""
        if self.member.phase is not Phase.RUNNING or (self.joiner and not self._healed()):
            return
        if self.applied == self._job.schedule.steps:
            self.stir()
            return
        here = (self.member.view.epoch, self.applied + 1)
        if not self._came(GRADIENTS, *here, of=self.member_id.slot):
            self._compute(*here)
        elif not self.prepared and self._came(GRADIENTS, *here):
            self._require_same_state(*here)
            self.prepared = True
            self._send_to_all(self._message(VOTE, here[1]))
        elif self.prepared and self._came(VOTE, *here):
            self.applied, self.prepared = here[1], False
            self.state = laws.after(self.state or 0, self.applied)
            self._job.check_steps(self)
            self.progress()

    def _healed(self) -> bool:
        epoch = self.member.view.epoch
        for message in self._inbox:
            if (message.what, message.epoch) == (STATE, epoch):
                self.applied, self.state, self.joiner = message.step, message.state, False
                laws.require_true_state(self.member_id.slot, self.state, self.applied)
                return True
        return False

    def _compute(self, epoch: int, step: int) -> None:
        if self._computing == (epoch, step):
            return
        self._computing = (epoch, step)

        def computed() -> None:
            if self._computing == (epoch, step) and self.member.phase is Phase.RUNNING:
                self._computing = None
                self._send_to_all(self._message(GRADIENTS, step, self.state))

        self._job.time.after(self._job.compute_s(), lambda: self._do(computed))

    def _send_to_all(self, message: Message) -> None:
        self._job.send(self, message, [slot for slot in self.member.view.slots if slot != self.member_id.slot])
        self._take(message)

    def _message(self, what: str, step: int, state: int | None = None) -> Message:
        return Message(what=what, epoch=self.member.view.epoch, step=step, sender=self.member_id.slot, state=state)

    def _came(self, what: str, epoch: int, step: int, of: int | None = None) -> bool:
        senders = {m.sender for m in self._inbox if (m.what, m.epoch, m.step) == (what, epoch, step)}
        return senders.issuperset(self.member.view.slots if of is None else (of,))

    def _require_same_state(self, epoch: int, step: int) -> None:
        states = {m.state for m in self._inbox if (m.what, m.epoch, m.step) == (GRADIENTS, epoch, step)}
        if states != {laws.lineage(step - 1)}:
            raise laws.Violation(f"step {step} in epoch {epoch} sums gradients of other states than its own: {states}")

    # ------------------------------------------------ the end

    def _is_done(self) -> bool:
        return self.member.phase is Phase.RUNNING and not self.joiner and self.applied == self._job.schedule.steps

    def _take_leave(self, read: Read) -> bool:
        """Whether there is nothing else to do now."""
        over, write = self._job.rules.finish(self.member, read, self._job.schedule.fan)
        if write is not None:
            self._write(write.key, write.value)
        if over:
            self._job.check_end(self)
            self.left = True
        return over is not False


def founding(job: "VirtualJob", member_id: MemberId, view: View, host: int) -> SimulatedProcess:
    """A member of the first view, which runs from the start."""
    return SimulatedProcess(job, Member(member_id=member_id, view=view, phase=Phase.RUNNING), host, joiner=False)


def joining(job: "VirtualJob", member_id: MemberId, view: View, host: int) -> SimulatedProcess:
    """A joining rank whose view was created by itself."""
    return SimulatedProcess(job, Member(member_id=member_id, view=view, phase=Phase.REPORTING), host, joiner=True)
