"""Plans which slot holds which experts, and which slots sum their gradients.

An *expert group* is the slots of a stage that together hold every expert once: Megatron's expert-parallel ranks times
its expert-tensor-parallel ranks, `Topology.expert_slots` of them. They have consecutive ranks: some slots of a replica,
or all slots of several replicas. To planning an expert group is a replica of another layout (`groups_of`), in which its
slots are the TP slots, and a unit is the experts' part that nominally lies in one slot.

The experts of a slot have numbers, 0 to `each` - 1, and those of one number are a family, with a unit for each slot of
the group. The experts of a lost or idle slot are dealt to the others of its group one by one, by the rule for all units
(`dealing.py`). So a slot has at least its own expert of each number, and its tensors grow where it has others.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from fractions import Fraction

from ntp_plugin.config.sections import Model, Parallel
from ntp_plugin.errors import Refused
from ntp_plugin.planning.lanes import UnitsByFamily, plan_lanes
from ntp_plugin.planning.shard_layout import lay_experts_out, lay_out
from ntp_plugin.planning.topology import WHOLE, Pattern, Slot, SurvivingReplicas, Topology
from ntp_plugin.planning.units import Family, ModelUnits, StageUnits, transformer_units


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLane:
    """Experts with one holder in each expert group: their gradients are summed over these slots."""

    stage: int
    members: tuple[Slot, ...]
    units: UnitsByFamily


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroupLoad:
    """What a replica's slots hold and compute because others of its context group and expert group are lost.

    Attributes:
        lost_places: The places of its expert group that hold nothing.
        tokens: The tokens of a micro-batch, against those that a replica nominally has.
        expert_tokens: What the fullest slot computes in its experts, against what it nominally does. Tokens are taken
            to be spread evenly over the experts.
        expert_groups: The expert groups that train.
    """

    lost_places: Pattern = WHOLE
    tokens: Fraction = Fraction(1)
    expert_tokens: Fraction = Fraction(1)
    expert_groups: int = 1


NOMINAL_LOAD = GroupLoad()


def require_whole_groups(topology: Topology) -> None:
    """Raise unless expert groups are parts of replicas, or made of all slots of several."""
    of_group, tp = topology.expert_slots, topology.tp
    if of_group % tp and tp % of_group:
        raise Refused(
            f"an expert group of {of_group} ranks (--expert-model-parallel-size x --expert-tensor-parallel-size) is"
            f" neither a part of a replica's {tp} TP slots nor all slots of several replicas",
            fix=f"choose sizes whose product divides {tp}, or is a multiple of it",
        )
    if topology.dp * tp % of_group:
        raise Refused(
            f"the {topology.dp * tp} ranks of a stage do not make expert groups of {of_group}",
            fix=f"start a multiple of {of_group} ranks for each stage",
        )
    replicas = len(replicas_beside(topology, 0))
    if replicas % topology.cp and topology.cp % replicas:
        raise Refused(
            f"expert groups of {replicas} replicas and context groups of {topology.cp} overlap in part, so replicas of"
            " one context group would run different numbers of micro-batches",
            fix="choose sizes of which one divides the other",
        )


def require_experts_in_all_stages(units: ModelUnits) -> None:
    """Raise if some stages have experts and some have none: Megatron makes an optimizer for experts where any stage has
    some, and a rank that joins later knows its own stage alone."""
    without = [str(number) for number, stage in enumerate(units.stages) if not stage.experts]
    if without:
        raise Refused(
            f"stage {', '.join(without)} of the pipeline has no layer of experts, and others have some",
            fix="a --moe-layer-freq, or --pipeline-model-parallel-layout, that gives each stage one",
        )


def units_of(model: Model, parallel: Parallel, topology: Topology, *, granule: int | None = None) -> ModelUnits:
    """Return the units of a described job; raises unless its experts make whole groups, in every stage."""
    units = transformer_units(
        model,
        tp=parallel.tp,
        pp=parallel.pp,
        ep=parallel.ep,
        etp=parallel.etp,
        granule=granule,
        depths=parallel.depths(model.layers),
    )
    if topology.expert_slots:
        require_whole_groups(topology)
        require_experts_in_all_stages(units)
    return units


def groups_of(surviving: SurvivingReplicas) -> SurvivingReplicas:
    """Return the expert groups of a job as the replicas of a layout: a slot that is lost, or idle, is lost there."""
    topology = surviving.topology
    groups = dataclasses.replace(
        topology,
        tp=topology.expert_slots,
        dp=topology.dp * topology.tp // topology.expert_slots,
        cp=1,
        dp_last=False,
        expert_slots=0,
    )
    without_experts = {*surviving.lost, *surviving.idle()}
    return SurvivingReplicas(
        topology=groups, lost=frozenset(in_group(topology, slot) for slot in without_experts), min_tp_width=1
    )


def in_group(topology: Topology, slot: Slot) -> Slot:
    """Return a slot's place in its expert group: the group is the replica, the place the TP slot."""
    group, place = divmod(slot.replica * topology.tp + slot.tp, topology.expert_slots)
    return Slot(replica=group, stage=slot.stage, tp=place)


