"""Moves parameters and optimizer state from one layout to the next, tensor by tensor.

For one tensor a slot has the units that it holds now, the units that it will hold, and the slots that it sends to and
receives from (`Recut`). It builds the tensor anew beside the old one (`rebuild.py`). The user's objects stay
(`sharded_state.py`).

A loss may interrupt the move anywhere, so a member does not switch to what it has built by itself. All members compare
digests of what they have built (`survey`), for a batch of tensors at a time, and a member that has left that comparison
switches. Each reports sums over its tensors, since there may be thousands of members, and all digests only if sums
differ. The rule is that of the vote on a step: a member that has left it knows that all had entered it, so all have
built the new tensors. If any member has switched, the others switch in the next recovery (`settle`); if none has, all
drop what they built, and keep what they had. So each tensor is always in one layout on all members, and no tensor loses
its old units before all members have its new ones.

Every tensor therefore has a *version*: the epoch whose losses its layout follows, the same for all members; version -1
is not held. Members report versions before each recovery, and the plan is made from them.

Memory: what a batch moves, with its optimizer entries, twice. A batch is no larger than the largest tensor, or than
`reshard_plan.LEAST`.

Weights first: the optimizer's entries are not needed before it steps, and are most of what a returning slot receives:
two thirds with Adam in float32, six sevenths with masters. So a move can be split in two (`relayout_weights`). The
weights are moved, compared, and lent to the parameters, and the others need not wait longer. The rest moves while all
members compute; it is compared and switched to, weights included, before anybody applies the step. A loss in between
finds every tensor still in its old layout, since nothing has been applied: the lent weights are given back, and the
move begins anew. Meanwhile this costs memory for the weights once more, and for what arrives.
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

type TensorReports = dict[str, tuple[str, Survey]]
"""Tensor -> what a member keeps with it, as text, if it will hold a part; and its digests."""
type Brief = tuple[str, list[Sums]]
"""The same in short: a digest of what is kept, and the sums of each kind of tensors."""


def relayout(plans: Sequence[RelayoutPlan], state: ShardedState, groups: ElasticGroups, *, step: int) -> None:
    """Move every tensor to the layout of its stage's plan.

    All members of the world call this together, at the same step.
    """
    for batch in _batches(plans, state, groups, step=step):
        batch.post(batch.entries).end()


def relayout_weights(
    plans: Sequence[RelayoutPlan], state: ShardedState, groups: ElasticGroups, *, step: int
) -> Callable[[], None]:
    """Move the weights alone; the returned function waits for the rest, and switches.

    All members call that function together, before anybody applies a step.
    """
    batches = _batches(plans, state, groups, step=step)
    for batch in batches:
        batch.post({WEIGHT}).lend()
    rest = [batch.post(batch.entries - {WEIGHT}) for batch in batches]

    def have_the_rest() -> None:
        while rest:
            rest.pop(0).end()

    return have_the_rest


def refuse_unequal_replicas(plans: Sequence[RelayoutPlan], state: ShardedState, groups: ElasticGroups) -> None:
    """Raise `Refused` unless all replicas hold the same: plans that move nothing still compare everything."""
    try:
        relayout(plans, state, groups, step=0)
    except StateLost as found:
        raise Refused(
            f"the replicas do not begin alike: {found.what}",
            fix="have all of them load one checkpoint, or draw their weights from one seed",
        ) from found


def _batches(plans: Sequence[RelayoutPlan], state: ShardedState, groups: ElasticGroups, *, step: int) -> list["_Batch"]:
    """The batches of this stage, as many as those of the largest stage, after settling an interrupted move."""
    slot = plans[0].nominal.topology.slot_of(groups.slot)
    plan = plans[slot.stage]
    state.settle({move.tensor.name: move.version for move in plan.moves})
    kept = {move.tensor.name: state.kept(move.tensor.name) for move in plan.moves}
    if any(each.somebody_lacks_something for each in plans):
        shared = {name: kept[name] for name in plan.tensors_reported_by(slot)}
        own = {move.tensor.name: kept[move.tensor.name] for move in plan.moves if slot in move.holders}
        kept |= _kept_by_others(shared, state, slot.stage) | own
    batches = itertools.zip_longest(*(each.batches for each in plans), fillvalue=())
    return [
        _Batch(plans=plans, stage=slot.stage, of_stages=these, kept=kept, state=state, groups=groups, step=step)
        for these in batches
    ]


def _kept_by_others(mine: dict[str, SharedEntries], state: ShardedState, stage: int) -> dict[str, SharedEntries]:
    """What other members keep, for those that lack it; a new member takes the options of its optimizer from them."""
    nothing: tuple[int, dict[str, SharedEntries], Options] = (stage, {}, [])
    gathered = [nothing] * dist.get_world_size()
    dist.all_gather_object(gathered, (stage, mine, state.options() if mine else []))
    of_stage = [(theirs, options) for of, theirs, options in gathered if of == stage and theirs]
    if state.is_new:  # members keep their own, because a schedule may be further on one than on another
        state.take_options(of_stage[0][1])
    return {name: one for theirs, _ in of_stage for name, one in theirs.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Batch:
    """Tensors that move together."""

    plans: Sequence[RelayoutPlan]
    stage: int
    of_stages: Sequence[Sequence[TensorMove]]
    kept: Mapping[str, SharedEntries]
    state: ShardedState
    groups: ElasticGroups
    step: int

    @property
    def plan(self) -> RelayoutPlan:
        """The plan of this rank's stage."""
        return self.plans[self.stage]

    @property
    def moves(self) -> Sequence[TensorMove]:
        """The moves in this rank's stage."""
        return self.of_stages[self.stage]

    @property
    def entries(self) -> set[str]:
        """The names of all entries of its tensors."""
        return {name for move in self.moves for name in self.kept[move.tensor.name].dtypes}

    def post(self, entries: Collection[str]) -> "_UnderWay":
        """Begin to move these entries of every tensor."""
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
    """The part of a batch that is being moved; all members end it together."""

    batch: _Batch
    rebuildings: Mapping[str, Rebuilding]
    exchange: Exchange

    def end(self) -> None:
        """Switch to the new tensors, including weights lent before."""
        batch, state = self.batch, self.batch.state
        built = self._arrived()
        for name, entries in built.items():
            weights = {WEIGHT: state.parameters[name].data}
            state.build(name, batch.plan.version, weights | entries, batch.kept[name].numbers)
        self._compare(built)
        state.switch()

    def lend(self) -> None:
        """Let the parameters have the new weights, before the rest arrives."""
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


