"""Run one policy through all failures: at every change the job pauses, then goes on, slower or not.

Events are a failure, its end, and a cold spare that becomes ready. Nothing changes between events, so the work is
linear in the number of failures. Besides its layout a failure costs a pause of the job: `Costs`.
"""

import collections
import dataclasses
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence

from ntp_plugin.planning.actions import (
    DROP_REPLICA,
    REDUCE_TP,
    RESTART,
    SWAP_SPARE,
    WAIT_FOR_SPARE,
    Forecast,
    Situation,
    choose,
)
from ntp_plugin.planning.topology import Slot
from ntp_plugin.simulator.failures import DomainFailure
from ntp_plugin.simulator.fleet import Running
from ntp_plugin.simulator.options import Handling, options
from ntp_plugin.simulator.policies import DomainPolicy
from ntp_plugin.simulator.setting import Course, SimulationSetting

MOST_RECONSIDERED = 4
"""Degraded domains that a chooser looks at again when something is back: the work stays linear in the faults."""


def follow(setting: SimulationSetting, policy: DomainPolicy, faults: Sequence[DomainFailure]) -> Course:
    """One policy, from a whole job to the horizon."""
    return _Job(setting, policy).through(faults)


@dataclasses.dataclass(kw_only=True, slots=True)
class _Domain:
    """A domain with GPUs that are gone, or that a spare stands in for."""

    action: str = ""
    """REDUCE_TP, DROP_REPLICA, or SWAP_SPARE once a spare has its place."""
    open: list[DomainFailure] = dataclasses.field(default_factory=list)
    lost: dict[int, int] = dataclasses.field(default_factory=dict)
    """Group of the domain -> how many of its GPUs are gone. Once all are back: as it was, until it is in the job."""

    def count(self, tp: int) -> None:
        if self.open:
            lost_gpus = {gpu for fault in self.open for gpu in fault.gpus}
            self.lost = dict(collections.Counter(gpu // tp for gpu in lost_gpus))

    @property
    def worst(self) -> int:
        return max(self.lost.values())


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Chosen:
    action: str
    handling: Handling
    gain_s: float = 0.0
    """What it is expected to bring over going on as it is, in seconds of a whole job."""


class _Job:
    def __init__(self, setting: SimulationSetting, policy: DomainPolicy) -> None:
        self._setting, self._policy, self._fleet = setting, policy, setting.fleet
        self._tp = setting.fleet.model.tp
        self._mode = policy.mode or setting.mode
        self._hot = setting.hot if policy.hot else 0
        self._cold = setting.cold if policy.cold else 0
        self._degraded: dict[int, _Domain] = {}
        self._back: set[int] = set()
        """Repaired, and not in the job before the next restart."""
        self._now = self._up_at = self._saved_at = 0.0
        self._done = self._paused = 0.0
        self._running = self._look({})
        self._least = self._running.throughput
        self._actions = collections.Counter[str]()
        self._series = [(0.0, 0.0)]
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._planned = self._most_used = 0

    # ------------------------------------------------ time

    def through(self, faults: Sequence[DomainFailure]) -> Course:
        horizon = self._setting.horizon_s
        for fault in faults:
            self._plan(fault.start_s, self._lose, fault)
        count = 0
        while self._events and self._events[0][0] < horizon:
            at, _, event, facts = heapq.heappop(self._events)
            self._pass(at)
            event(*facts)
            self._running = self._look({})
            self._least = min(self._least, self._running.throughput)
            count += 1
        self._pass(horizon)
        return Course(
            policy=self._policy.name,
            goodput=self._done / horizon,
            paused_s=self._paused,
            losses=len(faults),
            events=count,
            least=self._least,
            spares_used=self._most_used,
            actions=dict(self._actions),
            series=tuple(self._series),
        )

    def _plan(self, at: float, event: Callable[..., None], *facts: object) -> None:
        self._planned += 1
        heapq.heappush(self._events, (at, self._planned, event, facts))

    def _pass(self, until: float) -> None:
        up = min(max(self._up_at, self._now), until)
        self._paused += up - self._now
        self._done += (until - up) * self._running.throughput
        self._now = until
        self._series.append((until, self._done))

    def _pause(self, seconds: float) -> None:
        self._up_at = max(self._up_at, self._now) + seconds

    # ------------------------------------------------ events

    def _lose(self, fault: DomainFailure) -> None:
        domain = self._degraded.setdefault(fault.domain, _Domain())
        before = set(domain.lost)
        domain.open.append(fault)
        domain.count(self._tp)
        self._plan(fault.end_s, self._return, fault)
        out = domain.action == DROP_REPLICA and before >= set(domain.lost)
        if domain.action == SWAP_SPARE or out or fault.domain in self._back:
            self._back.discard(fault.domain)
            return  # it was not in the job
        chosen = self._choose(fault.domain) if self._policy.chooses else self._fixed(fault.domain)
        self._carry_out(chosen.action, chosen.handling)
        if self._cold and domain.action != SWAP_SPARE:
            self._cold -= 1
            self._plan(self._now + self._setting.costs.cold_s, self._spare_is_ready)

    def _return(self, fault: DomainFailure) -> None:
        domain = self._degraded[fault.domain]
        domain.open.remove(fault)
        domain.count(self._tp)
        if domain.action == SWAP_SPARE:
            if not domain.open:  # the spare keeps its place, and it is the spare now
                del self._degraded[fault.domain]
                self._spare_is_ready()
            return
        if self._policy.action == RESTART:
            self._back |= set() if domain.open else {fault.domain}
            return
        if not domain.open:
            del self._degraded[fault.domain]
        if domain.action != DROP_REPLICA or not domain.open:
            self._pause(self._recover_s(1))
        if self._policy.chooses:
            self._reconsider()

    def _spare_is_ready(self) -> None:
        """The widest wound first, where the policy wants it there."""
        self._hot += 1
        waiting = self._in_the_job()
        if self._policy.chooses:
            self._reconsider()
        elif waiting:
            self._carry_out(SWAP_SPARE, {waiting[0]: SWAP_SPARE})

    def _reconsider(self) -> None:
        """What was chosen for a loss may no longer be best once another is back: first whatever brings most."""
        for _ in range(MOST_RECONSIDERED):
            waiting = self._in_the_job()
            if not self._hot:
                waiting = [number for number in waiting if self._could_go_on(self._degraded[number])]
            waiting.sort(key=lambda number: (self._goes_on(number), -self._repair_s(self._degraded[number])))
            found = [
                self._choose(number, current=self._degraded[number].action) for number in waiting[:MOST_RECONSIDERED]
            ]
            best = max(found, key=lambda one: one.gain_s, default=None)
            if best is None or not best.gain_s:
                return
            self._carry_out(best.action, best.handling)

    def _goes_on(self, number: int) -> bool:
        return self._degraded[number].worst <= self._fleet.most_lost

    def _could_go_on(self, domain: _Domain) -> bool:
        return domain.action == DROP_REPLICA and domain.worst <= self._fleet.most_lost

    # ------------------------------------------------ what is done

    def _fixed(self, number: int) -> _Chosen:
        action = self._policy.action
        if self._hot:
            action = SWAP_SPARE
        elif action == WAIT_FOR_SPARE and not self._cold:
            action = REDUCE_TP
        if action == REDUCE_TP and not self._setting.topology.narrows:
            action = DROP_REPLICA
        return _Chosen(action=action, handling=options(action, number, (), self._hot)[0])

    def _carry_out(self, action: str, handling: Handling) -> None:
        self._actions[action] += 1
        self._pause(self._transition_s(action, handling))
        if action == RESTART:
            for number in self._back:
                del self._degraded[number]
            self._back.clear()
            self._saved_at = self._up_at
        if action == WAIT_FOR_SPARE:
            self._cold -= 1
            self._pause(self._setting.costs.cold_s)
        else:
            self._hot -= sum(what == SWAP_SPARE for what in handling.values())
        self._apply(handling)

    def _apply(self, handling: Handling) -> None:
        for number, what in handling.items():
            narrows = what != REDUCE_TP or self._setting.topology.narrows
            self._degraded[number].action = what if narrows else DROP_REPLICA
        self._most_used = max(self._most_used, sum(domain.action == SWAP_SPARE for domain in self._degraded.values()))

    def _transition_s(self, action: str, handling: Handling) -> float:
        costs = self._setting.costs
        if action in (SWAP_SPARE, WAIT_FOR_SPARE):
            return costs.swap_s + self._fleet.nominal_step_s / 2
        if action == RESTART:
            return costs.restart_s + max(0.0, self._now - self._saved_at) % costs.checkpoint_s
        narrower = [self._degraded[number].worst for number, what in handling.items() if what == REDUCE_TP]
        return self._recover_s(max(narrower, default=0))

    def _recover_s(self, lost: int) -> float:
        """The step in flight is lost as well: half of it on the average."""
        fleet = self._fleet
        moved = fleet.moved_s(lost) if lost or not self._setting.topology.narrows else 0.0
        return self._setting.costs.recover_s + moved + fleet.nominal_step_s / 2

    # ------------------------------------------------ the chooser

    def _choose(self, number: int, current: str | None = None) -> _Chosen:
        """By what each action would lead to, at its best."""
        offered = self._offered(number)
        if current is not None:  # nothing new is lost: to go on as it is costs nothing, and nobody waits or restarts
            offered = {action: offered[action] for action in offered if action not in (WAIT_FOR_SPARE, RESTART)}
            offered[current] = ({}, self._look({}))
        setting = self._setting
        situation = Situation(
            topology=setting.topology,
            lost=frozenset(self._slots(number)),
            nominal_step_s=self._fleet.nominal_step_s,
            forecasts=dict(self._forecasts(offered, current)),
            spare_s=0.0 if self._hot else setting.costs.cold_s if self._cold else None,
            repair_s=self._repair_s(self._degraded[number]),
            failures_per_gpu_s=setting.failures_per_gpu_s,
        )
        choice = choose(situation, setting.allowed, current=current)
        scores = {row.action: row.score or 0.0 for row in choice.table}
        gain = (scores[choice.action] - scores[current]) * choice.horizon_s if current else 0.0
        return _Chosen(action=choice.action, handling=offered[choice.action][0], gain_s=gain)

    def _offered(self, number: int) -> dict[str, tuple[Handling, Running]]:
        """Action -> the best way to carry it out, and how the job runs then. Domains in that state already stay."""
        others = [other for other in self._in_the_job() if other != number]
        found = {}
        for action in (REDUCE_TP, DROP_REPLICA):
            changed = [other for other in others if self._degraded[other].action != action]
            found[action] = self._best(options(action, number, changed, 0))
        found[RESTART] = found[DROP_REPLICA]
        if self._hot:
            found[SWAP_SPARE] = self._best(options(SWAP_SPARE, number, others, self._hot))
        if self._cold:
            found[WAIT_FOR_SPARE] = self._best(options(WAIT_FOR_SPARE, number, others, 0))
        return found

    def _forecasts(
        self, offered: Mapping[str, tuple[Handling, Running]], current: str | None
    ) -> Iterator[tuple[str, Forecast]]:
        for action, (handling, running) in offered.items():
            transition = 0.0 if action == current else self._transition_s(action, handling)
            yield action, Forecast(step_s=running.step_s, batch=running.batch, transition_s=transition)

    def _best(self, handlings: Sequence[Handling]) -> tuple[Handling, Running]:
        """The first of those with the most throughput."""
        return max(((one, self._look(one)) for one in handlings), key=lambda found: found[1].throughput)

    def _repair_s(self, domain: _Domain) -> float:
        """What is overdue may come any moment; nobody knows when, so that it counts as much again as it has taken."""
        due = max(fault.start_s + fault.expected_s for fault in domain.open) - self._now
        return due if due > 0 else self._now - min(fault.start_s for fault in domain.open)

    def _slots(self, number: int) -> Iterator[Slot]:
        for inside, count in self._degraded[number].lost.items():
            stage, replica = divmod(number * self._setting.groups_per_domain + inside, self._fleet.dp)
            for tp in range(count):
                yield Slot(replica=replica, stage=stage, tp=tp)

    # ------------------------------------------------ how it stands

    def _in_the_job(self) -> list[int]:
        """Degraded domains in whose place there is no spare, the worst first."""
        found = [n for n, d in self._degraded.items() if d.action not in (SWAP_SPARE, "") and n not in self._back]
        return sorted(found, key=lambda number: (-self._degraded[number].worst, number))

    def _look(self, handling: Handling) -> Running:
        """How the job would run with some domains handled so, and all others as they are."""
        per_domain = self._setting.groups_per_domain
        lost: dict[int, int] = {}
        dropped: list[int] = []
        for number, domain in self._degraded.items():
            action = handling.get(number, domain.action)
            if action == SWAP_SPARE:
                continue
            for inside, count in domain.lost.items():
                if action == DROP_REPLICA:
                    dropped.append(number * per_domain + inside)
                else:
                    lost[number * per_domain + inside] = count
        policy = self._policy
        return self._fleet.running(
            lost, dropped, mode=self._mode, boosted=policy.boosted, whole_groups=policy.whole_groups
        )
