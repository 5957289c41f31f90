"""Computes the complete plan: what every rank does after slots were lost or came back, with a digest.

Every survivor computes the plan alone from the same facts and compares digests with the others before anyone acts. The
digest covers the facts as well (the nominal layout, the policy, the lost slots), so that two ranks with different
configurations are detected too. The plan, and what is digested, contains whole numbers and words only.

With no slot lost the same function checks a layout before training: what cannot work is refused when the plugin is
enabled, not when a rank has died.
"""

import dataclasses
import functools
import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from ntp_plugin.config.sections import Batch, Hardware, Job, Model, Policy, State
from ntp_plugin.planning.batch_split import BatchSplit, NominalBatch, ReplicaPace, split_batch
from ntp_plugin.planning.copy_placement import Placement, Resettled, place_copies
from ntp_plugin.planning.expert_changes import ExpertGroupChange, plan_expert_groups
from ntp_plugin.planning.expert_groups import (
    GroupLoad,
    load_of,
    replicas_in_step,
    units_of,
)
from ntp_plugin.planning.layer_cuts import Layers, place_layers
from ntp_plugin.planning.memory_fit import AS_IS, SMALLER, MemoryUse, Training, fit_groups, memory_use, narrowest
from ntp_plugin.planning.pace import HEALTHY_NS, micro_batch_ns
from ntp_plugin.planning.parity_groups import ParityGroup, ParityGroups, share_parities
from ntp_plugin.planning.routes import SegmentRoute, plan_route
from ntp_plugin.planning.topology import WHOLE, Pattern, Slot, SurvivingReplicas, Topology
from ntp_plugin.planning.transfers import BlockDeal, Change, Transfer, plan_block_deals, plan_transfers
from ntp_plugin.planning.units import ModelUnits, StageUnits