def _compare_all(batch: _Batch, mine: TensorReports) -> None:
    """Compare what all members have built; they call this together."""
    kinds = batch.plan.kinds(batch.moves)
    sums = [summed(mine[move.tensor.name][1] for move in kind) for kind in kinds]
    briefs: list[Brief] = [("", [])] * len(batch.groups.members)
    dist.all_gather_object(briefs, (_in_brief(mine), sums))
    by_slot = dict(zip(batch.groups.members, briefs, strict=True))
    if not all(_are_alike(batch, stage, by_slot) for stage in range(len(batch.plans))):
        _compare_each(batch, mine)


def _in_brief(reports: TensorReports) -> str:
    """A digest of what is kept with which tensors; empty if nothing is kept."""
    kept = sorted((name, kept) for name, (kept, _) in reports.items() if kept)
    return hashlib.blake2b(repr(kept).encode(), digest_size=16).hexdigest() if kept else ""


def _are_alike(batch: _Batch, stage: int, briefs: Mapping[int, Brief]) -> bool:
    """Whether a stage's members agree. All members check all stages, because they take the next step together."""
    plan = batch.plans[stage]
    of_stage = _of_stage(plan, briefs)
    if len({kept for kept, _ in of_stage.values() if kept}) > 1:
        return False
    for number, (first, *_) in enumerate(plan.kinds(batch.of_stages[stage])):
        before, after = plan.holder_sets(first)
        sums = {slot: sums[number] for slot, (_, sums) in of_stage.items()}
        if not are_alike(sums, holders_before=before, holders_after=after):
            return False
    return True


def _compare_each(batch: _Batch, mine: TensorReports) -> None:
    gathered: list[TensorReports] = [{}] * len(batch.groups.members)
    dist.all_gather_object(gathered, mine)
    stage = _of_stage(batch.plan, dict(zip(batch.groups.members, gathered, strict=True)))
    for move in batch.moves:
        of_tensor = {slot: theirs[move.tensor.name] for slot, theirs in stage.items()}
        compare_kept(move.tensor, {slot: kept for slot, (kept, _) in of_tensor.items() if kept}, step=batch.step)
        before, after = batch.plan.holder_sets(move)
        surveys = {slot: found for slot, (_, found) in of_tensor.items()}
        compare(move.tensor, surveys, holders_before=before, holders_after=after)


def _of_stage[Value](plan: RelayoutPlan, by_slot: Mapping[int, Value]) -> dict[int, Value]:
    slot_of = plan.nominal.topology.slot_of
    return {slot: theirs for slot, theirs in by_slot.items() if slot_of(slot).stage == plan.stage}
