"""What a cluster yields with given losses: throughput against a whole one, and the part of the batch that is computed.

A *group* is one stage of one replica, `tp` GPUs of one scale-up domain; groups are numbered as Megatron's ranks are,
(stage, replica). In a packed fleet degraded groups are put together into as few replicas as possible, as the NTP paper
has its scheduler do at a restart; else each stays in its own replica, as in a live job.

Batch modes: `shrink` (a degraded replica takes what it can do in a whole one's time), `strict` (every sample, shared
out anew: the step gets longer), `fixed` (every sample in the nominal time, or the job pauses).
"""

import collections
import dataclasses
from collections.abc import Collection, Mapping

from ntp_plugin.planning.batch_split import ReplicaPace, shortest_step_ns
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


PAUSED = Running(throughput=0.0, batch=0.0, step_s=float("inf"))


class Fleet:
    """One job on its groups; remembers what it has computed."""

    def __init__(self, model: StepModel, *, dp: int, micro_batches: int, packed: bool, min_tp_width: int = 1) -> None:
        self.model, self.dp, self.packed = model, dp, packed
        self.pp = len(model.depths)
        self.micro_batches = micro_batches
        """Of each replica of a whole job."""
        self.most_lost = model.tp - min_tp_width
        """Slots of a group that goes on."""
        self._paces: dict[tuple[Losses, bool], UnevenPace] = {}
        self._tails: dict[tuple[int, int], int] = {}
        self._stages: dict[tuple[int, int, bool], int] = {}
        self._moves: dict[int, float] = {}
        self._whole = (0,) * self.pp
        self.nominal_ns = self.pace(self._whole).step_ns(micro_batches, self.pp)
        self.nominal_step_s = (self.nominal_ns + self._tail_ns(0, dp)) / 1e9

    @property
    def groups(self) -> int:
        return self.dp * self.pp

    @property
    def total(self) -> int:
        """Micro-batches of a step."""
        return self.dp * self.micro_batches

    def pace(self, losses: Losses, *, boosted: bool = False) -> UnevenPace:
        """Return the pace of a replica with these losses."""
        key = (losses, boosted)
        if key not in self._paces:
            stages = [self._stage_ns(stage, lost, boosted) for stage, lost in enumerate(losses)]
            self._paces[key] = self.model.pace(stages)
        return self._paces[key]

    def moved_s(self, lost: int) -> float:
        """Until what a group that has lost so many slots deals anew is where it belongs."""
        lost = min(lost, self.most_lost)
        if lost not in self._moves:
            self._moves[lost] = self.model.moved_s(lost)
        return self._moves[lost]

    def capacity(self, losses: Losses, *, boosted: bool = False) -> int:
        """Micro-batches that a replica does in the time of a whole one, and never more than that does."""
        return min(self.micro_batches, self.pace(losses, boosted=boosted).most_within(self.nominal_ns, self.pp))

    def running(
        self, lost: Mapping[int, int], dropped: Collection[int] = (), *, mode: str, boosted: bool = False
    ) -> Running:
        """With so many slots lost in some groups, and some groups dropped though they could go on."""
        degraded, lost_replicas = self.replicas(lost, dropped)
        whole = self.dp - lost_replicas - sum(degraded.values())
        if not whole and not degraded:
            return PAUSED
        most = max((max(losses) for losses in degraded), default=0)
        if mode == STRICT:
            crowd: collections.Counter[ReplicaPace] = collections.Counter()
            for losses, count in degraded.items():
                crowd[self.pace(losses, boosted=boosted)] += count
            if whole:
                crowd[self.pace(self._whole)] += whole
            return self._running(1.0, shortest_step_ns(crowd, self.total, self.pp), most, self.dp - lost_replicas)
        done = whole * self.micro_batches
        done += sum(count * self.capacity(losses, boosted=boosted) for losses, count in degraded.items())
        if not done or (mode == FIXED and done < self.total):
            return PAUSED
        return self._running(done / self.total, self.nominal_ns, most, self.dp - lost_replicas)

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

    def _running(self, batch: float, step_ns: int, most_lost: int, replicas: int) -> Running:
        step_s = (step_ns + self._tail_ns(most_lost, replicas)) / 1e9
        return Running(throughput=batch * self.nominal_step_s / step_s, batch=batch, step_s=step_s)

    def _stage_ns(self, stage: int, lost: int, boosted: bool) -> int:
        key = (stage, lost, boosted)
        if key not in self._stages:
            self._stages[key] = self.model.stage_ns(stage, lost, boosted=boosted)
        return self._stages[key]

    def _tail_ns(self, most_lost: int, replicas: int) -> int:
        key = (most_lost, replicas)
        if key not in self._tails:
            self._tails[key] = self.model.tail_ns(most_lost, replicas)
        return self._tails[key]
