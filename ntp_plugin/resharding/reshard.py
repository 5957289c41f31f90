"""Parameters and optimizer state from one layout to the next, tensor by tensor.

For one tensor a slot has the units that it holds now, those that it will hold, and who sends it what (`Recut`). It
builds the tensor anew beside the old one (`rebuild.py`). The user's objects stay (`sharded_state.py`).

A death may interrupt the move anywhere, so what is built is not switched to by itself. All members compare digests of
what they have built (`survey`), for a batch of tensors at a time, and who has left that comparison switches. Each tells
sums over its tensors, since there are thousands of members, and all digests only where sums differ. It is the
rule of the vote on a step: who left it knows that all had entered it, so all hold the new tensors built. If anybody
has switched, then whoever has not does so in the next recovery (`settle`); if nobody has, then all drop what they
built, and have what they had. So each tensor is always in one layout on all members, and no tensor is without its old
units before all have its new ones.

Every tensor therefore has a *version*: the epoch whose losses its layout follows, the same for all members; -1 is
held by nobody. Versions are reported before each recovery, and the plan is made of them.

Memory: what a batch moves with its optimizer entries, twice; nothing else, and a batch is no more than the largest
tensor, or what is little anyhow (`relayout_plan.LEAST`).

Weights first. What the optimizer keeps is not asked for before it steps, and is most of what a returning slot gets: two
parts of three with Adam in float32, six of seven with masters. So a move may be had in two halves. The weights are
moved, compared, and lent to the parameters, and the others need not wait longer; the rest is on its way while all of
them compute, and is compared and switched to, weights and all, before anybody applies the step. A loss in between finds
every tensor in its old layout still, since nothing has been applied: what was lent is given back, and the move begins
anew. That costs the weights once more in memory for as long, and what arrives.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

import torch.distributed as dist

from ntp_plugin.errors import Refused, StateLost
from ntp_plugin.groups.exchange import Exchange
from ntp_plugin.groups.process_groups import ElasticGroups
from ntp_plugin.resharding.rebuild import (
    WEIGHT,
    Entries,
    Options,
    Rebuilding,
    SharedEntries,
    Sums,
    Survey,
    are_alike,
    compare,
    compare_kept,
    summed,
    survey,
)
from ntp_plugin.resharding.reshard_plan import RelayoutPlan, TensorMove
from ntp_plugin.resharding.sharded_state import ShardedState

type RecordedEvent = dict[str, tuple[str, Survey]]
"""Tensor -> what a member keeps with it, in words, if it will hold a part, and its digests."""
type Brief = tuple[str, list[Sums]]
"""The same in few words: of what is kept a digest, and of each kind of tensors the sums."""


def relayout(plans: Sequence[RelayoutPlan], state: ShardedState, groups: ElasticGroups, *, step: int) -> None:
    """Take every tensor into the layout of its stage's plan, on all members of the world together; they stand on the
    same step."""
    for batch in _batches(plans, state, groups, step=step):
        batch.post(batch.entries).end()


def relayout_weights(
    plans: Sequence[RelayoutPlan], state: ShardedState, groups: ElasticGroups, *, step: int
) -> Callable[[], None]:
    """The same for the weights alone; what is called before anybody applies a step, by all members together, waits for
    the rest, and switches."""
    batches = _batches(plans, state, groups, step=step)
    for batch in batches:
        batch.post({WEIGHT}).lend()
    rest = [batch.post(batch.entries - {WEIGHT}) for batch in batches]

    def have_the_rest() -> None:
        while rest:
            rest.pop(0).end()

    return have_the_rest


def refuse_unequal_replicas(plans: Sequence[RelayoutPlan], state: ShardedState, groups: ElasticGroups) -> None:
    """A move to where everything is already, which compares everything."""
    try:
        relayout(plans, state, groups, step=0)
    except StateLost as found:
        raise Refused(
            f"the replicas do not begin alike: {found.what}",
            way_out="have all of them load one checkpoint, or draw their weights from one seed",
        ) from found


def _batches(plans: Sequence[RelayoutPlan], state: ShardedState, groups: ElasticGroups, *, step: int) -> list["_Batch"]:
    """Of this stage, as many as of any, with whatever an interrupted move has left settled."""
    slot = plans[0].nominal.topology.slot_of(groups.slot)
    plan = plans[slot.stage]
    state.settle({move.tensor.name: move.version for move in plan.moves})
    kept = {move.tensor.name: state.kept(move.tensor.name) for move in plan.moves}
    if any(each.somebody_lacks_something for each in plans):
        told = {name: kept[name] for name in plan.tensors_told_by(slot)}
        own = {move.tensor.name: kept[move.tensor.name] for move in plan.moves if slot in move.holders}
        kept |= _kept_by_others(told, state, slot.stage) | own
    batches = itertools.zip_longest(*(each.batches for each in plans), fillvalue=())
    return [
        _Batch(plans=plans, stage=slot.stage, of_stages=these, kept=kept, state=state, groups=groups, step=step)
        for these in batches
    ]


def _kept_by_others(mine: dict[str, SharedEntries], state: ShardedState, stage: int) -> dict[str, SharedEntries]:
    """For who lacks them; and who is new has its optimizer set as the others have."""
    nothing: tuple[int, dict[str, SharedEntries], Options] = (stage, {}, [])
    told = [nothing] * dist.get_world_size()
    dist.all_gather_object(told, (stage, mine, state.options() if mine else []))
    of_stage = [(theirs, options) for of, theirs, options in told if of == stage and theirs]
    if state.is_new:  # members have their own: a schedule may have come further on one than on another by now
        state.take_options(of_stage[0][1])
    return {name: one for theirs, _ in of_stage for name, one in theirs.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Batch:
    """Tensors that are moved together."""

    plans: Sequence[RelayoutPlan]
    stage: int
    of_stages: Sequence[Sequence[TensorMove]]
    kept: Mapping[str, SharedEntries]
    state: ShardedState
    groups: ElasticGroups
    step: int

    @property
    def plan(self) -> RelayoutPlan:
        """Of this rank's stage."""
        return self.plans[self.stage]

    @property
    def moves(self) -> Sequence[TensorMove]:
        """In this rank's stage."""
        return self.of_stages[self.stage]

    @property
    def entries(self) -> set[str]:
        """All that its tensors have."""
        return {name for move in self.moves for name in self.kept[move.tensor.name].dtypes}

    def post(self, entries: Collection[str]) -> "_UnderWay":
        """These of every tensor begin to move."""
        slot = self.plan.nominal.topology.slot_of(self.groups.slot)
        rebuildings = {}
        for move in self.moves:
            name = move.tensor.name
            dtypes = {entry: dtype for entry, dtype in self.kept[name].dtypes.items() if entry in entries}
            rebuildings[name] = Rebuilding.begin(self.plan.recut(move, slot), self.state.entries(name), dtypes)
        parcels = [parcel for one in rebuildings.values() for parcel in one.parcels]
        device = next(iter(self.state.parameters.values())).device
        exchange = Exchange(parcels, self.groups.rank_of, device)
        return _UnderWay(batch=self, rebuildings=rebuildings, exchange=exchange)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _UnderWay:
    """What of a batch is on its way; all members come together where it ends."""

    batch: _Batch
    rebuildings: Mapping[str, Rebuilding]
    exchange: Exchange

    def end(self) -> None:
        """Switch to it, and to what was lent before."""
        batch, state = self.batch, self.batch.state
        built = self._arrived()
        for name, entries in built.items():
            weights = {WEIGHT: state.parameters[name].data}
            state.build(name, batch.plan.version, weights | entries, batch.kept[name].numbers)
        self._compare(built)
        state.switch()

    def lend(self) -> None:
        """Let the parameters have it, whatever goes with it."""
        built = self._arrived()
        self._compare(built)
        for name, entries in built.items():
            self.batch.state.lend(name, entries[WEIGHT])

    def _arrived(self) -> dict[str, Entries]:
        self.exchange.wait()
        return {name: one.end() for name, one in self.rebuildings.items()}

    def _compare(self, built: Mapping[str, Entries]) -> None:
        batch, mine = self.batch, dict[str, tuple[str, Survey]]()
        for name, one in self.rebuildings.items():
            kept = str(batch.kept[name]) if one.recut.after else ""
            mine[name] = kept, survey(one.recut, one.entries, built[name], step=batch.step)
        _compare_all(batch, mine)


