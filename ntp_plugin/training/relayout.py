"""Parameters and optimizer state from one layout to the next, tensor by tensor.

For one tensor a slot has the units that it holds now, those that it will hold, and who sends it what (`Recut`). It
builds the tensor anew beside the old one (`rebuilding.py`). The user's objects stay (`sharded_state.py`).

A death may interrupt the move anywhere, so what is built is not switched to by itself. All members compare digests of
what they have built (`survey`), for a batch of tensors at a time, and who has left that comparison switches. It is the
rule of the vote on a step: who left it knows that all had entered it, so all hold the new tensors built. If anybody
has switched, then whoever has not does so in the next walk (`settle`); if nobody has, then all drop what they built,
and have what they had. So each tensor is always in one layout on all members, and no tensor is without its old units
before all have its new ones.

Every tensor therefore has a *version*: the epoch whose losses its layout follows, the same for all members; -1 is
held by nobody. Versions are reported before each walk, and the plan is made of them.

Memory: what a batch moves with its optimizer entries, twice; nothing else, and a batch is no more than the largest
tensor, or what is little anyhow (`relayout_plan.LEAST`).
"""

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from ntp_plugin.comm.process_groups import ElasticGroups
from ntp_plugin.comm.transfer import exchange
from ntp_plugin.errors import Refused, StateLost
from ntp_plugin.training.rebuilding import Kept, Options, Rebuilding, Survey, compare, compare_kept, survey
from ntp_plugin.training.relayout_plan import RelayoutPlan, TensorMove
from ntp_plugin.training.sharded_state import ShardedState

type Told = dict[str, tuple[str, Survey]]
"""Tensor -> what a member keeps with it, in words, if it will hold a part, and its digests."""


def relayout(plans: Sequence[RelayoutPlan], state: ShardedState, groups: ElasticGroups, *, step: int) -> None:
    """Take every tensor into the layout of its stage's plan, on all members of the world together; they stand on the
    same step."""
    slot = plans[0].nominal.topology.slot_of(groups.slot)
    plan = plans[slot.stage]
    state.settle({move.tensor.name: move.version for move in plan.moves})
    kept = {move.tensor.name: state.kept(move.tensor.name) for move in plan.moves}
    if any(each.somebody_lacks_something for each in plans):
        held = [move.tensor.name for move in plan.moves if slot in move.holders]
        kept |= _kept_by_others({name: kept[name] for name in held}, state, slot.stage)
    for number in range(max(len(each.batches) for each in plans)):
        moves = plan.batches[number] if number < len(plan.batches) else ()
        _move(plan, moves, kept, state=state, groups=groups, step=step)


def refuse_unequal_replicas(plans: Sequence[RelayoutPlan], state: ShardedState, groups: ElasticGroups) -> None:
    """A move to where everything is already, which compares everything."""
    try:
        relayout(plans, state, groups, step=0)
    except StateLost as found:
        raise Refused(
            f"the replicas do not begin alike: {found.what}",
            way_out="have all of them load one checkpoint, or draw their weights from one seed",
        ) from found


def _kept_by_others(held: dict[str, Kept], state: ShardedState, stage: int) -> dict[str, Kept]:
    """For who lacks them; and who is new has its optimizer set as the others have."""
    nothing: tuple[int, dict[str, Kept], Options] = (stage, {}, [])
    told = [nothing] * dist.get_world_size()
    dist.all_gather_object(told, (stage, held, state.options() if held else []))
    of_stage = [(theirs, options) for of, theirs, options in told if of == stage and theirs]
    if state.is_new:  # members have their own: a schedule may have come further on one than on another by now
        state.take_options(of_stage[0][1])
    return {name: one for theirs, _ in of_stage for name, one in theirs.items()} | held


def _move(
    plan: RelayoutPlan,
    moves: Sequence[TensorMove],
    kept: Mapping[str, Kept],
    *,
    state: ShardedState,
    groups: ElasticGroups,
    step: int,
) -> None:
    slot = plan.nominal.topology.slot_of(groups.slot)
    recuts = {move.tensor.name: plan.recut(move, slot) for move in moves}
    under_way = {
        name: Rebuilding.begin(recut, state.entries(name), kept[name].dtypes) for name, recut in recuts.items()
    }
    exchange([parcel for one in under_way.values() for parcel in one.parcels], groups.rank_of)
    mine: Told = {}
    for name, one in under_way.items():
        built = one.end()
        state.build(name, plan.version, built, kept[name].numbers)
        mine[name] = str(kept[name]) if one.recut.after else "", survey(one.recut, one.entries, built, step=step)
    _compare_all(plan, moves, mine, groups=groups, step=step)
    state.switch()


def _compare_all(
    plan: RelayoutPlan, moves: Sequence[TensorMove], mine: Told, *, groups: ElasticGroups, step: int
) -> None:
    told: list[Told] = [{}] * len(groups.members)
    dist.all_gather_object(told, mine)
    stage_of = plan.nominal.topology.slot_of
    stage = {
        slot: theirs for slot, theirs in zip(groups.members, told, strict=True) if stage_of(slot).stage == plan.stage
    }
    for move in moves:
        of_tensor = {slot: theirs[move.tensor.name] for slot, theirs in stage.items()}
        compare_kept(move.tensor, {slot: kept for slot, (kept, _) in of_tensor.items() if kept}, step=step)
        before, after = plan.wholes(move)
        surveys = {slot: found for slot, (_, found) in of_tensor.items()}
        compare(move.tensor, surveys, wholes_before=before, wholes_after=after)
