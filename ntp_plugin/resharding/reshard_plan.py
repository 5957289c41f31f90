"""Plans which tensor moves from which layout to which, from the members' reports of what they hold. PURE.

An interrupted move of many tensors leaves some in the new layout and some in the old one, and joining ranks with the
former only. So each tensor has a version, the epoch whose losses its layout follows, and each is planned from its own.
Tensors of one version that are missing on the same slots share one `RecoveryPlan`: usually there is one plan, and two
after an interruption.

Jobs have thousands of members and models hundreds of tensors, and a recovery waits for this. So nothing here looks at
each tensor of each member: members that report the same are one (`_Alike`), and so are tensors that are held alike.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

from ntp_plugin.planning.recovery_plan import Nominal, RecoveryPlan, plan_recovery
from ntp_plugin.planning.shard_layout import lay_out
from ntp_plugin.planning.spans import Spans
from ntp_plugin.planning.topology import Slot, SurvivingReplicas
from ntp_plugin.planning.transfers import REPLICATED
from ntp_plugin.planning.units import Tensor
from ntp_plugin.resharding.cuts import WHOLE_UNITS, Recut, UnitTransfer

NOT_HELD = -1
"""The version of a tensor on a joining rank that has not received it yet."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AvailableVersions:
    """What one member holds.

    `versions` has the version of each tensor; `built` the tensors that are built but not switched to, by number, with
    the version; `lost` the losses behind each version that it knows, as ranks of the nominal layout.
    """

    versions: tuple[int, ...]
    built: tuple[tuple[int, int], ...]
    lost: Mapping[int, tuple[int, ...]]

    def encode(self) -> str:
        return json.dumps([self.versions, self.built, sorted(self.lost.items())])

    @classmethod
    def decode(cls, text: str) -> "AvailableVersions":
        versions, built, lost = json.loads(text)
        return cls(
            versions=tuple(versions),
            built=tuple((number, version) for number, version in built),
            lost={version: tuple(ranks) for version, ranks in lost},
        )