def in_job(topology: Topology, place: Slot) -> Slot:
    """Return the slot at a place of an expert group."""
    replica, tp = divmod(place.replica * topology.expert_slots + place.tp, topology.tp)
    return Slot(replica=replica, stage=place.stage, tp=tp)


def alike_in_experts(topology: Topology, slot: Slot) -> list[Slot]:
    """Return the slots that nominally have the same experts, itself included: one of each expert group."""
    place, groups = in_group(topology, slot), topology.dp * topology.tp // topology.expert_slots
    return [in_job(topology, dataclasses.replace(place, replica=group)) for group in range(groups)]


def members(surviving: SurvivingReplicas, group: int, stage: int) -> tuple[Slot, ...]:
    """Return the slots of an expert group that train, in the order of their places."""
    pattern = groups_of(surviving).pattern(group, stage)
    places = (place for place in range(surviving.topology.expert_slots) if place not in pattern)
    return tuple(in_job(surviving.topology, Slot(replica=group, stage=stage, tp=place)) for place in places)


def replicas_beside(topology: Topology, replica: int) -> range:
    """Return the replicas whose slots are in the same expert groups: they compute their micro-batches together."""
    together = max(1, topology.expert_slots // topology.tp)
    first = replica - replica % together
    return range(first, first + together)


def replicas_in_step(topology: Topology, replica: int) -> range:
    """Return the replicas that wait for each other in every layer: they share sequences, or experts."""
    together = max(topology.cp, len(replicas_beside(topology, replica)))
    first = replica - replica % together
    return range(first, first + together)


def load_of(surviving: SurvivingReplicas, replica: int, each: int) -> GroupLoad:
    """Return the load of the replicas that are in step with this one, which all have that of the busiest of them.

    Args:
        surviving: The replicas that train.
        replica: One of them.
        each: How many experts of a layer a slot nominally has; 0 without experts.
    """
    topology = surviving.topology
    living = [other for other in replicas_in_step(topology, replica) if other not in surviving.dropped]
    tokens = max(_tokens(surviving, other) for other in living)
    if not each:
        return GroupLoad(tokens=tokens)
    beside = {replicas_beside(topology, other) for other in living}
    return GroupLoad(
        lost_places=max((_lost_places(surviving, group) for group in beside), key=lambda lost: (len(lost), lost)),
        tokens=tokens,
        expert_tokens=max(_expert_tokens(surviving, group, each) for group in beside),
        expert_groups=living_groups(surviving),
    )


def _tokens(surviving: SurvivingReplicas, replica: int) -> Fraction:
    topology = surviving.topology
    sharing = surviving.sharing(topology.context_of(replica))
    return Fraction(topology.cp, topology.context_degree(len(sharing)))


def _lost_places(surviving: SurvivingReplicas, beside: Iterable[int]) -> Pattern:
    topology = surviving.topology
    lost = (replica for replica in beside if replica in surviving.dropped)
    return tuple(in_group(topology, slot).tp for replica in lost for slot in topology.group(replica, 0))


def _expert_tokens(surviving: SurvivingReplicas, beside: range, each: int) -> Fraction:
    living = [replica for replica in beside if replica not in surviving.dropped]
    tokens = sum((_tokens(surviving, replica) for replica in living), Fraction(0)) / len(beside)
    widest = lay_experts_out(surviving.topology.expert_slots, each, _lost_places(surviving, beside)).widest
    return tokens * Fraction(widest, each)


def living_groups(surviving: SurvivingReplicas) -> int:
    """Return how many expert groups train: each has the state of its experts, or a shard of the optimizer's."""
    topology = surviving.topology
    living = {replicas_beside(topology, replica).start for replica in surviving.replicas}
    return len(living) * max(1, topology.tp // topology.expert_slots)


def holdings(families: Sequence[Family], places: int, pattern: Pattern, place: int) -> tuple[tuple[int, int], ...]:
    """Return the experts of a place of a group with this pattern, as (nominal place, number), in storage order."""
    return tuple(
        (unit, family.number)
        for family in families
        for start, stop in lay_out(family, places, pattern).holdings[place]
        for unit in range(start, stop)
    )


def plan_expert_lanes(surviving: SurvivingReplicas, families: Iterable[Family], stage: int) -> tuple[ExpertLane, ...]:
    """Return the lanes of a stage's experts, in a fixed order."""
    units = StageUnits(families=tuple(families), tensors=(), flops=())
    if not units.families:
        return ()
    groups = groups_of(surviving)
    return tuple(
        ExpertLane(
            stage=stage,
            members=tuple(in_job(surviving.topology, place) for place in lane.members(groups)),
            units=lane.units,
        )
        for lane in plan_lanes(groups, units, stage).lanes
    )
