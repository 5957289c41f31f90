"""Which tensor goes from which layout to which, from what the members report that they hold. PURE.

A move of many tensors that was interrupted has left some in the new layout and some in the old one, and newcomers
with the former only. So each tensor has a version, the epoch whose losses its layout follows, and each is planned
from its own: tensors of one version, of which the same slots hold nothing, share one `RecoveryPlan`. There is one as
a rule, and two after an interruption.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

from ntp_plugin.planning.recovery_plan import Nominal, RecoveryPlan, plan_recovery
from ntp_plugin.planning.shard_layout import lay_out
from ntp_plugin.planning.spans import Spans
from ntp_plugin.planning.topology import Slot, Standing
from ntp_plugin.planning.transfers import REPLICATED
from ntp_plugin.planning.units import Tensor
from ntp_plugin.training.cuts import WHOLE_UNITS, Piece, Recut

NOT_HELD = -1
"""The version of a tensor on a newcomer that has not got it yet."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What one member holds: the version of each tensor, those that are built and not switched to (by number, with the
    version), and the losses behind each version that it knows, as ranks of the nominal layout."""

    versions: tuple[int, ...]
    built: tuple[tuple[int, int], ...]
    lost: Mapping[int, tuple[int, ...]]

    def encode(self) -> str:
        return json.dumps([self.versions, self.built, sorted(self.lost.items())])

    @classmethod
    def decode(cls, text: str) -> "Held":
        versions, built, lost = json.loads(text)
        return cls(
            versions=tuple(versions),
            built=tuple((number, version) for number, version in built),
            lost={version: tuple(ranks) for version, ranks in lost},
        )


LEAST = 1 << 22
"""Elements that a batch may have in any case: with Adam's two entries a hundred megabytes in float32, twice. What costs
is that members compare after each batch."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorMove:
    """One tensor: the version that it is found in, who holds it so, and the plan from there."""

    tensor: Tensor
    version: int
    holders: frozenset[Slot]
    plan: RecoveryPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class RelayoutPlan:
    """The way of every tensor of a stage into the layout of `version`."""

    nominal: Nominal
    stage: int
    version: int
    lost: Mapping[int, tuple[int, ...]]
    moves: tuple[TensorMove, ...]

    @functools.cached_property
    def digest(self) -> str:
        """Equal on every member that planned the same."""
        facts = (self.version, sorted(self.lost.items()), [(move.version, move.plan.digest) for move in self.moves])
        return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()

    @property
    def goal(self) -> RecoveryPlan:
        """What all the plans have in common: the layout, the lanes and the batch."""
        return self.moves[0].plan

    @functools.cached_property
    def batches(self) -> tuple[tuple[TensorMove, ...], ...]:
        """The moves in batches, each of no more elements that change hands than the largest tensor has, or `LEAST`."""
        most = max(LEAST, *(move.tensor.elements for move in self.moves))
        batches: list[list[TensorMove]] = [[]]
        elements = 0
        for move in self.moves:
            family = move.tensor.family or REPLICATED
            moving = any(
                transfer.family == family and transfer.target.stage == self.stage for transfer in move.plan.transfers
            )
            if elements + moving * move.tensor.elements > most:
                batches.append([])
                elements = 0
            batches[-1].append(move)
            elements += moving * move.tensor.elements
        return tuple(map(tuple, batches))

    @functools.cached_property
    def somebody_lacks_something(self) -> bool:
        """Whether a member holds nothing of a tensor, also one that will stand idle: others tell it what they keep."""
        topology = self.nominal.topology
        slots = {slot for replica in range(topology.dp) for slot in topology.group(replica, self.stage)}
        present = slots - self.standing.lost
        return any(not move.holders.issuperset(present) for move in self.moves)

    @functools.cached_property
    def standing(self) -> Standing:
        return self._standing(self.version)

    @functools.cached_property
    def training(self) -> list[Slot]:
        """The slots that train from now on, ascending."""
        return self._trained(self.standing)

    def units_of(self, tensor: Tensor, slot: Slot) -> Spans:
        """The units of a tensor that a slot will hold, in storage order."""
        return self._units(self.standing, tensor, slot)

    def recut(self, move: TensorMove, slot: Slot) -> Recut:
        """A tensor's move as one slot sees it."""
        tensor, rank_of = move.tensor, self.nominal.topology.rank_of
        family = tensor.family or REPLICATED
        moving = [transfer for transfer in move.plan.transfers if transfer.family == family]
        before = self._standing(move.version)
        return Recut(
            tensor=tensor,
            before=self._units(before, tensor, slot) if slot in move.holders else (),
            after=self.units_of(tensor, slot),
            outgoing=tuple(
                Piece(peer=rank_of(transfer.target), units=transfer.units or WHOLE_UNITS)
                for transfer in moving
                if transfer.source == slot
            ),
            incoming=tuple(
                Piece(peer=rank_of(transfer.source), units=transfer.units or WHOLE_UNITS)
                for transfer in moving
                if transfer.target == slot
            ),
        )

    def wholes(self, move: TensorMove) -> tuple[list[list[int]], list[list[int]]]:
        """The slots that together hold each unit of a tensor once, before its move (if all are there) and after."""
        before = self._trained(self._standing(move.version))
        found = [whole for whole in _wholes(move.tensor, before) if move.holders.issuperset(whole)]
        return tuple(  # type: ignore[return-value]
            [[self.nominal.topology.rank_of(slot) for slot in whole] for whole in wholes]
            for wholes in (found, _wholes(move.tensor, self.training))
        )

    def _standing(self, version: int) -> Standing:
        return self._standings[version]

    @functools.cached_property
    def _standings(self) -> dict[int, Standing]:
        return {version: _standing(self.nominal, lost) for version, lost in self.lost.items()}

    def _trained(self, standing: Standing) -> list[Slot]:
        group = self.nominal.topology.group
        slots = [slot for replica in standing.replicas for slot in group(replica, self.stage)]
        return [slot for slot in slots if slot not in standing.lost]

    def _units(self, standing: Standing, tensor: Tensor, slot: Slot) -> Spans:
        if slot in standing.lost or slot.replica in standing.dropped:
            return ()
        if not tensor.family:
            return WHOLE_UNITS
        families = self.nominal.units.stages[self.stage].families
        family = next(family for family in families if family.name == tensor.family)
        return lay_out(family, self.nominal.topology.tp, standing.pattern(slot.replica, self.stage)).holdings[slot.tp]


