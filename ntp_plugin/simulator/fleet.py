"""What a cluster yields with given losses: throughput against a whole one, and the part of the batch that is computed.

A *group* is one stage of one replica, `tp` GPUs of one scale-up domain; groups are numbered as Megatron's ranks are,
(stage, replica). In a packed fleet degraded groups are put together into as few replicas as possible, as the NTP paper
has its scheduler do at a restart; else each stays in its own replica, as in a live job.

In a job with experts or context groups a replica that has lost a slot is dropped, and the replicas that were in step
with it go on with more experts, or longer parts of sequences. A packed fleet drops all replicas of a group before any
of the next. With `whole_groups` they are all dropped with it, as where nobody deals experts.

Batch modes: `shrink` (a degraded replica takes what it can do in a whole one's time), `strict` (every sample, shared
out anew: the step gets longer), `fixed` (every sample in the nominal time, or the job pauses).
"""

import collections
import dataclasses
from collections.abc import Collection, Mapping

from ntp_plugin.planning.batch_split import ReplicaPace, shortest_step_ns
from ntp_plugin.planning.expert_groups import NOMINAL_LOAD, GroupLoad, load_of, replicas_in_step
from ntp_plugin.planning.topology import Slot, SurvivingReplicas
from ntp_plugin.simulator.step_time import Losses, StepModel, UnevenPace