FORMAT = 8
"""Raised with every change to the content of a plan, so that ranks with different versions do not act together."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """A GPU's memory for the job, in bytes, and what the job stores there besides its units."""

    limit: float
    model: Model
    state: State
    recompute: bool = False
    sequence_parallel: bool = True
    activation: int = 2
    smaller: bool = True
    """True if a micro-batch may run in splits. False if its loss is a mean, which differs over splits."""

    @property
    def rungs(self) -> tuple[str, ...]:
        """The rungs of the ladder that a job can climb by itself."""
        return (AS_IS, SMALLER) if self.smaller else (AS_IS,)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Nominal:
    """The job before anything was lost."""

    topology: Topology
    units: ModelUnits
    batch: Batch
    state: State
    hardware: Hardware
    policy: Policy
    splits: int = 1
    """Number of splits in which a replica runs one micro-batch of this plan."""
    guard: Guard | None = None
    """Set if memory is limited."""
    layers: Layers | None = None
    """Set if layers may move to other stages."""
    layer_units: ModelUnits | None = None
    """The units of each layer as a running job has them; None: those of `layers`."""

    @classmethod
    def of(cls, job: Job) -> "Nominal":
        parallel, policy = job.parallel, job.ntp
        topology = Topology.of(parallel, experts=job.model.experts is not None)
        return cls(
            topology=topology,
            units=units_of(job.model, parallel, topology, granule=policy.granule),
            batch=job.batch,
            state=job.state,
            hardware=job.hardware,
            policy=policy,
            guard=None
            if job.hardware.gpu_memory_gb is None
            else Guard(
                limit=job.hardware.gpu_memory_gb * 1e9,
                model=job.model,
                state=job.state,
                recompute=job.state.recompute,
            ),
        )

    @property
    def training(self) -> Training:
        """The job as its guard sees it."""
        assert self.guard is not None, "only called if memory is limited"
        return Training(
            model=self.guard.model,
            units=self.units,
            state=self.guard.state,
            batch=Batch(micro_batch=self.batch.micro_batch // self.splits),
            micro_batches=self.batch.micro_batches_per_replica(self.topology.contexts) * self.splits,
            recompute=self.guard.recompute,
            sequence_parallel=self.guard.sequence_parallel,
            activation=self.guard.activation,
            cp=self.topology.cp,
        )

    def load(self, surviving: SurvivingReplicas, replica: int) -> GroupLoad:
        """What the losses of others are to a replica that trains."""
        return load_of(surviving, replica, self.units.experts_of_slot)

    def surviving(self, lost: frozenset[Slot]) -> SurvivingReplicas:
        width = self.policy.min_tp_width
        placement = None if self.layers is None else place_layers(self.topology, lost, width, self.layers)
        return SurvivingReplicas(topology=self.topology, lost=lost, min_tp_width=width, placement=placement)

    def segments(self, surviving: SurvivingReplicas) -> ModelUnits:
        """The units of each segment; of each stage, if no layer may move."""
        if surviving.placement is None:
            return self.units
        assert self.layers is not None, "only then is there a placement"
        return (self.layer_units or self.layers.units).cut(surviving.placement.segments)

    def segments_of(self, surviving: SurvivingReplicas, slot: Slot) -> Mapping[int, StageUnits]:
        """The units of each segment that a slot's stage has."""
        segments = self.segments(surviving).stages
        return {number: segments[number] for number in surviving.segments_of(slot.replica, slot.stage)}

    def stage_units(self, surviving: SurvivingReplicas, replica: int, stage: int) -> StageUnits:
        """The units of a stage of a replica."""
        if surviving.placement is None:
            return self.units.stages[stage]
        return StageUnits.joined(self.segments_of(surviving, Slot(replica=replica, stage=stage, tp=0)).values())

    def stages(self, surviving: SurvivingReplicas, replica: int) -> list[tuple[StageUnits, Pattern]]:
        """The units and the pattern of each stage that a replica has."""
        segments = self.segments(surviving).stages
        return [
            (
                StageUnits.joined(segments[number] for number in surviving.segments_of(replica, stage)),
                surviving.pattern(replica, stage),
            )
            for stage in surviving.stages(replica)
        ]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroupChange:
    """A stage of a replica whose pattern changes, and the memory of its fullest slot before and after."""

    replica: int
    stage: int
    before: Pattern
    after: Pattern
    memory_before: MemoryUse
    memory_after: MemoryUse


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecoveryPlan:
    """The actions of every survivor after a loss or a return. Attributes that are not listed here are private.

    Attributes:
        lost_before: The slots that were lost before.
        lost: The slots that are lost now.
        degraded: The replicas that continue narrower.
        dropped: The replicas that do not continue.
        idle: The living slots of dropped replicas.
        groups: The stages of surviving replicas whose pattern or state changes.
        expert_groups: The expert groups that go on with other slots than before.
        batch: How many micro-batches each replica computes; with context parallelism, each context group.
    """

    nominal: Nominal
    lost_before: tuple[Slot, ...]
    lost: tuple[Slot, ...]
    empty: tuple[Slot, ...]
    degraded: tuple[int, ...]
    dropped: tuple[int, ...]
    idle: tuple[Slot, ...]
    groups: tuple[GroupChange, ...]
    expert_groups: tuple[ExpertGroupChange, ...]
    routes: tuple[SegmentRoute, ...]
    batch: BatchSplit
    transfers: tuple[Transfer, ...]
    block_deals: tuple[BlockDeal, ...]
    resettled_copies: tuple[Resettled, ...] | tuple[ParityGroup, ...]

    def runs(self, context: int, batch: BatchSplit | None = None) -> int:
        """How many micro-batches a replica runs, or a context group: as many as all that send tokens to the same
        experts. Those beyond its own are padding, and weigh nothing.

        Args:
            context: The replica; with context parallelism, the context group.
            batch: The batch of the step, if it is not that of the plan.
        """
        topology, shares = self.nominal.topology, (self.batch if batch is None else batch).shares
        if not topology.expert_slots:
            return next(share.count for share in shares if share.replica == context)
        beside = {topology.context_of(replica) for replica in replicas_in_step(topology, context * topology.cp)}
        return max(share.count for share in shares if share.replica in beside)

    def split_of(self, global_batch: int) -> BatchSplit:
        """Split a global batch of any size in the layout of this plan; memory was planned for the nominal size.

        Paces follow from the widths, and nothing is owed.
        """
        nominal, surviving = self.nominal, self.nominal.surviving(frozenset(self.lost))
        paces = replica_paces(nominal, surviving, {}, _splits(nominal, surviving))
        return split_batch(paces, nominal_batch(nominal, global_batch), nominal.policy.batch)

    @functools.cached_property
    def digest(self) -> str:
        """Equal on every rank that computed the same plan, different otherwise."""
        return hashlib.blake2b(as_json((FORMAT, self)).encode(), digest_size=16).hexdigest()


def plan_recovery(
    nominal: Nominal,
    *,
    lost: frozenset[Slot],
    lost_before: frozenset[Slot] = frozenset(),
    empty: frozenset[Slot] = frozenset(),
    owed: int = 0,
    measured: Mapping[int, ReplicaPace] | None = None,
) -> RecoveryPlan:
    """Plan the change from the losses `lost_before` to the losses `lost`.

    The `empty` slots contain new processes that hold nothing; those that are not in `lost_before` were replaced before
    the others could plan without them.
    `measured` gives the pace of replicas that were timed in the new layout; the others' follows from their widths.
    """
    units, policy = nominal.units, nominal.policy
    before, after = nominal.surviving(lost_before), nominal.surviving(lost)
    after.require_a_replica()
    before.require_a_replica()
    groups = _group_changes(nominal, before, after)
    splits = _splits(nominal, after)
    copies_before, resettled = _copies(nominal, before)[0], _copies(nominal, after)[1]
    change = Change(
        before=before,
        after=after,
        units=units,
        state=nominal.state,
        copies=copies_before if policy.copies.count else None,
        protect_all=policy.copies.protect == "all",
        empty=empty,
    )
    return RecoveryPlan(
        nominal=nominal,
        lost_before=tuple(sorted(lost_before)),
        lost=tuple(sorted(lost)),
        empty=tuple(sorted(empty)),
        degraded=tuple(sorted(after.degraded_replicas)),
        dropped=tuple(sorted(after.dropped)),
        idle=tuple(after.idle()),
        groups=groups,
        expert_groups=plan_expert_groups(change),
        routes=tuple(
            plan_route(
                after,
                stage_units,
                stage,
                wanted=policy.route,
                gradient_bytes=nominal.state.gradient_bytes,
                hardware=nominal.hardware,
            )
            for stage, stage_units in enumerate(nominal.segments(after).stages)
        ),
        batch=split_batch(
            replica_paces(nominal, after, measured or {}, splits), nominal_batch(nominal), policy.batch, owed=owed
        ),
        transfers=plan_transfers(change),
        block_deals=plan_block_deals(change),
        resettled_copies=resettled,
    )


def _copies(
    nominal: Nominal, surviving: SurvivingReplicas
) -> tuple[Placement | ParityGroups, tuple[Resettled, ...] | tuple[ParityGroup, ...]]:
    """Place the copies, or parities; the second value lists those that are not at their nominal place."""
    topology, policy = nominal.topology, nominal.policy.copies
    if policy.sharers:
        parities = share_parities(topology, policy, surviving.lost_nodes)
        groups = (group for turn in sorted(parities.resettled) for group in parities.resettled[turn])
        return parities, tuple(groups)
    placement = place_copies(topology, policy, surviving.lost_nodes)
    return placement, tuple(placement.resettled[key] for key in sorted(placement.resettled))


def replica_paces(
    nominal: Nominal, surviving: SurvivingReplicas, measured: Mapping[int, ReplicaPace], splits: Mapping[int, int]
) -> dict[int, ReplicaPace]:
    """The pace of every surviving replica, as measured or by its widest slots; `splits` applies to some of them. With
    context parallelism, that of every context group."""
    topology = nominal.topology
    whole = ReplicaPace(ns=HEALTHY_NS, splits=nominal.splits)
    paces = dict.fromkeys(surviving.replicas, whole)
    known: dict[tuple[object, ...], int] = {}  # replicas that have lost the same are as fast
    for replica in surviving.degraded_replicas:
        cut = None if surviving.placement is None else surviving.placement.cut(replica)
        alike = cut, *(surviving.pattern(replica, stage) for stage in range(topology.pp))
        if alike not in known:
            known[alike] = micro_batch_ns(nominal.units, topology.tp, nominal.stages(surviving, replica))
        ns = known[alike]
        without = topology.pp - len(surviving.stages(replica))
        paces[replica] = ReplicaPace(ns=ns, splits=nominal.splits, without=without)
    for living in _short_of_replicas(surviving):
        load, whole_stages = nominal.load(surviving, living[0]), [(stage, WHOLE) for stage in nominal.units.stages]
        ns = micro_batch_ns(nominal.units, topology.tp, whole_stages, load=load)
        paces |= dict.fromkeys(living, ReplicaPace(ns=ns, splits=nominal.splits))
    paces |= {replica: measured[replica] for replica in surviving.replicas if replica in measured}
    members: defaultdict[int, list[ReplicaPace]] = defaultdict(list)
    for replica, pace in paces.items():
        members[topology.context_of(replica)].append(pace.cut(splits.get(replica, 1)))
    return {context: max(theirs) for context, theirs in members.items()}


def _short_of_replicas(surviving: SurvivingReplicas) -> list[list[int]]:
    """The surviving replicas of context groups and expert groups that have lost others, group by group."""
    return [] if surviving.topology.narrows else _in_step(surviving, surviving.dropped)


def _in_step(surviving: SurvivingReplicas, replicas: Collection[int] | None = None) -> list[list[int]]:
    """The surviving replicas that wait for each other, group by group; those beside these replicas, or all."""
    topology, wanted = surviving.topology, surviving.replicas if replicas is None else replicas
    firsts = sorted({replicas_in_step(topology, replica).start for replica in wanted})
    found = [[one for one in replicas_in_step(topology, first) if one not in surviving.dropped] for first in firsts]
    return [living for living in found if living]


def split_among(nominal: Nominal, replicas: Collection[int]) -> BatchSplit:
    """Split the batch among these replicas alone, at full width."""
    topology = nominal.topology
    others = [(replica, stage) for replica in range(topology.dp) for stage in range(topology.pp)]
    left_out = (slot for replica, stage in others if replica not in replicas for slot in topology.group(replica, stage))
    surviving = nominal.surviving(frozenset(left_out))
    return split_batch(replica_paces(nominal, surviving, {}, {}), nominal_batch(nominal), nominal.policy.batch)


def nominal_batch(nominal: Nominal, global_batch: int | None = None) -> NominalBatch:
    """Return the global batch as full-width replicas would share it out; `global_batch` if it is not the nominal
    one."""
    batch = nominal.batch if global_batch is None else dataclasses.replace(nominal.batch, global_batch=global_batch)
    return NominalBatch(
        replicas=nominal.topology.contexts,
        per_replica=batch.micro_batches_per_replica(nominal.topology.contexts),
        micro_batch=batch.micro_batch,
        stages=nominal.topology.pp,
        healthy_ns=HEALTHY_NS,
    )


def _group_changes(nominal: Nominal, before: SurvivingReplicas, after: SurvivingReplicas) -> tuple[GroupChange, ...]:
    returned = before.dropped - after.dropped
    groups = {
        group
        for group in {*before.patterns, *after.patterns}
        if group[0] not in after.dropped and (before.pattern(*group) != after.pattern(*group) or group[0] in returned)
    }
    return tuple(
        GroupChange(
            replica=replica,
            stage=stage,
            before=before.pattern(replica, stage),
            after=after.pattern(replica, stage),
            memory_before=_memory(
                nominal, before, replica, stage, WHOLE if replica in returned else before.pattern(replica, stage)
            ),
            memory_after=_memory(nominal, after, replica, stage, after.pattern(replica, stage)),
        )
        for replica, stage in sorted(groups)
    )


def _memory(nominal: Nominal, surviving: SurvivingReplicas, replica: int, stage: int, pattern: Pattern) -> MemoryUse:
    return memory_use(
        nominal.stage_units(surviving, replica, stage),
        nominal.topology.tp,
        pattern,
        nominal.state,
        replicas=len(surviving.replicas),
        packing=any(surviving.patterns_of_segment(number) for number in surviving.segments_of(replica, stage)),
    )


def fullest_memory(nominal: Nominal, lost: frozenset[Slot] = frozenset()) -> MemoryUse:
    """Return the memory of the fullest slot that trains, without activations, once these slots are lost."""
    surviving = nominal.surviving(lost)
    uses = [
        memory_use(
            units,
            nominal.topology.tp,
            pattern,
            nominal.state,
            replicas=len(surviving.replicas),
            packing=bool(lost),
            load=load,
        )
        for load in {nominal.load(surviving, living[0]) for living in _in_step(surviving)}
        for stage, units in enumerate(nominal.units.stages)
        for pattern in (WHOLE, *surviving.patterns_of_segment(stage))
    ]
    return max(uses, key=lambda use: use.total)


def within_memory(nominal: Nominal) -> Nominal:
    """Return the job with a minimum width at which every replica fits into memory; called before any slot is lost.

    Refuses a limit that the nominal layout exceeds as it is.
    """
    if nominal.guard is None:
        return nominal
    training, limit = nominal.training, nominal.guard.limit
    fit_groups(training, nominal.surviving(frozenset()), limit=limit, rungs=(AS_IS,))
    width = narrowest(
        training,
        nominal.topology,
        limit=limit,
        min_tp_width=nominal.policy.min_tp_width,
        rungs=nominal.guard.rungs,
    )
    return dataclasses.replace(nominal, policy=dataclasses.replace(nominal.policy, min_tp_width=width))


def _splits(nominal: Nominal, surviving: SurvivingReplicas) -> Mapping[int, int]:
    """Replica -> number of splits of a micro-batch so that all its stages fit; refuses if none fits."""
    guard = nominal.guard
    if guard is None:
        return {}
    stages = range(nominal.topology.pp)
    alike = [list(surviving.replicas)] if nominal.topology.narrows else _in_step(surviving)
    loads: dict[int, GroupLoad] = {}
    for living in alike:
        loads |= dict.fromkeys(living, nominal.load(surviving, living[0]))
    rungs = {
        load: fit_groups(nominal.training, surviving, limit=guard.limit, rungs=guard.rungs, load=load)
        for load in dict.fromkeys(loads.values())
    }
    return {
        replica: max(rungs[load][stage, surviving.pattern(replica, stage)].splits for stage in stages)
        for replica, load in loads.items()
    }


def as_json(value: Any) -> str:
    """Encode a plan or a part of it as one canonical text."""
    return json.dumps(value, default=_plain, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, Slot):
        return str(value)
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise TypeError(f"a plan holds no {type(value).__name__}")
