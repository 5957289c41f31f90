"""Compares the weights of replicas during training, to find silent corruption.

A flipped bit in one replica's weights raises no error: the replica trains on, and its gradients are summed with the
others'. So ranks digest their weights, and all other state that replicas share, and compare the digests: before a
checkpoint is written, before the job ends, after the first step, and after the first step of each epoch. In between
they compare as often as a share of the step time allows (`comparison_interval.py`) or as the user has set. The wrong
ranks are named if that is possible (`copies/replica_digests.py`). Then the job stops; or the wrong ranks leave it as if
they had died, and their slots get their state from the others (`on_sdc`).

If the loss of a step is not finite, ranks compare before they apply it: afterwards all replicas would have the values
of the wrong one. If all hold the same, the training has diverged by itself, and goes on as its framework does.

A state that is about to be compared is not copied: the others would resume from the copy of a wrong rank.
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
from ntp_plugin.copies.replica_digests import Odd, SlotDigests, Sums, are_alike, odd_ones, sums_of
from ntp_plugin.copies.slices import TensorSlice
from ntp_plugin.errors import PeerLost, SilentCorruption
from ntp_plugin.planning.topology import Topology
from ntp_plugin.recovery.comparison_interval import AT_LEAST_EVERY, CompareSchedule, Measured
from ntp_plugin.recovery.elastic_rank import ElasticRank
from ntp_plugin.telemetry import Compared, Corrupted, EventWriter

_LOG = logging.getLogger(__name__)


type ReplicatedState = Iterable[tuple[str, str, TensorSlice, Mapping[str, torch.Tensor]]]
"""The state that every replica has: its title, its class (`copies/replica_digests.py`), the slice of it that this rank
holds, and the values of these elements by name."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Comparison:
    """What a rank sends to all others in a comparison."""

    alike: int
    """The last step after which all replicas were the same, as far as this rank knows."""
    sums: Sums
    measured: Measured