SHRINK, STRICT, FIXED = "shrink", "strict", "fixed"
MODES = (SHRINK, STRICT, FIXED)
DROPPED = -1
"""In place of a number of lost slots."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """How a job goes on. All but `step_s` is against the whole job."""

    throughput: float
    batch: float
    step_s: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Living:
    """What is left of a fleet: how many context groups have which pace, and what their reduction depends on."""

    paces: collections.Counter[ReplicaPace]
    replicas: int
    most_lost: int = 0
    load: GroupLoad = NOMINAL_LOAD


PAUSED = Running(throughput=0.0, batch=0.0, step_s=float("inf"))


class Fleet:
    """One job on its groups; remembers what it has computed."""

    def __init__(self, model: StepModel, *, micro_batches: int, packed: bool, min_tp_width: int = 1) -> None:
        topology = model.topology
        self.model, self.dp, self.packed = model, topology.dp, packed
        self.pp = len(model.depths)
        self.micro_batches = micro_batches
        """Of each replica of a whole job; with context parallelism of each context group."""
        self.most_lost = model.tp - min_tp_width if topology.narrows else 0
        """Slots of a group that goes on."""
        self.together = 1 if topology.narrows else len(replicas_in_step(topology, 0))
        """Replicas that are in step with each other."""
        self._paces: dict[tuple[Losses, bool], UnevenPace] = {}
        self._tails: dict[tuple[int, int, GroupLoad], int] = {}
        self._short: dict[tuple[int, ...], _Living] = {}
        self._stages: dict[tuple[int, int, bool], int] = {}
        self._moves: dict[int, float] = {}
        self._whole = (0,) * self.pp
        self.nominal_ns = self.pace(self._whole).step_ns(micro_batches, self.pp)
        self.nominal_step_s = (self.nominal_ns + self._tail_ns(0, self.dp, self._load_of_whole(self.dp))) / 1e9

    @property
    def groups(self) -> int:
        return self.dp * self.pp

    @property
    def total(self) -> int:
        """Micro-batches of a step."""
        return self.model.topology.contexts * self.micro_batches

    def pace(self, losses: Losses, *, boosted: bool = False) -> UnevenPace:
        """Return the pace of a replica with these losses."""
        key = (losses, boosted)
        if key not in self._paces:
            stages = [self._stage_ns(stage, lost, boosted) for stage, lost in enumerate(losses)]
            self._paces[key] = self.model.pace(stages)
        return self._paces[key]

    def moved_s(self, lost: int) -> float:
        """Until what a group that has lost so many slots deals anew is where it belongs; in a job whose replicas are
        not narrowed, what an expert group does that has lost one of them."""
        lost = min(lost, self.most_lost)
        if lost not in self._moves:
            load = NOMINAL_LOAD if self.together == 1 else self._in_step((0,)).load
            self._moves[lost] = self.model.moved_s(lost, load)
        return self._moves[lost]

    def capacity(self, losses: Losses, *, boosted: bool = False) -> int:
        """Micro-batches that a replica does in the time of a whole one, and never more than that does."""
        return min(self.micro_batches, self.pace(losses, boosted=boosted).most_within(self.nominal_ns, self.pp))

    def running(
        self,
        lost: Mapping[int, int],
        dropped: Collection[int] = (),
        *,
        mode: str,
        boosted: bool = False,
        whole_groups: bool = False,
    ) -> Running:
        """With so many slots lost in some groups, and some groups dropped though they could go on."""
        left = self._living(lost, dropped, boosted=boosted, whole_groups=whole_groups)
        if not left.paces:
            return PAUSED
        if mode == STRICT:
            return self._running(1.0, shortest_step_ns(left.paces, self.total, self.pp), left)
        done = sum(
            count * min(self.micro_batches, pace.most_within(self.nominal_ns, self.pp))
            for pace, count in left.paces.items()
        )
        if not done or (mode == FIXED and done < self.total):
            return PAUSED
        return self._running(done / self.total, self.nominal_ns, left)

    def _living(
        self, lost: Mapping[int, int], dropped: Collection[int], *, boosted: bool, whole_groups: bool
    ) -> _Living:
        if self.together > 1:
            return self._living_in_step(lost, dropped, whole_groups=whole_groups)
        degraded, lost_replicas = self.replicas(lost, dropped)
        paces: collections.Counter[ReplicaPace] = collections.Counter()
        for losses, count in degraded.items():
            paces[self.pace(losses, boosted=boosted)] += count
        whole = self.dp - lost_replicas - sum(degraded.values())
        if whole:
            paces[self.pace(self._whole)] += whole
        most = max((max(losses) for losses in degraded), default=0)
        replicas = self.dp - lost_replicas
        return _Living(paces=paces, replicas=replicas, most_lost=most, load=self._load_of_whole(replicas))

    def _load_of_whole(self, replicas: int) -> GroupLoad:
        """The load where so many replicas are left, and all that are in step with them."""
        load = self._in_step(()).load
        groups = load.expert_groups * (replicas // self.together)
        return dataclasses.replace(load, expert_groups=max(1, groups))

    def _living_in_step(self, lost: Mapping[int, int], dropped: Collection[int], *, whole_groups: bool) -> _Living:
        paces: collections.Counter[ReplicaPace] = collections.Counter()
        missing = self._missing(self._damage(lost, dropped))
        everybody = tuple(range(self.together))
        alike = collections.Counter(everybody if whole_groups else numbers for numbers in missing.values())
        alike[()] = self.dp // self.together - len(missing)
        living = [(self._in_step(numbers), count) for numbers, count in alike.items() if count]
        for left, count in living:
            for pace, contexts in left.paces.items():
                paces[pace] += contexts * count
        load = max((left.load for left, _ in living), key=lambda one: len(one.lost_places), default=NOMINAL_LOAD)
        groups = sum(left.load.expert_groups * count for left, count in living if left.replicas)
        return _Living(
            paces=paces,
            replicas=sum(left.replicas * count for left, count in living),
            load=dataclasses.replace(load, expert_groups=max(1, groups)),
        )

    def _missing(self, damage: Mapping[int, int]) -> Mapping[int, tuple[int, ...]]:
        """The dropped replicas of those that are in step, numbered among them."""
        dropped = sorted({group % self.dp for group in damage})
        if self.packed:
            dropped = list(range(-(-len(damage) // self.pp)))
        found: collections.defaultdict[int, list[int]] = collections.defaultdict(list)
        for replica in dropped:
            found[replica // self.together].append(replica % self.together)
        return {first: tuple(numbers) for first, numbers in found.items()}

    def _in_step(self, missing: tuple[int, ...]) -> _Living:
        """What is left of replicas in step once these of them are dropped."""
        if missing not in self._short:
            self._short[missing] = self._without(missing)
        return self._short[missing]

    def _without(self, missing: tuple[int, ...]) -> _Living:
        topology = dataclasses.replace(self.model.topology, dp=self.together)
        lost = frozenset(Slot(replica=replica, stage=0, tp=0) for replica in missing)
        surviving = SurvivingReplicas(topology=topology, lost=lost, min_tp_width=1)
        if not surviving.replicas:
            return _Living(paces=collections.Counter(), replicas=0)
        load = load_of(surviving, surviving.replicas[0], self.model.units.experts_of_slot)
        stages = [self.model.stage_ns(stage, 0, load=load) for stage in range(self.pp)]
        contexts = len({topology.context_of(replica) for replica in surviving.replicas})
        paces = collections.Counter[ReplicaPace]({self.model.pace(stages, load): contexts})
        return _Living(paces=paces, replicas=len(surviving.replicas), load=load)

    def replicas(self, lost: Mapping[int, int], dropped: Collection[int] = ()) -> tuple[Mapping[Losses, int], int]:
        """The losses of degraded replicas with how many are degraded so, and how many replicas are dropped."""
        degraded, lost_replicas = collections.Counter[Losses](), 0
        for losses in self._by_replica(self._damage(lost, dropped)):
            if DROPPED in losses:
                lost_replicas += 1
            else:
                degraded[losses] += 1
        return degraded, lost_replicas

    def _damage(self, lost: Mapping[int, int], dropped: Collection[int]) -> dict[int, int]:
        damage = {group: count if count <= self.most_lost else DROPPED for group, count in lost.items() if count}
        return damage | dict.fromkeys(dropped, DROPPED)

    def _by_replica(self, damage: Mapping[int, int]) -> Collection[Losses]:
        if self.packed:  # those that do not go on first, then the narrowest
            worst = sorted(damage.values(), key=lambda count: (count != DROPPED, -count))
            chunks = [worst[first : first + self.pp] for first in range(0, len(worst), self.pp)]
            return [(*chunk, *self._whole[len(chunk) :]) for chunk in chunks]
        by_replica: dict[int, list[int]] = {}
        for group, count in damage.items():
            stage, replica = divmod(group, self.dp)
            by_replica.setdefault(replica, list(self._whole))[stage] = count
        return [tuple(losses) for losses in by_replica.values()]

    def _running(self, batch: float, step_ns: int, left: _Living) -> Running:
        step_s = (step_ns + self._tail_ns(left.most_lost, left.replicas, left.load)) / 1e9
        return Running(throughput=batch * self.nominal_step_s / step_s, batch=batch, step_s=step_s)

    def _stage_ns(self, stage: int, lost: int, boosted: bool) -> int:
        key = (stage, lost, boosted)
        if key not in self._stages:
            self._stages[key] = self.model.stage_ns(stage, lost, boosted=boosted)
        return self._stages[key]

    def _tail_ns(self, most_lost: int, replicas: int, load: GroupLoad) -> int:
        key = (most_lost, replicas, load)
        if key not in self._tails:
            self._tails[key] = self.model.tail_ns(most_lost, replicas, load)
        return self._tails[key]