LEAST = 1 << 22
"""The elements that a batch may have in any case: with Adam's two entries a hundred megabytes in float32, twice.
Smaller batches cost more, because members compare after each."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorMove:
    """One tensor: the version that it is in, the slots that hold it so, and the plan from there."""

    tensor: Tensor
    version: int
    holders: frozenset[Slot]
    plan: RecoveryPlan


type BothHolderSets = tuple[list[list[int]], list[list[int]]]
"""Holder sets of a tensor, before and after: slots, by their rank in the nominal layout, that together hold all of
it."""
type _Kind = tuple[bool, int, frozenset[Slot]]
"""What tensors have in common: whether they are cut, the version, and the slots that hold them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RelayoutPlan:
    """The moves of every tensor of a stage into the layout of `version`."""

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
        """What all the plans share: the layout, the lanes and the batch."""
        return self.moves[0].plan

    @functools.cached_property
    def batches(self) -> tuple[tuple[TensorMove, ...], ...]:
        """The moves in batches; the elements that move in each are no more than the largest tensor has, or `LEAST`."""
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
        """Whether a member lacks a tensor, also one that will be idle: the others report to it what they keep."""
        topology = self.nominal.topology
        slots = {slot for replica in range(topology.dp) for slot in topology.group(replica, self.stage)}
        present = slots - self.surviving.lost
        return any(not holders.issuperset(present) for holders in {move.holders for move in self.moves})

    def tensors_reported_by(self, slot: Slot) -> list[str]:
        """The tensors whose shared entries this slot reports: the first of the slots that hold the same does."""
        firsts = {holders: min(holders, default=None) for holders in {move.holders for move in self.moves}}
        return [move.tensor.name for move in self.moves if firsts[move.holders] == slot]

    @functools.cached_property
    def surviving(self) -> SurvivingReplicas:
        return self._surviving(self.version)

    @functools.cached_property
    def training(self) -> list[Slot]:
        """The slots that train in the new layout, ascending."""
        return self._trained(self.surviving)

    def units_of(self, tensor: Tensor, slot: Slot) -> Spans:
        """The units of a tensor that a slot will hold, in storage order."""
        return self._units(self.surviving, tensor, slot)

    def recut(self, move: TensorMove, slot: Slot) -> Recut:
        """A tensor's move as one slot sees it."""
        tensor, rank_of = move.tensor, self.nominal.topology.rank_of
        family = tensor.family or REPLICATED
        moving = [transfer for transfer in move.plan.transfers if transfer.family == family]
        before = self._surviving(move.version)
        return Recut(
            tensor=tensor,
            before=self._units(before, tensor, slot) if slot in move.holders else (),
            after=self.units_of(tensor, slot),
            outgoing=tuple(
                UnitTransfer(peer=rank_of(transfer.target), units=transfer.units or WHOLE_UNITS)
                for transfer in moving
                if transfer.source == slot
            ),
            incoming=tuple(
                UnitTransfer(peer=rank_of(transfer.source), units=transfer.units or WHOLE_UNITS)
                for transfer in moving
                if transfer.target == slot
            ),
        )

    def kinds(self, moves: Iterable[TensorMove]) -> list[list[TensorMove]]:
        """Group moves whose tensors have the same holder sets, before and after."""
        kinds: dict[_Kind, list[TensorMove]] = {}
        for move in moves:
            kinds.setdefault(_kind(move), []).append(move)
        return list(kinds.values())

    def holder_sets(self, move: TensorMove) -> BothHolderSets:
        """The slots that together hold each unit of a tensor once, before its move (if all are present) and after."""
        kind = _kind(move)
        if kind not in self._holder_sets:
            before = self._trained(self._surviving(move.version))
            found = [holders for holders in _holder_sets(move.tensor, before) if move.holders.issuperset(holders)]
            self._holder_sets[kind] = self._ranks(found), self._ranks(_holder_sets(move.tensor, self.training))
        return self._holder_sets[kind]

    @functools.cached_property
    def _holder_sets(self) -> dict[_Kind, BothHolderSets]:
        """The holder sets of each kind, as they are asked for."""
        return {}

    def _ranks(self, holder_sets: Iterable[Iterable[Slot]]) -> list[list[int]]:
        return [[self.nominal.topology.rank_of(slot) for slot in holders] for holders in holder_sets]

    def _surviving(self, version: int) -> SurvivingReplicas:
        return self._surviving_by_version[version]

    @functools.cached_property
    def _surviving_by_version(self) -> dict[int, SurvivingReplicas]:
        return {version: _surviving(self.nominal, lost) for version, lost in self.lost.items()}

    def _trained(self, surviving: SurvivingReplicas) -> list[Slot]:
        group = self.nominal.topology.group
        slots = [slot for replica in surviving.replicas for slot in group(replica, self.stage)]
        return [slot for slot in slots if slot not in surviving.lost]

    def _units(self, surviving: SurvivingReplicas, tensor: Tensor, slot: Slot) -> Spans:
        if slot in surviving.lost or slot.replica in surviving.dropped:
            return ()
        if not tensor.family:
            return WHOLE_UNITS
        families = self.nominal.units.stages[self.stage].families
        family = next(family for family in families if family.name == tensor.family)
        return lay_out(family, self.nominal.topology.tp, surviving.pattern(slot.replica, self.stage)).holdings[slot.tp]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Alike:
    """Members of a stage that report the same."""

    reported: AvailableVersions
    ranks: tuple[int, ...]

    def hold(self, number: int, version: int) -> bool:
        """Whether they hold a tensor in a version, or have built it: then they will switch, as others have."""
        return self.reported.versions[number] == version or (number, version) in self.reported.built

    @property
    def hold_nothing(self) -> bool:
        return set(self.reported.versions) == {NOT_HELD} and not self.reported.built


def _alike(held: Mapping[int, AvailableVersions]) -> list[_Alike]:
    ranks: dict[tuple[object, object], list[int]] = {}
    for rank, report in held.items():
        ranks.setdefault((report.versions, report.built), []).append(rank)
    return [_Alike(reported=held[of[0]], ranks=tuple(of)) for of in ranks.values()]


type _Plans = dict[tuple[int, frozenset[int]], RecoveryPlan]
"""Plans by the version of a tensor and the ranks that lack it, which are usually the same for all tensors."""


