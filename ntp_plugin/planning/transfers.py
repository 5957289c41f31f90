"""Plans which state moves between two layouts, and from where.

A slot needs the units of its new layout that it did not hold. Each comes, in this order, from

    domain      a living slot of its own group that held them (the scale-up domain's links)
    peer        a living slot of another replica that held them, the next one round the ring of replicas, a different
                one for each part so that no single NIC carries all of it
    far copy    a living host that held a far copy of the lost slot's shard
    near copy   the lost slot's own host, if other slots of it live
    parity      a living host that holds the parity of the lost slot's and others' shards, if the others' hosts live;
                with parities there are no far copies, and near copies come first

and nowhere else: never from a lost slot, nor from a replica that did not train before, nor from an *empty* slot, whose
new process holds nothing yet. Units without a source are `StateLost`. Copies hold what data parallelism does not hold
twice: a slot's part of a sharded optimizer, and everything of a slot without a living peer, or everything if the policy
says so.

A transfer moves `state` (weights with their optimizer state) or, with a sharded optimizer, `weights` alone and
`optimizer` for the blocks that the lost slot held for its units. Block r of every lane belongs to replica r, whose
holder of a unit holds the unit's elements in that block; so the lost slot's blocks follow its units inside the
replica. When a replica is dropped or comes back, its blocks are dealt to, or taken back from, the other members of each
lane (`BlockDeal`), by the same rule.
"""

import bisect
import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator

from ntp_plugin.config.sections import State
from ntp_plugin.errors import StateLost
from ntp_plugin.planning import spans as sp
from ntp_plugin.planning.copy_placement import Placement
from ntp_plugin.planning.dealing import Deal, deal
from ntp_plugin.planning.parity_groups import ParityGroups
from ntp_plugin.planning.shard_layout import lay_out, overlay, slot_elements
from ntp_plugin.planning.spans import Span, Spans
from ntp_plugin.planning.topology import WHOLE, Pattern, Slot, SurvivingReplicas
from ntp_plugin.planning.units import Family, ModelUnits

DOMAIN, PEER, FAR_COPY, NEAR_COPY, PARITY = "domain", "peer", "far copy", "near copy", "parity"
REPLICATED = "replicated"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """Units of one family that `target` receives from `source`, a living slot.

    For a copy, `source` is the slot that reads it from its host's memory and `of` the slot whose shard it is.
    """

    target: Slot
    source: Slot
    origin: str
    what: str
    family: str
    units: Spans
    size: int
    of: Slot | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BlockDeal:
    """The optimizer blocks of one slot of a replica that is dropped or comes back, `size` bytes in all.

    If the replica is dropped, `source` (the slot itself if it lives, else the reader of a copy) deals them to the other
    members of the slot's lanes. If it comes back, those members return them; `source` is None.
    """

    slot: Slot
    source: Slot | None
    origin: str
    size: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """The change from one set of survivors to the next, and the copies made before it (None: copies are off).

    The `empty` slots survive, but hold nothing: what was in them before is lost.
    """

    before: SurvivingReplicas
    after: SurvivingReplicas
    units: ModelUnits
    state: State
    copies: Placement | ParityGroups | None
    protect_all: bool = False
    empty: frozenset[Slot] = frozenset()

    def holds_nothing(self, slot: Slot) -> bool:
        """Return True if a slot that survived before cannot give what it had."""
        return slot in self.after.lost or slot in self.empty


def plan_transfers(change: Change) -> tuple[Transfer, ...]:
    """List all transfers, in a fixed order; raises `StateLost` if something has no source."""
    moves: defaultdict[tuple[Slot, Slot, str, str, str, Slot | None], list[Span]] = defaultdict(list)
    for replica, stage in sorted(_changed_groups(change)):
        for need in _needs(change, replica, stage):
            for source in _sources(change, need):
                moves[need.target, source.slot, source.origin, need.what, need.family, source.of].append(source.span)
    return tuple(
        Transfer(
            target=target,
            source=source,
            origin=origin,
            what=what,
            family=family,
            units=() if family == REPLICATED else sp.union(tuple(spans)),
            size=_bytes(change, target.stage, what, family, spans),
            of=of,
        )
        for (target, source, origin, what, family, of), spans in moves.items()
    )


