"""Plans losses that have not happened: which of them a job survives, and where the lost state comes from.

Every loss is planned by the code that a running job plans with (`topology.py`, `transfers.py`, `recovery_plan.py`,
`decision.py`), so the answer is the job's own. Losses of one kind are planned one by one; in a large job some of them,
spread evenly.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from ntp_plugin.config.sections import CopyPolicy
from ntp_plugin.errors import BelowMinimum, Refused, RestartIsBetter
from ntp_plugin.planning.actions import RESTART
from ntp_plugin.planning.copy_placement import Placement, place_copies
from ntp_plugin.planning.decision import decide, in_lines
from ntp_plugin.planning.expert_changes import require_expert_state
from ntp_plugin.planning.parity_groups import ParityGroups, share_parities
from ntp_plugin.planning.recovery_plan import Nominal, RecoveryPlan, plan_recovery
from ntp_plugin.planning.shard_layout import place_elements, slot_elements
from ntp_plugin.planning.topology import WHOLE, Slot, Topology
from ntp_plugin.planning.transfers import DOMAIN, PEER, Change, plan_block_deals, plan_transfers, require_copies

MOST = 48
"""Most losses of one kind that are planned: with more, a large job takes longer than a user waits."""
BUDGET = 65_536
"""Bound on (slots of a loss)^2 x (planned losses of a kind), if that is more than one loss: for each lost slot, all
replicas are asked for its state."""
VERSIONS = 2
"""Versions of a copy that are kept at the same time: the committed one, and the one that is being made."""

OTHER_RANKS, COPIES, NOTHING_MOVES = "other ranks", "copies in memory", "nothing has to move"
"""Where the state of lost slots comes from."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PossibleLoss:
    """Slots that are lost at the same moment."""

    name: str
    slots: frozenset[Slot]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LossKind:
    """All losses of one kind."""

    name: str
    losses: tuple[PossibleLoss, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Survival:
    """How a job gets through the losses of one kind.

    Attributes:
        kind: The kind of loss.
        losses: How many losses of that kind there are.
        planned: How many of them were planned.
        survived: After how many of these the job goes on.
        state_from: Where the state of the lost slots comes from.
        step_time: The time of a step after the first survived loss, in nominal steps; None if the job survives none.
        example: The first loss after which the job ends, else the first loss.
        why: Why the job ends; empty if it survives all.
        fix: What would change that.
        exit_code: The code with which the job ends; 0 if it survives all.
    """

    kind: str
    losses: int
    planned: int
    survived: int
    state_from: tuple[str, ...]
    step_time: float | None
    example: str
    why: str = ""
    fix: str = ""
    exit_code: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CopyMemory:
    """Bytes of host memory that the copies of the fullest rank take.

    Attributes:
        version: One version of what only this rank holds.
        near: The versions of it on its own host.
        far: The versions that its host keeps for a rank of another host, or the parities.
        host: All copies on one host.
    """

    version: int
    near: int
    far: int
    host: int


def kinds_of_loss(topology: Topology) -> Iterator[LossKind]:
    """Yield the kinds of loss that a layout can have, small ones first."""
    groups = [topology.group(replica, stage) for replica in range(topology.dp) for stage in range(topology.pp)]
    yield _kind("any one slot", ([slot] for group in groups for slot in group))
    if topology.tp > 2:
        pairs = ([group[at - 1], group[at]] for group in groups for at in range(1, topology.tp))
        yield _kind("two slots of one stage of a replica", pairs)
    if topology.tp * topology.pp > 1:
        yield _kind("all slots of a replica", (_replica(topology, replica) for replica in range(topology.dp)))
    if topology.dp > 1 and topology.tp * topology.pp > 1:
        yield _kind("the same slot of all replicas", _same_slots(topology))
    hosts = {f"node{node}": topology.slots_on(node) for node in range(topology.nodes)}
    yield _kind("any one host" if len(hosts) > 1 else "the only host", hosts.values(), names=hosts)
    if len(hosts) > 2:
        neighbours = list(itertools.pairwise(hosts))
        slots = ([*hosts[one], *hosts[other]] for one, other in neighbours)
        yield _kind("two neighbouring hosts", slots, names=map(" and ".join, neighbours))


def survivals(nominal: Nominal, copies: CopyPolicy | None) -> tuple[Survival, ...]:
    """Plan the losses of all kinds.

    Args:
        nominal: The job with nobody lost.
        copies: How the job copies what its ranks hold; None if it makes no copies.

    Raises:
        Refused: The hosts do not suffice for the copies.
    """
    placed = None if copies is None else placed_copies(nominal.topology, copies)
    return tuple(_survival(nominal, placed, kind) for kind in kinds_of_loss(nominal.topology))


def placed_copies(topology: Topology, policy: CopyPolicy, lost_nodes: tuple[int, ...] = ()) -> Placement | ParityGroups:
    """Return where the copies of a job are that has lost these hosts; without far copies, on the own hosts alone."""
    if policy.sharers:
        return share_parities(topology, policy, lost_nodes)
    if policy.mode == "near" or policy.count == 0 or topology.nodes == 1:
        return Placement(nodes=topology.nodes, reach=1, count=0, lost=frozenset(lost_nodes), resettled={})
    return place_copies(topology, policy, lost_nodes)


def copy_memory(nominal: Nominal, policy: CopyPolicy, *, bytes_per_parameter: int) -> CopyMemory:
    """Compute the memory of the copies.

    Args:
        nominal: The job with nobody lost.
        policy: How the job copies what its ranks hold.
        bytes_per_parameter: What the optimizer steps and keeps for one parameter.
    """
    topology = nominal.topology
    sharded, groups = nominal.state.distributed_optimizer, nominal.load(nominal.surviving(frozenset()), 0).expert_groups
    version = max(
        -(-max(slot_elements(units, topology.tp, WHOLE)) * bytes_per_parameter // (topology.dp if sharded else 1))
        - (-max(place_elements(units, WHOLE), default=0) * bytes_per_parameter // (groups if sharded else 1))
        for units in nominal.units.stages
    )
    placed, far = placed_copies(topology, policy), 0
    if isinstance(placed, ParityGroups):
        far = -(-VERSIONS * version // policy.sharers)
    elif placed.count:
        far = VERSIONS * version * placed.count
    ranks = min(topology.gpus_per_node, topology.size)
    return CopyMemory(version=version, near=VERSIONS * version, far=far, host=ranks * (VERSIONS * version + far))


# ---------------------------------------------------------------- the losses


def _kind(name: str, losses: Iterable[Iterable[Slot]], *, names: Iterable[str] = ()) -> LossKind:
    found, labels = [], iter(names)
    for each in losses:
        slots = frozenset(each)
        found.append(PossibleLoss(name=next(labels, "") or _named(slots), slots=slots))
    return LossKind(name=name, losses=tuple(found))


def _named(slots: Iterable[Slot], most: int = 4) -> str:
    listed = [str(slot) for slot in sorted(slots)]
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def _replica(topology: Topology, replica: int) -> list[Slot]:
    return [slot for stage in range(topology.pp) for slot in topology.group(replica, stage)]


def _same_slots(topology: Topology) -> Iterator[list[Slot]]:
    for stage in range(topology.pp):
        for tp in range(topology.tp):
            yield [Slot(replica=replica, stage=stage, tp=tp) for replica in range(topology.dp)]


def _spread(losses: Sequence[PossibleLoss]) -> list[PossibleLoss]:
    """Return the losses that are planned: the first and the last among them, if more than one is."""
    most = max(1, min(MOST, BUDGET // max(len(loss.slots) for loss in losses) ** 2))
    if len(losses) <= most:
        return list(losses)
    return [losses[number * (len(losses) - 1) // max(1, most - 1)] for number in range(most)]


# ---------------------------------------------------------------- what becomes of them


def _survival(nominal: Nominal, copies: Placement | ParityGroups | None, kind: LossKind) -> Survival:
    planned = _spread(kind.losses)
    sources, ends, step_time = set[str](), list[tuple[PossibleLoss, Refused]](), None
    for loss in planned:
        try:
            sources |= _sources(nominal, copies, loss.slots)
            if step_time is None:
                step_time = _step_time(_plan(nominal, loss.slots))
        except Refused as error:
            ends.append((loss, error))
    found = Survival(
        kind=kind.name,
        losses=len(kind.losses),
        planned=len(planned),
        survived=len(planned) - len(ends),
        state_from=tuple(sorted(sources)),
        step_time=step_time,
        example=planned[0].name,
    )
    if not ends:
        return found
    loss, refusal = ends[0]
    return dataclasses.replace(found, example=loss.name, why=refusal.what, fix=refusal.fix, exit_code=refusal.exit_code)


def _sources(nominal: Nominal, copies: Placement | ParityGroups | None, lost: frozenset[Slot]) -> set[str]:
    """Return where state comes from after a loss; raises `Refused` if the job cannot go on."""
    if len(lost) == nominal.topology.size:
        raise BelowMinimum("all ranks are lost", fix="more hosts (--nnodes), and more than one replica")
    after = nominal.surviving(lost)
    after.require_a_replica()
    change = Change(
        before=nominal.surviving(frozenset()),
        after=after,
        units=nominal.units,
        state=nominal.state,
        copies=copies,
        protect_all=copies is not None,  # a job that makes copies copies all that its ranks step
    )
    if nominal.topology.expert_slots:
        require_expert_state(change)
        return {COPIES}
    if not after.is_nominally_cut:
        require_copies(change)
        return {COPIES}
    origins = {move.origin for move in plan_transfers(change)} | {deal.origin for deal in plan_block_deals(change)}
    if not origins:
        return {NOTHING_MOVES}
    from_ranks, from_copies = origins & {DOMAIN, PEER}, origins - {DOMAIN, PEER}
    if from_copies and nominal.state.distributed_optimizer:
        return {COPIES}  # all ranks go back to the step of the copies, weights too
    return ({OTHER_RANKS} if from_ranks else set()) | ({COPIES} if from_copies else set())


def _plan(nominal: Nominal, lost: frozenset[Slot]) -> RecoveryPlan:
    """Plan the layout after a loss; where state comes from is planned elsewhere."""
    without_copies = dataclasses.replace(nominal.policy, copies=CopyPolicy(count=0))
    job = dataclasses.replace(nominal, policy=without_copies)
    plan = plan_recovery(job, lost=lost, lost_before=lost)
    if nominal.policy.actions.restart_s is not None:
        choice = decide(plan)
        if choice.action == RESTART:
            raise RestartIsBetter(
                f"a restart is worth more than going on ({'; '.join(in_lines(choice))})",
                fix="leave actions.restart_s out",
            )
    return plan


def _step_time(plan: RecoveryPlan) -> float:
    return round(plan.batch.step_ns / plan.batch.nominal_ns, 3)