def plan_relayout(nominal: Nominal, held: Mapping[int, AvailableVersions], version: int) -> tuple[RelayoutPlan, ...]:
    """Plan, for each stage, the moves from what each member holds to the layout of the current members.

    Args:
        nominal: The nominal layout of the job.
        held: What each member holds, by its rank in the nominal layout.
        version: The epoch whose losses the new layout follows.
    """
    lost = {known: ranks for report in held.values() for known, ranks in report.lost.items()}
    lost[version] = tuple(rank for rank in range(nominal.topology.size) if rank not in held)
    of_stages: list[dict[int, AvailableVersions]] = [{} for _ in range(nominal.topology.pp)]
    for rank, report in held.items():
        of_stages[nominal.topology.slot_of(rank).stage][rank] = report
    members = [_alike(of_stage) for of_stage in of_stages]
    nowhere = frozenset(rank for of in members for some in of if some.hold_nothing for rank in some.ranks)
    plans: _Plans = {}
    return tuple(
        _plan_stage(nominal, stage, of, version, lost=lost, nowhere=nowhere, plans=plans)
        for stage, of in enumerate(members)
    )


def _plan_stage(
    nominal: Nominal,
    stage: int,
    members: Sequence[_Alike],
    version: int,
    *,
    lost: Mapping[int, tuple[int, ...]],
    nowhere: frozenset[int],
    plans: _Plans,
) -> RelayoutPlan:
    ways: dict[tuple[int, tuple[bool, ...]], tuple[frozenset[Slot], RecoveryPlan]] = {}
    moves = []
    for number, (tensor, _) in enumerate(nominal.units.stages[stage].tensors):
        found = max((some.reported.versions[number] for some in members), default=version)
        hold = tuple(some.hold(number, found) for some in members)
        if (found, hold) not in ways:
            empty = frozenset(rank for some, has in zip(members, hold, strict=True) if not has for rank in some.ranks)
            there = frozenset(rank for some in members for rank in some.ranks) - empty - nowhere
            plan = _plan_from(nominal, found, empty | nowhere, lost=lost, version=version, plans=plans)
            surviving = _surviving(nominal, lost[found])
            present = _slots(nominal, there) - surviving.lost
            ways[found, hold] = frozenset(slot for slot in present if slot.replica not in surviving.dropped), plan
        holders, plan = ways[found, hold]
        moves.append(TensorMove(tensor=tensor, version=found, holders=holders, plan=plan))
    losses = {found: lost[found] for found in sorted({version, *(move.version for move in moves)})}
    return RelayoutPlan(nominal=nominal, stage=stage, version=version, lost=losses, moves=tuple(moves))


def _plan_from(
    nominal: Nominal,
    found: int,
    empty: frozenset[int],
    *,
    lost: Mapping[int, tuple[int, ...]],
    version: int,
    plans: _Plans,
) -> RecoveryPlan:
    if (found, empty) not in plans:
        plans[found, empty] = plan_recovery(
            nominal,
            lost=_slots(nominal, lost[version]),
            lost_before=_slots(nominal, lost[found]),
            empty=_slots(nominal, empty),
        )
    return plans[found, empty]


def digest_of(plans: Sequence[RelayoutPlan]) -> str:
    """A digest that is equal on every member that planned the same for all stages."""
    return hashlib.blake2b("".join(plan.digest for plan in plans).encode(), digest_size=16).hexdigest()


def _slots(nominal: Nominal, ranks: Iterable[int]) -> frozenset[Slot]:
    return frozenset(nominal.topology.slot_of(rank) for rank in ranks)


def _surviving(nominal: Nominal, lost: Iterable[int]) -> SurvivingReplicas:
    return nominal.surviving(_slots(nominal, lost))


def _kind(move: TensorMove) -> _Kind:
    return bool(move.tensor.family), move.version, move.holders


def _holder_sets(tensor: Tensor, slots: Sequence[Slot]) -> list[list[Slot]]:
    if not tensor.family:
        return [[slot] for slot in slots]
    replicas: dict[int, list[Slot]] = {}
    for slot in slots:
        replicas.setdefault(slot.replica, []).append(slot)
    return [replicas[replica] for replica in sorted(replicas)]