def plan_block_deals(change: Change) -> tuple[BlockDeal, ...]:
    """List the optimizer blocks that change hands because replicas were dropped or came back."""
    if not change.state.distributed_optimizer:
        return ()
    before, after = change.before, change.after
    deals = []
    for slot, elements in _slots_of(before, after.dropped - before.dropped, change.units):
        source = (slot, PEER) if slot not in after.lost else copy_reader(change, slot)
        if source is None:
            raise _state_lost(change, slot, "optimizer", copied=True, units="its blocks of all tensors")
        size = -(-elements * change.state.optimizer_bytes // len(before.replicas))
        deals.append(BlockDeal(slot=slot, source=source[0], origin=source[1], size=size))
    for slot, elements in _slots_of(after, before.dropped - after.dropped, change.units):
        size = -(-elements * change.state.optimizer_bytes // len(after.replicas))
        deals.append(BlockDeal(slot=slot, source=None, origin=PEER, size=size))
    return tuple(deals)


def _slots_of(surviving: SurvivingReplicas, replicas: frozenset[int], units: ModelUnits) -> Iterator[tuple[Slot, int]]:
    """The living slots of these replicas, each with the number of parameters that it holds."""
    for replica in sorted(replicas):
        for stage, stage_units in enumerate(units.stages):
            pattern = surviving.pattern(replica, stage)
            living = [slot for slot in surviving.topology.group(replica, stage) if slot.tp not in pattern]
            yield from zip(living, slot_elements(stage_units, surviving.topology.tp, pattern), strict=True)


def require_copies(change: Change) -> None:
    """Raise `StateLost` unless a living slot can read a copy of what each newly lost slot held: where layers move, all
    state comes from copies."""
    for slot in sorted(change.after.lost - change.before.lost):
        if copy_reader(change, slot) is None:
            raise _state_lost(change, slot, "state", copied=True, units="all that it held")


def optimizer_blocks(elements: int, replicas: int, dropped: frozenset[int]) -> Deal:
    """Assign the elements of a lane to its members' replicas; dropped replicas' blocks are dealt."""
    survivors = [replica for replica in range(replicas) if replica not in dropped]
    floor, larger = divmod(elements, len(survivors))
    blocks = sp.even_cut(((0, elements),), replicas)
    return deal(blocks, room=dict.fromkeys(survivors, floor), extra=larger)


# ---------------------------------------------------------------- what is needed


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Need:
    """Units that `target` must receive; `holder` is the TP slot of its group that held them (None: none did)."""

    target: Slot
    what: str
    family: str
    span: Span
    holder: int | None


def _changed_groups(change: Change) -> set[tuple[int, int]]:
    """Groups of surviving replicas whose layout or state changes."""
    before, after = change.before, change.after
    groups = {group for group in {*before.patterns, *after.patterns} if before.pattern(*group) != after.pattern(*group)}
    stages = range(after.topology.pp)
    groups |= {(replica, stage) for replica in before.dropped for stage in stages}
    groups |= {(slot.replica, slot.stage) for slot in change.empty}
    return {group for group in groups if group[0] not in after.dropped}


def _needs(change: Change, replica: int, stage: int) -> Iterator[_Need]:
    before, after, units = change.before, change.after, change.units.stages[stage]
    stale = replica in before.dropped
    old, new = before.pattern(replica, stage), after.pattern(replica, stage)
    sharded = change.state.distributed_optimizer
    what = "weights" if sharded else "state"
    for slot in after.topology.group(replica, stage):
        arrives = stale or slot in before.lost or slot in change.empty
        if slot not in after.lost and arrives and units.replicated_elements:
            helper = None if stale else next((tp for tp in _survivors(change, old, replica, stage)), None)
            yield _Need(target=slot, what=what, family=REPLICATED, span=(0, 1), holder=helper)
    for family in units.families:
        for span, held_by, wanted_by in _moved_units(family, after.topology.tp, WHOLE if stale else old, new):
            target, holder = Slot(replica=replica, stage=stage, tp=wanted_by), None if stale else held_by
            if held_by == wanted_by and not stale and target not in change.empty:
                continue
            yield _Need(target=target, what=what, family=family.name, span=span, holder=holder)
            if sharded and not stale:  # a stale replica gets its blocks by a block deal
                yield _Need(target=target, what="optimizer", family=family.name, span=span, holder=holder)


def _moved_units(family: Family, tp: int, old: Pattern, new: Pattern) -> Iterator[tuple[Span, int, int]]:
    """Runs of units with their old and new slot, also cut at nominal boundaries, because the peers change there."""
    for span, (held_by, wanted_by, _) in overlay([lay_out(family, tp, pattern) for pattern in (old, new, WHOLE)]):
        yield span, held_by, wanted_by


def _survivors(change: Change, old: Pattern, replica: int, stage: int) -> list[int]:
    """TP slots of a group with pattern `old` that still hold what they had."""
    group = change.after.topology.group(replica, stage)
    return [slot.tp for slot in group if slot.tp not in old and not change.holds_nothing(slot)]


# ---------------------------------------------------------------- where it comes from


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    slot: Slot
    origin: str
    span: Span
    of: Slot | None = None


def _sources(change: Change, need: _Need) -> Iterator[_Source]:
    """Living sources that together give exactly the needed span."""
    if need.holder is not None:
        holder = dataclasses.replace(need.target, tp=need.holder)
        if not change.holds_nothing(holder):
            yield _Source(slot=holder, origin=DOMAIN, span=need.span)
            return
    missing: Spans = (need.span,)
    if need.what != "optimizer":  # no peer holds the same block of a sharded optimizer
        for found in _peers(change, need):
            yield found
            missing = sp.difference(missing, (found.span,))
    for span in missing:
        yield _from_copy(change, need, span)


def _peers(change: Change, need: _Need) -> Iterator[_Source]:
    """Parts of the span that living slots of other replicas held, until it is complete or no replica is left."""
    before, after, target = change.before, change.after, need.target
    missing: Spans = (need.span,)
    for step in range(after.topology.dp):
        replica = (target.replica + 1 + target.tp + step) % after.topology.dp
        if replica == target.replica or replica in before.dropped:
            continue
        for span, tp in _held_by(change, replica, need):
            slot = Slot(replica=replica, stage=target.stage, tp=tp)
            if change.holds_nothing(slot):
                continue
            for part in sp.intersection(missing, (span,)):
                yield _Source(slot=slot, origin=PEER, span=part)
            missing = sp.difference(missing, (span,))
        if not missing:
            return


def _held_by(change: Change, replica: int, need: _Need) -> Iterator[tuple[Span, int]]:
    """The parts of the needed span and their TP slots in another replica, as they were before."""
    tp, pattern = change.before.topology.tp, change.before.pattern(replica, need.target.stage)
    if need.family == REPLICATED:
        yield from ((need.span, slot) for slot in range(tp) if slot not in pattern)
        return
    family = next(family for family in change.units.stages[need.target.stage].families if family.name == need.family)
    segments = lay_out(family, tp, pattern).segments
    first = bisect.bisect_right(segments, need.span[0], key=lambda segment: segment[1])
    for start, stop, slot in itertools.takewhile(lambda segment: segment[0] < need.span[1], segments[first:]):
        yield (max(start, need.span[0]), min(stop, need.span[1])), slot


def _from_copy(change: Change, need: _Need, span: Span) -> _Source:
    copied = need.what == "optimizer" or change.protect_all or len(change.before.replicas) == 1
    of = need.target if need.holder is None else dataclasses.replace(need.target, tp=need.holder)
    found = copy_reader(change, of) if copied and need.holder is not None else None
    if found is None:
        raise _state_lost(change, of, need.what, copied=copied, units=_described(change, need, span))
    return _Source(slot=found[0], origin=found[1], span=span, of=of)


def copy_reader(change: Change, of: Slot) -> tuple[Slot, str] | None:
    """A living slot on a host with a copy of a slot's shard, and which copy that is."""
    if change.copies is None:
        return None
    home = change.after.topology.node_of(of)
    if isinstance(change.copies, ParityGroups):
        of_hosts = {NEAR_COPY: [home], PARITY: _parity_host(change.copies, of, change.after)}
    else:
        of_hosts = {FAR_COPY: change.copies.holders(home), NEAR_COPY: [home]}
    for origin, nodes in of_hosts.items():
        for node in nodes:
            reader = _reader(change.after, node, of)
            if reader is not None:
                return reader, origin
    return None


def _parity_host(parities: ParityGroups, of: Slot, after: SurvivingReplicas) -> list[int]:
    """The parity host, if all other members' near copies survive; without them the parity is of no use."""
    group, node_of = parities.group_of(of), after.topology.node_of
    if group is None or any(node_of(slot) in after.lost_nodes for slot in group.members if slot != of):
        return []
    return [group.parity_host]


def _reader(after: SurvivingReplicas, node: int, of: Slot) -> Slot | None:
    """A living slot on the host: the one in the place of `of` if it lives, else the first."""
    slots = after.topology.slots_on(node)
    place = after.topology.rank_of(of) % after.topology.gpus_per_node
    return next((slot for slot in [*slots[place : place + 1], *slots] if slot not in after.lost), None)


def _described(change: Change, need: _Need, span: Span) -> str:
    """Name the tensors and units of a need."""
    names = [
        tensor.name
        for tensor, _ in change.units.stages[need.target.stage].tensors
        if tensor.family == ("" if need.family == REPLICATED else need.family)
    ]
    if need.family == REPLICATED:
        return ", ".join(names)
    return f"units {span[0]} to {span[1] - 1} of {need.family} ({', '.join(names)})"


def _state_lost(change: Change, slot: Slot, what: str, *, copied: bool, units: str) -> StateLost:
    thing = {"optimizer": "optimizer state", "weights": "weights", "state": "state"}[what]
    if change.copies is None:
        reason, cure = "copies are off", "set copies.count to 1 or more before the next run"
    elif not copied:
        reason, cure = "its copies hold no weights", 'set copies.protect to "all" before the next run'
    else:
        reason, cure = (
            "the hosts of its copies are lost as well",
            "set copies.far to a wider domain"
            + (", or copies.mode = copy," if isinstance(change.copies, ParityGroups) else "")
            + " before the next run",
        )
    return StateLost(
        f"{thing} of {slot} is held by no living slot, and {reason}; lost are {units}",
        fix=f"restart from the last checkpoint; {cure}",
    )


def _bytes(change: Change, stage: int, what: str, family: str, spans: list[Span]) -> int:
    units, state = change.units.stages[stage], change.state
    if family == REPLICATED:
        elements = units.replicated_elements
    else:
        elements = sp.size(tuple(spans)) * units.elements_per_unit[family]
    if what == "optimizer":
        return -(-elements * state.optimizer_bytes // len(change.before.replicas))
    return elements * (state.weight_bytes + (state.optimizer_bytes if what == "state" else 0))
