"""Replicas that leave as a whole: of one slot each, or of the slots of a user's mpu.

Only the script knows how the layers of such a replica are cut, so the plugin cannot cut them anew. If one of its slots
is lost, the others leave the job as well, and the other replicas take over its micro-batches. It rejoins when there are
processes for all of its slots, which ask for admission together.

Slots at the same position in their replicas hold the same, and form a lane: DeepSpeed's own data-parallel group, which
is edited in place. The lane sums gradients, sends state to joining ranks, and shards ZeRO. Its world size and rank,
which an mpu may have counted once, are read from the group (`AskedOfGroups`).

The slots of a replica wait for each other within the forward. A slot that is interrupted there owes its loop an output
of the right shape, which nobody will use: it finishes alone, through groups that answer by themselves
(`groups/substitute_backend.py`).

With ZeRO-3 all ranks gather the weights in every forward and backward, so all have the same number of micro-batches.
Where shares differ, a rank repeats the last micro-batch of its share, and the repetition counts for nothing.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from deepspeed.utils.bwc import bwc_tensor_model_parallel_group

from ntp_plugin.copies.slices import TensorSlice
from ntp_plugin.deepspeed.full_width_state import whole
from ntp_plugin.deepspeed.sharded_weights import without_weights
from ntp_plugin.errors import Refused, StateLost
from ntp_plugin.membership.agreement import Agreed
from ntp_plugin.planning.batch_split import NominalBatch, even_shares
from ntp_plugin.planning.topology import Topology
from ntp_plugin.recovery.elastic_rank import ElasticRank
from ntp_plugin.recovery.trainer import LeavesOut

_EVEN = 1_000_000
"""Nominal micro-batch time: all replicas count as equally fast."""


class FullWidthReplicas:
    """The replicas of a job that leave as a whole, as one rank sees them."""

    why_none_is_saved = ""
    """Why no checkpoint can be written; empty, because every surviving replica can write one."""

    def __init__(self, engine: Any, topology: Topology, *, rank: ElasticRank) -> None:
        self._engine, self._topology, self._rank = engine, topology, rank
        self.gathers_weights = int(engine.zero_optimization_stage()) > 2
        """Whether all ranks take part in every forward (ZeRO-3)."""
        self._slot = topology.slot_of(rank.place.slot)
        self._parameters = dict(engine.module.named_parameters())
        self._averages: bool = engine.gradient_average
        self._batch = NominalBatch(
            replicas=topology.dp,
            per_replica=engine.gradient_accumulation_steps(),
            micro_batch=engine.train_micro_batch_size_per_gpu(),
            stages=1,
            healthy_ns=_EVEN,
        )
        self.lane: dist.ProcessGroup | None = None
        """The ranks that hold what this one holds; None for all."""
        if topology.tp > 1:
            self.lane = engine.mpu.get_data_parallel_group()
            _refuse_other_places(engine.mpu, topology, rank.place.slot)
        self._left = tuple(range(topology.dp))

    # ------------------------------------------------ who computes what

    @property
    def numbers(self) -> list[int]:
        """This slot's replica's micro-batches in the global batch, by number; repeated ones count for nothing."""
        mine = self.shares[self._slot.replica]
        rounds = max(map(len, self.shares.values())) if self.gathers_weights else len(mine)
        return mine + mine[-1:] * (rounds - len(mine))

    @property
    def shares(self) -> Mapping[int, list[int]]:
        """Replica -> its micro-batches."""
        return {replica: share.numbers for replica, share in even_shares(self._left, self._batch).items()}

    @property
    def widths(self) -> list[list[int]]:
        """Surviving slots, replica by replica."""
        return [[self._topology.tp * (replica in self._left)] for replica in range(self._topology.dp)]

    @property
    def weight(self) -> float:
        """Factor of a loss, so that DeepSpeed's mean over the surviving replicas equals the mean over the nominal
        ones; a sum over all micro-batches stays what it is."""
        return len(self._left) / self._topology.dp if self._averages else 1.0

    @property
    def is_replica_leader(self) -> bool:
        """Whether this slot reports what all slots of its replica would report."""
        return not self._slot.tp

    @property
    def lanes_apart(self) -> int:
        """The number of lanes, which hold different state."""
        return self._topology.tp

    def lane_of(self, slot: int) -> int:
        """Return the lane of a slot."""
        return slot % self._topology.tp

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Go forward without the other slots of the replica, and with ZeRO-3 without the weights that others hold."""
        weightless = without_weights(self._engine.optimizer) if self.gathers_weights else contextlib.nullcontext()
        with self._rank.groups.alone(self._mates(self._slot.replica)), weightless:
            yield

    def _mates(self, replica: int) -> range:
        return range(replica * self._topology.tp, (replica + 1) * self._topology.tp)

    @property
    def others_of_mine(self) -> list[int]:
        """The slots without which this one cannot train."""
        return [slot for slot in self._mates(self._slot.replica) if slot != self._rank.place.slot]

    # ------------------------------------------------ what is held

    def named(self, name: str) -> str:
        """Return a name that is unique per lane."""
        return name if self._topology.tp == 1 else f"{name} of TP slot {self._slot.tp}"

    def part(self, name: str) -> TensorSlice:
        """Return what this slot holds of a parameter."""
        return whole(self.named(name), self._parameters[name])

    def is_cut(self, _name: str) -> bool:
        """Whether the slots of a replica may hold different values under this name."""
        return self._topology.tp > 1

    # ------------------------------------------------ a recovery

    def plan(self, agreed: Agreed) -> str:
        """Plan which replicas remain, from the present members."""
        there = agreed.view.slots
        some = {slot // self._topology.tp for slot in there}
        broken = {replica for replica in some if not set(self._mates(replica)) <= set(there)}
        if broken == some:
            raise StateLost(
                f"no replica has all of its {self._topology.tp} slots, and those of an mpu cannot be cut anew",
                fix="restart from the last checkpoint",
            )
        if broken:
            self._leave_out(broken, agreed)
        self._next = tuple(sorted(some))
        return repr(self._next)

    def _leave_out(self, broken: set[int], agreed: Agreed) -> None:
        """Leave replicas out that have lost a slot. Those whose slots are all joining come last: a missing slot may be
        on its way."""
        of = {replica: [slot for slot in self._mates(replica) if slot in agreed.reports] for replica in sorted(broken)}
        came = {r for r, slots in of.items() if all(agreed.reports[slot].joiner for slot in slots)}
        leaving = sorted(broken - came or came)
        raise LeavesOut(
            [slot for replica in leaving for slot in of[replica]],
            why="; ".join(
                f"replica {replica} leaves whole: of its {self._topology.tp} slots {len(of[replica])} are there,"
                " and those of an mpu cannot be cut anew"
                for replica in leaving
            ),
            awaits=broken == came,
        )

    def resume_from(self, _agreed: Agreed) -> None:
        """Apply the last plan; there is nothing to move."""
        self._left = self._next

    def who_was_there(self, agreed: Agreed) -> int:
        """Return the first slot of this lane that is not joining."""
        mine = [slot for slot in agreed.reports if self.lane_of(slot) == self._slot.tp]
        return min(slot for slot in mine if not agreed.reports[slot].joiner)


def _refuse_other_places(mpu: Any, topology: Topology, rank: int) -> None:
    """Raise `Refused` if the slots of a replica are not consecutive ranks."""
    replica, tp = divmod(rank, topology.tp)
    wanted = {
        "its tensor model-parallel group": list(range(replica * topology.tp, (replica + 1) * topology.tp)),
        "its data-parallel group": list(range(tp, topology.size, topology.tp)),
    }
    groups = bwc_tensor_model_parallel_group(mpu), mpu.get_data_parallel_group()
    for (what, ranks), group in zip(wanted.items(), groups, strict=True):
        found = dist.get_process_group_ranks(group)
        if sorted(found) != ranks:
            raise Refused(
                f"the mpu has rank {rank} with {found} in {what}, and ntp knows it with {ranks}",
                fix=f"make groups of {topology.tp} ranks that follow each other, as Megatron's mpu does",
            )


class AskedOfGroups:
    """A user's mpu whose world sizes and ranks are read from its current groups; all else is its own."""

    def __init__(self, mpu: Any) -> None:
        self._mpu = mpu

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._mpu, name)
        asks: dict[str, Callable[[Any], int]] = {"_world_size": dist.get_world_size, "_rank": dist.get_rank}
        for ending, ask in asks.items():
            group = getattr(self._mpu, name.removesuffix(ending) + "_group", None)
            if name.endswith(ending) and group is not None:
                return lambda: ask(group())
        return own