def _compare_all(batch: _Batch, mine: RecordedEvent) -> None:
    """All members come together."""
    kinds = batch.plan.kinds(batch.moves)
    sums = [summed(mine[move.tensor.name][1] for move in kind) for kind in kinds]
    briefs: list[Brief] = [("", [])] * len(batch.groups.members)
    dist.all_gather_object(briefs, (_in_brief(mine), sums))
    by_slot = dict(zip(batch.groups.members, briefs, strict=True))
    if not all(_are_alike(batch, stage, by_slot) for stage in range(len(batch.plans))):
        _compare_each(batch, mine)


def _in_brief(told: RecordedEvent) -> str:
    """What is kept with which tensors; empty for who keeps nothing."""
    kept = sorted((name, kept) for name, (kept, _) in told.items() if kept)
    return hashlib.blake2b(repr(kept).encode(), digest_size=16).hexdigest() if kept else ""


def _are_alike(batch: _Batch, stage: int, briefs: Mapping[int, Brief]) -> bool:
    """In a stage. All members look at all stages: what they do next they do together."""
    plan = batch.plans[stage]
    of_stage = _of_stage(plan, briefs)
    if len({kept for kept, _ in of_stage.values() if kept}) > 1:
        return False
    for number, (first, *_) in enumerate(plan.kinds(batch.of_stages[stage])):
        before, after = plan.replica_digests(first)
        sums = {slot: sums[number] for slot, (_, sums) in of_stage.items()}
        if not are_alike(sums, replica_digests_before=before, replica_digests_after=after):
            return False
    return True


def _compare_each(batch: _Batch, mine: RecordedEvent) -> None:
    told: list[RecordedEvent] = [{}] * len(batch.groups.members)
    dist.all_gather_object(told, mine)
    stage = _of_stage(batch.plan, dict(zip(batch.groups.members, told, strict=True)))
    for move in batch.moves:
        of_tensor = {slot: theirs[move.tensor.name] for slot, theirs in stage.items()}
        compare_kept(move.tensor, {slot: kept for slot, (kept, _) in of_tensor.items() if kept}, step=batch.step)
        before, after = batch.plan.replica_digests(move)
        surveys = {slot: found for slot, (_, found) in of_tensor.items()}
        compare(move.tensor, surveys, replica_digests_before=before, replica_digests_after=after)


def _of_stage[Value](plan: RelayoutPlan, told: Mapping[int, Value]) -> dict[int, Value]:
    slot_of = plan.nominal.topology.slot_of
    return {slot: theirs for slot, theirs in told.items() if slot_of(slot).stage == plan.stage}