class ReplicaWatch:
    """Compares replicas when a comparison is due, and when it is asked to."""

    def __init__(
        self,
        policy: TrainingPolicy,
        topology: Topology,
        *,
        rank: ElasticRank,
        replicated_state: Callable[[], ReplicatedState],
        distrust: Callable[[int], None],
        event_writer: EventWriter,
    ) -> None:
        """`distrust` gives up the copies made since a step: nobody may resume from them when the job stops."""
        self._topology, self._replicated_state, self._distrust = topology, replicated_state, distrust
        self._event_writer, self._alike = event_writer, 0
        self._groups, self._slot = rank.groups, rank.place.slot
        self._budget, self._heals = policy.watch_cost, policy.on_sdc == "heal"
        self._schedule = CompareSchedule(every=policy.watch_steps)
        self._looked = 0, 0
        """The steps and the epoch of the last comparison."""
        self._diverged_in, self._diverged_at = -1, 0
        """The epoch and the step in which all were last found the same while a loss was not finite."""
        self._exchange_s, self._fastest_s = 0.0, 0.0
        self._left = 0, -1, 0.0
        """The steps and the epoch of the last call, and when it returned."""

    @property
    def is_on(self) -> bool:
        """Whether this job compares its replicas."""
        return self._schedule.every != 0

    def look(self, step: int) -> None:
        """Compare if that is due after so many steps.

        All ranks call this together, at each point that may need it, for the first time or again.
        """
        self._schedule = self._schedule.seen(step, self._groups.epoch)
        self.compare_if(self._schedule.is_due(step), step)

    def is_due(self, step: int) -> bool:
        """Whether this rank asks for a comparison after the step that is being taken.

        For an adapter whose ranks share this in the vote, and then call `compare_if` if any of them asks.
        """
        self._schedule = self._schedule.seen(step - 1, self._groups.epoch)
        return self._schedule.is_due(step)

    def compare_if(self, wanted: bool, step: int) -> None:
        """Compare after so many steps if `wanted`; all ranks call this together."""
        self._time(step)
        if wanted and self._looked != (step, self._groups.epoch):
            self._compare(step)
        self._left = step, self._groups.epoch, time.monotonic()

    def before_it_counts(self, step: int) -> None:
        """Compare unless that was done after so many steps: before a checkpoint is written, or before the job ends.

        All ranks call this together.
        """
        if self.is_on and step:
            self.compare_now(step)

    def compare_now(self, step: int) -> None:
        """Compare unless that was done after so many steps, also in a job that compares nothing by itself.

        All ranks call this together.
        """
        if self._looked != (step, self._groups.epoch):
            self._compare(step)

    def not_finite(self, step: int) -> None:
        """Compare before a step is applied whose loss is not finite; `step` are the steps applied so far.

        All ranks call this together. If one replica is wrong and is to leave, all others wait for that: the step runs
        again without it.
        """
        epoch = self._groups.epoch
        known = self._diverged_in == epoch and step < self._diverged_at + AT_LEAST_EVERY
        if not self.is_on or known:
            return
        if self._compare(step):
            dist.barrier()  # the ranks that leave do not come to it, so it ends with the recovery
        self._diverged_in, self._diverged_at = epoch, step
        _LOG.warning("the loss after step %d is not finite, but all replicas hold the same: not a corruption", step)

    def _time(self, step: int) -> None:
        before, epoch, since = self._left
        if (before + 1, epoch) == (step, self._groups.epoch):
            took = time.monotonic() - since
            self._fastest_s = min(self._fastest_s or took, took)

    def _compare(self, step: int) -> bool:
        """Whether some ranks are odd and leave; raises if this rank is one of them, or if the job stops."""
        began_at = time.monotonic()
        mine = self._digests(step)
        digested_at = time.monotonic()
        measured = Measured(digests_s=digested_at - began_at, exchange_s=self._exchange_s, step_s=self._fastest_s)
        gathered: list[_Comparison] = [_Comparison(alike=0, sums={}, measured=measured)] * dist.get_world_size()
        dist.all_gather_object(gathered, _Comparison(alike=self._alike, sums=sums_of(mine), measured=measured))
        odd = [] if are_alike(one.sums for one in gathered) else self._odd_of_all(mine)
        self._exchange_s, self._fastest_s = time.monotonic() - digested_at, 0.0
        self._schedule = self._schedule.compared(step, [one.measured for one in gathered], self._budget)
        self._looked = step, self._groups.epoch
        self._alike = max(one.alike for one in gathered)  # a joining rank has not compared before
        self._event_writer.write(Compared(step=step, values=len(mine), odd=len(odd)))
        if odd:
            self._act(odd[0], step)
        else:
            self._alike = step
        return bool(odd)

    def _odd_of_all(self, mine: SlotDigests) -> list[Odd]:
        gathered: list[tuple[int, SlotDigests, list[str]]] = [(0, {}, [])] * dist.get_world_size()
        dist.all_gather_object(gathered, (self._slot, mine, list(self._not_finite())))
        return odd_ones(
            {slot: theirs for slot, theirs, _ in gathered}, {slot: values for slot, _, values in gathered if values}
        )

    def _not_finite(self) -> Iterator[str]:
        for title, _, _, entries in self._replicated_state():
            for name, values in entries.items():
                if not bool(torch.isfinite(values).all()):
                    yield f"{title} ({name})"

    def _digests(self, step: int) -> SlotDigests:
        found = {}
        for title, among, tensor_slice, entries in self._replicated_state():
            salts = [f"{tensor_slice.tensor} {name} {step}" for name in entries]
            numbers = digest.digests(list(entries.values()), tensor_slice.runs, salts=salts)
            for name, number in zip(entries, numbers, strict=True):
                found[f"{title} ({name})"] = among, tensor_slice.whole, str(tensor_slice.ranges), number
        return found

    def _act(self, odd: Odd, step: int) -> None:
        slots = ", ".join(str(self._topology.slot_of(slot)) for slot in odd.slots)
        if not odd.finite:
            what = f"{odd.values} in {slots} is not finite after step {step}, and in other replicas it is"
        elif odd.certain:
            what = f"{odd.values} in {slots} is not what the other replicas have after step {step}"
        else:
            what = f"{odd.values} differs between {odd.instances} replicas after step {step}, in one of {slots}"
        heals = self._heals and odd.certain
        self._event_writer.write(
            Corrupted(step=step, what=what, slots=slots.split(", "), certain=odd.certain, healed=heals)
        )
        _LOG.error("silent corruption: %s", what)
        if heals and self._slot not in odd.slots:
            return  # they leave, and the others find the loss in this step
        if not heals:
            self._distrust(self._alike)
            self._wait_for_all_to_know()
        raise SilentCorruption(
            f"{what}; at step {self._alike} all were alike" if self._alike else what,
            fix="test the hardware of these slots" + ("; the others go on" if heals else f", and {self._restart()}"),
        )

    def _wait_for_all_to_know(self) -> None:
        """Wait until all ranks have seen the result, or are lost.

        A rank that ended before another has its part of the exchange would count as lost there, and that one would go
        on. A rank that comes here knows the result; one that is lost here has come before, or is lost for another
        reason.
        """
        with contextlib.suppress(PeerLost, RuntimeError):
            dist.barrier()

    def _restart(self) -> str:
        if not self._alike:
            return "restart from a checkpoint of before this run"
        return f"restart from a checkpoint of step {self._alike} or before"
