"""Replicas compared while they train: what they hold alike is to be the same bits.

A flipped bit in one replica's weights is no error to anybody: it trains on, and its gradients are summed with the
others'. So ranks digest their weights, and whatever else the others have alike, and compare: before a checkpoint is
written, before the job ends, after the first step and the first after each recovery, and in between as often as a share
of the step time allows (`comparison_interval.py`) or as the user has set. Who is wrong is told where it can be
(`copies/replica_digests.py`). Then the job stops, or the wrong ranks leave it as if they had died, and what they held
comes from the others (`on_sdc`).

Where the loss of a step is not finite they compare before anybody applies it: afterwards all replicas would have what
one had. Where all hold the same, the training has diverged by itself, and goes on as its framework has it.

No copy is made of a state that is about to be compared: that of a wrong rank would be what the others go on from.
"""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
import torch.distributed as dist

from ntp_plugin.config.sections import TrainingPolicy
from ntp_plugin.copies import digest
from ntp_plugin.copies.replica_digests import Odd, RecordedEvent, Sums, are_alike, odd_ones, sums_of
from ntp_plugin.copies.slices import TensorSlice
from ntp_plugin.errors import PeerLost, SilentCorruption
from ntp_plugin.planning.topology import Topology
from ntp_plugin.recovery.comparison_interval import AT_LEAST_EVERY, CompareSchedule, Measured
from ntp_plugin.recovery.elastic_rank import ElasticRank
from ntp_plugin.telemetry import Compared, Corrupted, Teller

_LOG = logging.getLogger(__name__)


