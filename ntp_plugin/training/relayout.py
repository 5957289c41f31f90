"""Parameters and optimizer state from one layout to the next, tensor by tensor.

For one tensor a slot has the units that it holds now, those that it will hold, and who sends it what (`Recut`). It
builds the tensor anew beside the old one: kept units are copied, the others come from their holders, and the same for
every entry of the optimizer that has the tensor's shape. Entries that are one number are kept. The user's objects
stay: the `nn.Parameter` gets other data, the optimizer's state other entries under the same key.

A death may interrupt the move anywhere, so what is built is not switched to by itself. All members compare digests of
what they have built (`survey`), for a batch of tensors at a time, and who has left that comparison switches. It is the
rule of the vote on a step: who left it knows that all had entered it, so all hold the new tensors built. If anybody
has switched, then whoever has not does so in the next walk (`settle`); if nobody has, then all drop what they built,
and have what they had. So each tensor is always in one layout on all members, and no tensor is without its old units
before all have its new ones.

Every tensor therefore has a *version*: the epoch whose losses its layout follows, the same for all members; -1 is
held by nobody. Versions are reported before each walk, and the plan is made of them.

Memory: what a batch moves with its optimizer entries, twice; nothing else, and a batch is no more than the largest
tensor. Digests are of all tensors, also of those that stay, because everything is to be compared before anybody trains.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ntp_plugin.comm.process_groups import ElasticGroups
from ntp_plugin.comm.transfer import Parcel, exchange
from ntp_plugin.copies import digest
from ntp_plugin.errors import StateLost
from ntp_plugin.planning import spans as sp
from ntp_plugin.planning.spans import Spans
from ntp_plugin.planning.units import Tensor
from ntp_plugin.training.cuts import Recut, global_ranges, local_ranges, local_shape
from ntp_plugin.training.optimizers import element_wise, refuse_unknown_state
from ntp_plugin.training.relayout_plan import NOT_HELD, Held, RelayoutPlan

WEIGHT, MAIN = "weight", "main"
"""The entries that are the parameter itself, and its copy that the optimizer steps, beside those of the optimizer."""

type Entries = dict[str, torch.Tensor]
type Survey = Mapping[str, tuple[int, int]]
"""Entry -> digests of what this member holds of the tensor, before and after."""


# ---------------------------------------------------------------- a tensor is built anew


def _take(tensor: Tensor, part: torch.Tensor, held: Spans, wanted: Spans) -> torch.Tensor:
    pieces = [part.narrow(tensor.dim, start, stop - start) for start, stop in local_ranges(tensor, held, wanted)]
    return torch.cat(pieces, tensor.dim)


def _put(tensor: Tensor, part: torch.Tensor, held: Spans, wanted: Spans, values: torch.Tensor) -> None:
    start = 0
    for first, last in local_ranges(tensor, held, wanted):
        part.narrow(tensor.dim, first, last - first).copy_(values.narrow(tensor.dim, start, last - first))
        start += last - first


def rebuild(
    recut: Recut, entries: Entries, dtypes: Mapping[str, torch.dtype], rank_of: Callable[[int], int]
) -> Entries:
    """The new part of every entry, in the order of `dtypes`; the old ones stay as they are."""
    tensor = recut.tensor
    parcels, arriving = [], []
    for name, dtype in dtypes.items():
        for piece in recut.outgoing:
            values = _take(tensor, entries[name], recut.before, piece.units)
            parcels.append(Parcel(peer=piece.peer, tensor=values, arriving=False))
        for piece in recut.incoming:
            values = torch.empty(local_shape(tensor, piece.units), dtype=dtype)
            parcels.append(Parcel(peer=piece.peer, tensor=values, arriving=True))
            arriving.append((name, piece.units, values))
    exchange(parcels, rank_of)
    if recut.before == recut.after and not arriving:
        return entries
    built = {name: torch.empty(local_shape(tensor, recut.after), dtype=dtype) for name, dtype in dtypes.items()}
    kept = sp.intersection(sp.union(recut.before), sp.union(recut.after))
    for name, new in built.items() if kept else ():
        _put(tensor, new, recut.after, kept, _take(tensor, entries[name], recut.before, kept))
    for name, units, values in arriving:
        _put(tensor, built[name], recut.after, units, values)
    return built


def survey(recut: Recut, before: Entries, after: Entries, dtypes: Mapping[str, torch.dtype], *, step: int) -> Survey:
    """What this member has to compare with the others before anybody switches."""
    tensor = recut.tensor
    told = {}
    for name in dtypes:
        count = functools.partial(
            digest.digest, salt=f"{tensor.name} {name} {step}", shape=tensor.shape, dim=tensor.dim
        )
        new = count(after[name], index=_index(tensor, recut.after)) if recut.after else 0
        same = before is after
        old = new if same else count(before[name], index=_index(tensor, recut.before)) if recut.before else 0
        told[name] = (old, new)
    return told


def _index(tensor: Tensor, held: Spans) -> torch.Tensor:
    return torch.cat([torch.arange(start, stop) for start, stop in global_ranges(tensor, held)])


def compare(
    tensor: Tensor,
    surveys: Mapping[int, Survey],
    *,
    wholes_before: Sequence[Sequence[int]],
    wholes_after: Sequence[Sequence[int]],
) -> None:
    """Raise unless all digests of a tensor are one number: that of every whole of it, before the move and after.

    A whole is the slots that together hold each unit once: the slots of a replica or, for a replicated tensor, each
    slot by itself. Before the move only those count that all of its slots have survived.
    """
    for entry in next(iter(surveys.values())):
        counted = [
            (f"{moment} in slots {', '.join(map(str, whole))}", sum(surveys[slot][entry][column] for slot in whole))
            for column, moment, wholes in ((0, "before", wholes_before), (1, "after", wholes_after))
            for whole in wholes
        ]
        if len({number % digest.MODULUS for _, number in counted}) > 1:
            told = "; ".join(f"{where} {number % digest.MODULUS:016x}" for where, number in counted)
            raise StateLost(
                f"{tensor.name} ({entry}) is not the same wherever it is held: {told}",
                way_out="restart from the last checkpoint",
            )


# ---------------------------------------------------------------- the user's objects


class ShardedState:
    """The parameters of this process and their optimizer state, each tensor in the layout of its version."""

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        mains: Mapping[str, torch.nn.Parameter] | None = None,
        newcomer: bool = False,
    ) -> None:
        """`mains` are what the optimizer steps instead of some parameters: copies of more digits."""
        self.parameters, self.optimizer = dict(parameters), optimizer
        self._mains = dict(mains or {})
        self._known = element_wise(optimizer)
        self.versions = dict.fromkeys(self.parameters, NOT_HELD if newcomer else 0)
        self._built: dict[str, tuple[int, Entries]] = {}

    def held(self, lost: Mapping[int, tuple[int, ...]]) -> Held:
        """What is reported before a walk: `lost` are the losses behind the versions."""
        names = list(self.parameters)
        return Held(
            versions=tuple(self.versions.values()),
            built=tuple((names.index(name), version) for name, (version, _) in self._built.items()),
            lost=lost,
        )

    def entries(self, name: str) -> Entries:
        """The parameter and what the optimizer keeps in its shape."""
        state = self._state(name)
        cut = {key: state[key] for key in self._known.cut if isinstance(state.get(key), torch.Tensor)}
        main = {MAIN: self._mains[name].data} if name in self._mains else {}
        return {WEIGHT: self.parameters[name].data} | main | cut

    def _stepped(self, name: str) -> torch.nn.Parameter:
        return self._mains.get(name, self.parameters[name])

    def _state(self, name: str) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.state.get(self._stepped(name), {})
        return state

    def scalars(self, name: str) -> dict[str, object]:
        """What else the optimizer keeps for a parameter: one number each, the same on all slots."""
        cut = self.entries(name)
        return {key: _told(value) for key, value in self._state(name).items() if key not in cut}

    def build(self, name: str, version: int, entries: Entries) -> None:
        """Keep what is to be switched to."""
        self._built[name] = version, entries

    def switch(self) -> None:
        """Let the user's objects have what was built; the old parts are let go of."""
        while self._built:
            name = next(iter(self._built))
            self._switch(name, *self._built[name])
            del self._built[name]

    def _switch(self, name: str, version: int, entries: Entries) -> None:
        parameter = self.parameters[name]
        if entries[WEIGHT].shape != parameter.shape:
            parameter.grad = None
            # While a graph of the interrupted step is alive, in a traceback say, autograd remembers the old shape with
            # the parameter, and forgets it only for another dtype.
            parameter.data = torch.empty(0, dtype=torch.half if parameter.dtype != torch.half else torch.float)
        parameter.data = entries[WEIGHT]
        if MAIN in entries:
            self._mains[name].grad, self._mains[name].data = None, entries[MAIN]
        for key, value in entries.items():
            if key not in (WEIGHT, MAIN):
                self.optimizer.state[self._stepped(name)][key] = value
        self.versions[name] = version

    def settle(self, newest: Mapping[str, int]) -> None:
        """After an interrupted move: switch to what anybody has switched to, and drop what else was built."""
        self._built = {name: built for name, built in self._built.items() if newest[name] == built[0]}
        self.switch()

    @property
    def is_new(self) -> bool:
        """Whether nothing has been held here yet."""
        return set(self.versions.values()) == {NOT_HELD}

    def options(self) -> list[dict[str, object]]:
        """What the optimizer's groups are set to, a learning rate that a schedule has changed say."""
        return [
            {key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups
        ]

    def take_options(self, options: Sequence[Mapping[str, object]]) -> None:
        """Have the groups set as the others have them."""
        for group, wanted in zip(self.optimizer.param_groups, options, strict=True):
            group.update(wanted)

    def take_scalars(self, name: str, scalars: Mapping[str, object]) -> None:
        """What the others' optimizers keep besides the shape."""
        if scalars:
            self.optimizer.state[self._stepped(name)].update({key: _heard(value) for key, value in scalars.items()})

    def refuse_what_cannot_be_cut(self) -> None:
        """Raise unless all that the optimizer keeps is known."""
        for name in self.parameters:
            refuse_unknown_state(self._known, name, self._stepped(name), self._state(name))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Number:
    """A tensor of one number. Tensors are not sent as objects: frameworks change how they are packed."""

    value: float
    dtype: torch.dtype
    device: str


def _told(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return _Number(value=value.item(), dtype=value.dtype, device=value.device.type)
    return value


def _heard(value: object) -> object:
    if isinstance(value, _Number):
        return torch.tensor(value.value, dtype=value.dtype, device=value.device)
    return value


# ---------------------------------------------------------------- the whole move


type Inventory = dict[str, tuple[dict[str, object], dict[str, torch.dtype]]]
"""Tensor -> what its holder's optimizer keeps as numbers, and the entries that are cut with it."""


def relayout(plans: Sequence[RelayoutPlan], state: ShardedState, groups: ElasticGroups, *, step: int) -> None:
    """Take every tensor into the layout of its stage's plan, on all members of the world together; they stand on the
    same step."""
    slot = plans[0].nominal.topology.slot_of(groups.slot)
    plan = plans[slot.stage]
    state.settle({move.tensor.name: move.version for move in plan.moves})
    held = [move.tensor.name for move in plan.moves if slot in move.holders]
    inventory = _share_inventory(state, slot.stage, held, step)
    for number in range(max(len(each.batches) for each in plans)):
        moves = plan.batches[number] if number < len(plan.batches) else ()
        mine: dict[str, Survey] = {}
        for move in moves:
            _, dtypes = inventory[move.tensor.name]
            recut, before = plan.recut(move, slot), state.entries(move.tensor.name)
            after = rebuild(recut, before, dtypes, groups.rank_of)
            state.build(move.tensor.name, plan.version, after)
            mine[move.tensor.name] = survey(recut, before, after, dtypes, step=step)
        told: list[dict[str, Survey]] = [{}] * len(groups.members)
        dist.all_gather_object(told, mine)
        for move in moves:
            of_stage = {
                member: surveys[move.tensor.name]
                for member, surveys in zip(groups.members, told, strict=True)
                if plan.nominal.topology.slot_of(member).stage == slot.stage
            }
            wholes_before, wholes_after = plan.wholes(move)
            compare(move.tensor, of_stage, wholes_before=wholes_before, wholes_after=wholes_after)
        state.switch()
        for move in moves:
            state.take_scalars(move.tensor.name, inventory[move.tensor.name][0])


def _share_inventory(state: ShardedState, stage: int, held: Sequence[str], step: int) -> Inventory:
    """What goes with the tensors and is the same wherever they are held; the optimizer's options likewise."""
    mine: Inventory = {
        name: (state.scalars(name), {key: entry.dtype for key, entry in state.entries(name).items()}) for name in held
    }
    told: list[tuple[int, Inventory, list[dict[str, object]]]] = [(stage, {}, [])] * dist.get_world_size()
    dist.all_gather_object(told, (stage, mine, state.options() if held else []))
    inventory: Inventory = {}
    for theirs in [theirs for of, theirs, _ in told if of == stage]:
        for name, thing in theirs.items():
            if inventory.setdefault(name, thing) != thing:
                raise StateLost(
                    f"the optimizers of two members keep different numbers for {name} at step {step}: "
                    f"{inventory[name]} and {thing}",
                    way_out="restart from the last checkpoint",
                )
    if state.is_new:  # members have their own: a schedule may have come further on one than on another by now
        state.take_options(next(options for of, _, options in told if of == stage and options))
    return inventory
