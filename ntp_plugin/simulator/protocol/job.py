"""One run of all simulated ranks and supervisors: a safety phase, then a liveness phase."""

import dataclasses
from collections.abc import Iterable
from random import Random

from ntp_plugin.membership import protocol
from ntp_plugin.membership.failure_detector import Standstill
from ntp_plugin.membership.protocol import MemberId, Phase, View
from ntp_plugin.simulator.protocol import laws
from ntp_plugin.simulator.protocol import schedule as sc
from ntp_plugin.simulator.protocol.host import Host
from ntp_plugin.simulator.protocol.laws import Violation
from ntp_plugin.simulator.protocol.process import Message, SimulatedProcess, founding
from ntp_plugin.simulator.protocol.rules import Rules
from ntp_plugin.simulator.protocol.virtual_store import VirtualStore
from ntp_plugin.simulator.protocol.virtual_time import VirtualTime, Wires

ALL_ANSWER_S = 0.05
REST_EVENTS = 6_000
"""In so many events of the liveness phase a job must be over; runs that end well need a tenth."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunOutcome:
    """How a run ended that broke no law."""

    events: int
    epochs: int
    faults: int
    """So many of those that were drawn found somebody to befall."""
    state_lost: bool
    """All who held state died, and the joining ranks said so."""


class VirtualJob:
    """One schedule, acted out."""

    def __init__(self, schedule: sc.RunSchedule, rules: Rules) -> None:
        self.schedule, self.rules = schedule, rules
        self._random = Random(~schedule.seed)
        self.time = VirtualTime()
        self.wires = Wires(self._random, mean_s=schedule.mean_delay_s, loss=schedule.loss)
        self.store = VirtualStore(self.time, self.wires, self._created)
        member_ids = tuple(MemberId(slot=slot, incarnation=f"first/{slot}") for slot in range(schedule.slots))
        self.first = View(epoch=0, member_ids=member_ids)
        self.processes: list[SimulatedProcess] = [
            founding(self, member_id, self.first, self.host_of(member_id.slot)) for member_id in member_ids
        ]
        self.hosts = [Host(self, number, self.first) for number in range(schedule.hosts)]
        self._cuts: set[frozenset[int]] = set()
        self._doubted: set[MemberId] = set()
        self._views: dict[int, View] = {0: self.first}
        self._happened = 0
        self.state_lost = False

    # ------------------------------------------------ the run

    def run(self) -> RunOutcome:
        """Through both phases; raises `Violation`."""
        for process in self.processes:
            process.progress()
        for host in self.hosts:
            self.time.after(self.draw(0.0, 0.4), host.look_again_and_again)
        waiting = list(self.schedule.faults)
        while waiting and not self._is_over():
            if self.time.passed >= waiting[0].after:
                self._befall(waiting.pop(0))
            if not self.time.step():
                break
        self._come_to_rest()
        return RunOutcome(
            events=self.time.passed, epochs=len(self._views), faults=self._happened, state_lost=self.state_lost
        )

    def _come_to_rest(self) -> None:
        self.wires.calm()
        for process in self.processes:
            process.thaw()
        bound = self.time.passed + REST_EVENTS
        while not self._is_over():
            if self.time.passed >= bound or not self.time.step():
                raise Violation(f"at rest nobody goes on: {self._who_waits()}")

    def _is_over(self) -> bool:
        """Where all who are left hang, nobody waits for them: no detector tells that from a long computation."""
        return self.state_lost or all(process.hung for process in self.processes if process.acts)

    def _who_waits(self) -> str:
        return ", ".join(
            f"slot {p.member_id.slot} {p.member.phase.value} in epoch {p.member.view.epoch} at step {p.applied}"
            for p in self.processes
            if p.acts
        )

    # ------------------------------------------------ faults

    def _befall(self, fault: sc.ProtocolFault) -> None:
        acting = [process for process in self.processes if process.acts]
        found = [process for process in acting if process.member_id.slot == fault.slot]
        if len(acting) < 2 or not found:
            return
        self._happened += 1
        victim, host = found[-1], self.hosts[found[-1].host]
        if fault.kind == sc.KILL:
            victim.die()
            self.time.after(self.draw(0.005, 0.02), host.look)
        elif fault.kind == sc.FREEZE:
            victim.freeze()
            self.time.after(fault.thaws_after_s, victim.thaw)
        elif fault.kind == sc.HANG:
            victim.hang()
        elif fault.kind == sc.HOST and len({process.host for process in acting}) > 1:
            host.die()
        elif fault.kind == sc.CUT and len(self.hosts) > 1:
            self._cuts.add(frozenset((host.number, (host.number + 1) % len(self.hosts))))
        elif fault.kind == sc.DOUBT:
            self._doubted.add(victim.member_id)
            host.publish([victim.member_id])
        elif fault.kind == sc.BREAK and victim.member.phase is Phase.RUNNING:
            again = protocol.without(victim.member.view, ())
            self.store.write(protocol.view_key(again.epoch), again.encode(), lambda _: None)

    def is_guilty(self, member_id: MemberId) -> bool:
        """Return whether a member has had a fault for which a detector may evict it."""
        worker = next(process for process in self.processes if process.member_id == member_id)
        ill = not worker.alive or worker.stopped_at is not None or worker.hung or member_id in self._doubted
        return ill or worker.member.phase is Phase.EXCLUDED or bool(self._cuts)

    def kills_who_is_out(self, worker: SimulatedProcess) -> bool:
        """Live the supervisor does; that it comes late, or not at all, must not matter."""
        return worker.frozen or worker.hung or self._random.random() < 0.5

    # ------------------------------------------------ what all use

    def draw(self, low: float, high: float) -> float:
        return self._random.uniform(low, high)

    def compute_s(self) -> float:
        return self._random.expovariate(1 / self.schedule.compute_s)

    def host_of(self, slot: int) -> int:
        return slot * self.schedule.hosts // self.schedule.slots

    def cut_from(self, host: int) -> tuple[int, ...]:
        """The hosts that a host cannot reach."""
        return tuple(sorted(other for cut in self._cuts if host in cut for other in cut - {host}))

    def send(self, sender: SimulatedProcess, message: Message, slots: Iterable[int]) -> None:
        """Send a message to the processes that have these slots when it arrives, each after its own delay."""
        for slot in slots:
            if self.host_of(slot) not in self.cut_from(sender.host):
                self.time.after(self.wires.delay(), self._deliver, message, slot)

    def _deliver(self, message: Message, slot: int) -> None:
        for process in self.processes:
            if process.member_id.slot == slot:
                process.hear(message)

    def ask_all(self, asking: Host) -> None:
        """Every host with members says how its ranks stand, each at a moment of its own; the asking one judges."""
        view, answers = asking.view, dict[int, Standstill | None]()
        hosts = {self.host_of(slot) for slot in view.slots}

        def answer(host: Host) -> None:
            answers[host.number] = host.answer() if host.view.epoch == view.epoch else None
            if len(answers) == len(hosts):
                asking.hear_all(view.epoch, answers)

        for number in sorted(hosts):
            if self.hosts[number].alive:
                self.time.after(self.wires.delay() + self.draw(0.0, ALL_ANSWER_S), answer, self.hosts[number])

    def lose_all_state(self, process: SimulatedProcess) -> None:
        """A joining rank finds joining ranks alone: it ends, and says why."""
        veterans = [
            p for p in self.processes if p.acts and not p.joiner and p.member_id in process.member.view.member_ids
        ]
        if veterans:
            raise Violation(f"state is said to be lost, and {veterans[0].member_id} holds it")
        self.state_lost = True

    def has_been_in(self, member_id: MemberId) -> bool:
        """Return whether any view contained this member."""
        return any(member_id in view.member_ids for view in self._views.values())

    def entries(self, view: View) -> list[str | None]:
        """The digests of all members' plans."""
        return [self.store.now(protocol.entries_of(view).own_key(slot)) for slot in view.slots]

    # ------------------------------------------------ laws that take more than one process

    def _created(self, key: str) -> None:
        """Whoever waits looks again, soon or late; a new view is one more than the last."""
        if key.startswith("view/"):
            view = View.decode(self.store.now(key) or "")
            if view.epoch != len(self._views):
                raise Violation(f"{key} was made, and the newest epoch is {len(self._views) - 1}")
            self._views[view.epoch] = view
        for process in self.processes:
            self.time.after(self.wires.delay(), process.stir)

    def check_view(self, process: SimulatedProcess) -> None:
        """Who is in an epoch takes it for what it is."""
        view = process.member.view
        if self._views.get(view.epoch) != view:
            raise Violation(f"{process.member_id} takes epoch {view.epoch} for {view}")

    def check_steps(self, process: SimulatedProcess) -> None:
        """Running members of an epoch are at most a step apart, and each has a true state."""
        laws.require_true_state(process.member_id.slot, process.state, process.applied)
        together = [
            p.applied
            for p in self.processes
            if p.acts and not p.joiner and (p.member.view, p.member.phase) == (process.member.view, Phase.RUNNING)
        ]
        if max(together) - min(together) > 1:
            raise Violation(f"members of epoch {process.member.view.epoch} run {together} steps apart")

    def check_end(self, process: SimulatedProcess) -> None:
        """Nobody leaves while another member has steps to take."""
        member_ids = process.member.view.member_ids
        missed = [
            p.member_id
            for p in self.processes
            if p.member_id in member_ids and p.alive and p.applied < self.schedule.steps
        ]
        if missed:
            raise Violation(f"the job is over, and {missed} had not applied the last step")