type ReplicatedState = Iterable[tuple[str, str, TensorSlice, Mapping[str, torch.Tensor]]]
"""What every replica has: its name, among which replica digests it is (`copies/replica_digests.py`), the piece that
this rank has of it, and the values of these elements by name."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Comparison:
    """What a rank tells all others in a comparison."""

    alike: int
    """The last step after which all were alike, as far as it knows."""
    sums: Sums
    measured: Measured


class ReplicaWatch:
    """Compares when it is due, and when it is asked to."""

    def __init__(
        self,
        policy: TrainingPolicy,
        topology: Topology,
        *,
        rank: ElasticRank,
        replicated_state: Callable[[], ReplicatedState],
        distrust: Callable[[int], None],
        teller: Teller,
    ) -> None:
        """`distrust` the copies that were made since a step: nobody may begin from them where the job stops."""
        self._topology, self._replicated_state, self._distrust = topology, replicated_state, distrust
        self._teller, self._alike = teller, 0
        self._groups, self._slot = rank.groups, rank.place.slot
        self._budget, self._heals = policy.watch_cost, policy.on_sdc == "heal"
        self._schedule = CompareSchedule(every=policy.watch_steps)
        self._looked = 0, 0
        """The steps and the epoch that it last compared after."""
        self._diverged_in, self._diverged_at = -1, 0
        """The epoch, and the step, in which all were last found alike while a loss was not finite."""
        self._exchange_s, self._fastest_s = 0.0, 0.0
        self._left = 0, -1, 0.0
        """The steps and the epoch that it was last asked after, and when it had answered."""

    @property
    def is_on(self) -> bool:
        """Whether this job compares its replicas."""
        return self._schedule.every != 0

    def look(self, step: int) -> None:
        """Compare if that is due after so many steps; all ranks come together, wherever there may be something to do
        before the next one, for the first time or again."""
        self._schedule = self._schedule.seen(step, self._groups.epoch)
        self.compare_if(self._schedule.is_due(step), step)

    def is_due(self, step: int) -> bool:
        """Whether this rank asks for a comparison after a step that is being taken: for an adapter whose ranks share
        that in the vote, and then `compare_if` one of them has asked."""
        self._schedule = self._schedule.seen(step - 1, self._groups.epoch)
        return self._schedule.is_due(step)

    def compare_if(self, wanted: bool, step: int) -> None:
        """Compare where that is wanted after so many steps; all ranks come together."""
        self._time(step)
        if wanted and self._looked != (step, self._groups.epoch):
            self._compare(step)
        self._left = step, self._groups.epoch, time.monotonic()

    def before_it_counts(self, step: int) -> None:
        """Compare unless that was done after so many steps: before a checkpoint is written, or before the job ends. All
        ranks come together."""
        if self.is_on and step and self._looked != (step, self._groups.epoch):
            self._compare(step)

    def not_finite(self, step: int) -> None:
        """Compare before a step is applied whose loss is not finite, after so many that are; all ranks come together.

        Where one replica is to blame, and is to leave, all others wait for that: the step is taken again without it.
        """
        epoch = self._groups.epoch
        known = self._diverged_in == epoch and step < self._diverged_at + AT_LEAST_EVERY
        if not self.is_on or known:
            return
        if self._compare(step):
            dist.barrier()  # which the ranks that leave do not come to: it ends with the recovery
        self._diverged_in, self._diverged_at = epoch, step
        _LOG.warning("a loss is not finite after step %d, and all replicas hold the same: it is no corruption", step)

    def _time(self, step: int) -> None:
        before, epoch, since = self._left
        if (before + 1, epoch) == (step, self._groups.epoch):
            took = time.monotonic() - since
            self._fastest_s = min(self._fastest_s or took, took)

    def _compare(self, step: int) -> bool:
        """Whether some are odd, and leave; raises where this rank is one of them, or the job stops."""
        began_at = time.monotonic()
        mine = self._digests(step)
        digested_at = time.monotonic()
        measured = Measured(digests_s=digested_at - began_at, exchange_s=self._exchange_s, step_s=self._fastest_s)
        told: list[_Comparison] = [_Comparison(alike=0, sums={}, measured=measured)] * dist.get_world_size()
        dist.all_gather_object(told, _Comparison(alike=self._alike, sums=sums_of(mine), measured=measured))
        odd = [] if are_alike(one.sums for one in told) else self._odd_of_all(mine)
        self._exchange_s, self._fastest_s = time.monotonic() - digested_at, 0.0
        self._schedule = self._schedule.compared(step, [one.measured for one in told], self._budget)
        self._looked = step, self._groups.epoch
        self._alike = max(one.alike for one in told)  # who came in has not compared before
        self._teller.tell(Compared(step=step, values=len(mine), odd=len(odd)))
        if odd:
            self._act(odd[0], step)
        else:
            self._alike = step
        return bool(odd)

    def _odd_of_all(self, mine: RecordedEvent) -> list[Odd]:
        told: list[tuple[int, RecordedEvent, list[str]]] = [(0, {}, [])] * dist.get_world_size()
        dist.all_gather_object(told, (self._slot, mine, list(self._not_finite())))
        return odd_ones(
            {slot: theirs for slot, theirs, _ in told}, {slot: values for slot, _, values in told if values}
        )

    def _not_finite(self) -> Iterator[str]:
        for title, _, _, entries in self._replicated_state():
            for name, values in entries.items():
                if not bool(torch.isfinite(values).all()):
                    yield f"{title} ({name})"

    def _digests(self, step: int) -> RecordedEvent:
        found = {}
        for title, among, piece, entries in self._replicated_state():
            salts = [f"{piece.tensor} {name} {step}" for name in entries]
            numbers = digest.digests(list(entries.values()), piece.runs, salts=salts)
            for name, number in zip(entries, numbers, strict=True):
                found[f"{title} ({name})"] = among, piece.whole, str(piece.ranges), number
        return found

    def _act(self, odd: Odd, step: int) -> None:
        slots = ", ".join(str(self._topology.slot_of(slot)) for slot in odd.slots)
        if not odd.finite:
            what = f"{odd.values} in {slots} is not finite after step {step}, and in other replicas it is"
        elif odd.certain:
            what = f"{odd.values} in {slots} is not what the other replicas have after step {step}"
        else:
            what = f"{odd.values} differs between {odd.replica_digests} replicas after step {step}, in one of {slots}"
        heals = self._heals and odd.certain
        self._teller.tell(Corrupted(step=step, what=what, slots=slots.split(", "), certain=odd.certain, healed=heals))
        _LOG.error("silent corruption: %s", what)
        if heals and self._slot not in odd.slots:
            return  # they leave, and are missed in this step
        if not heals:
            self._distrust(self._alike)
            self._wait_for_all_to_know()
        raise SilentCorruption(
            f"{what}; at step {self._alike} all were alike" if self._alike else what,
            way_out="test the hardware of these slots"
            + ("; the others go on" if heals else f", and {self._restart()}"),
        )

    def _wait_for_all_to_know(self) -> None:
        """Whoever ended before another has its part of the exchange would be missed there as a loss, and that one would
        go on. Who comes here knows all; who is missed here has come, or dies of something else."""
        with contextlib.suppress(PeerLost, RuntimeError):
            dist.barrier()

    def _restart(self) -> str:
        if not self._alike:
            return "restart from a checkpoint of before this run"
        return f"restart from a checkpoint of step {self._alike} or before"