type _Plans = dict[tuple[int, frozenset[int]], RecoveryPlan]
"""By the version that is found, and who holds nothing of it: the same for all tensors, as a rule."""


def plan_relayout(nominal: Nominal, held: Mapping[int, Held], version: int) -> tuple[RelayoutPlan, ...]:
    """For each stage: from what each member (by its rank in the nominal layout) holds, to the layout of those who are
    members now."""
    lost = {known: ranks for told in held.values() for known, ranks in told.lost.items()}
    lost[version] = tuple(rank for rank in range(nominal.topology.size) if rank not in held)
    plans: _Plans = {}
    return tuple(
        _plan_stage(nominal, stage, held, version, lost=lost, plans=plans) for stage in range(nominal.topology.pp)
    )


def _plan_stage(
    nominal: Nominal,
    stage: int,
    held: Mapping[int, Held],
    version: int,
    *,
    lost: Mapping[int, tuple[int, ...]],
    plans: _Plans,
) -> RelayoutPlan:
    mine = {rank: told for rank, told in held.items() if nominal.topology.slot_of(rank).stage == stage}
    nowhere = {rank for rank, told in held.items() if set(told.versions) == {NOT_HELD} and not told.built}
    moves, known = [], {version}
    for number, (tensor, _) in enumerate(nominal.units.stages[stage].tensors):
        found = max((told.versions[number] for told in mine.values()), default=version)
        known.add(found)
        empty = frozenset({rank for rank, told in mine.items() if not _holds(told, number, found)} | nowhere)
        if (found, empty) not in plans:
            plans[found, empty] = plan_recovery(
                nominal,
                lost=_slots(nominal, lost[version]),
                lost_before=_slots(nominal, lost[found]),
                empty=_slots(nominal, empty),
            )
        standing = _standing(nominal, lost[found])
        there = _slots(nominal, (rank for rank in mine if rank not in empty)) - standing.lost
        holders = frozenset(slot for slot in there if slot.replica not in standing.dropped)
        moves.append(TensorMove(tensor=tensor, version=found, holders=holders, plan=plans[found, empty]))
    losses = {found: lost[found] for found in sorted(known)}
    return RelayoutPlan(nominal=nominal, stage=stage, version=version, lost=losses, moves=tuple(moves))


def digest_of(plans: Sequence[RelayoutPlan]) -> str:
    """Equal on every member that planned the same for all stages."""
    return hashlib.blake2b("".join(plan.digest for plan in plans).encode(), digest_size=16).hexdigest()


def _holds(told: Held, number: int, version: int) -> bool:
    """Whether a member has a tensor in a version, or has it built so: it will switch, as others have."""
    return told.versions[number] == version or (number, version) in told.built


def _slots(nominal: Nominal, ranks: Iterable[int]) -> frozenset[Slot]:
    return frozenset(nominal.topology.slot_of(rank) for rank in ranks)


def _standing(nominal: Nominal, lost: Iterable[int]) -> Standing:
    return nominal.standing(_slots(nominal, lost))


def _wholes(tensor: Tensor, slots: Sequence[Slot]) -> list[list[Slot]]:
    if not tensor.family:
        return [[slot] for slot in slots]
    replicas = sorted({slot.replica for slot in slots})
    return [[slot for slot in slots if slot.replica == replica] for replica in replicas]
