"""Every replica holds everything: weights, what is stepped for them, and what the optimizer keeps.

So nothing is lost with one. After a change of the membership all compare the digests of what they step, and a process
that comes in is handed all of it, tensor by tensor, by one that was there. Where a replica has several slots, which
hold different things, that is done with those of the same place in the others.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ntp_plugin.copies import digest
from ntp_plugin.copies.layout import DTYPES, dtype_name
from ntp_plugin.copies.runs import MODULUS
from ntp_plugin.copies.slices import TensorSlice
from ntp_plugin.errors import StateLost
from ntp_plugin.recovery.replica_comparison import ReplicatedState
from ntp_plugin.reduction.stepped import Stepped, parts
from ntp_plugin.training.optimizers import element_wise, refuse_unknown_state


class Lanes(Protocol):
    """Which ranks hold the same."""

    lane: dist.ProcessGroup | None
    """Those that hold what this one holds; None for all."""

    @property
    def lanes_apart(self) -> int:
        """That hold different things."""

    def named(self, name: str) -> str:
        """One name for each lane's."""


class FullWidthState:
    """Of a rank, in a job without ZeRO."""

    def __init__(self, engine: Any, lanes: Lanes) -> None:
        self._engine, self._lanes = engine, lanes
        known = element_wise(engine.basic_optimizer)
        for name, parameter in self._steps():
            refuse_unknown_state(known, name, parameter, engine.basic_optimizer.state.get(parameter, {}))

    def _steps(self) -> Iterator[tuple[str, torch.Tensor]]:
        names = {id(parameter): name for name, parameter in self._engine.module.named_parameters()}
        for number, group in enumerate(self._engine.basic_optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                yield names.get(id(parameter), f"group {number}, parameter {place}"), parameter

    # ------------------------------------------------ for who comes in

    @torch.no_grad()
    def hand_over(self, giver: int, *, joiner: bool) -> None:
        """All of it from the rank `giver` to those who have just come; all members come together, each with the giver
        of its lane."""
        lane = self._lanes.lane
        told: list[Any] = [self._described() if dist.get_rank() == giver else None]
        dist.broadcast_object_list(told, src=giver, group=lane)
        if joiner:
            self._make_room(told[0])
        hand_over(self._tensors(told[0]), giver, joiner=joiner, lane=lane)

    def _described(self) -> list[dict[str, Any]]:
        """What the optimizer keeps, parameter by parameter: a type for what has its shape, or a number."""
        cut, found = element_wise(self._engine.basic_optimizer).cut, []
        for _, parameter in self._steps():
            state = self._engine.basic_optimizer.state.get(parameter, {})
            found.append(
                {
                    name: dtype_name(value.dtype) if name in cut and isinstance(value, torch.Tensor) else (value,)
                    for name, value in state.items()
                }
            )
        return found

    def _make_room(self, described: list[dict[str, Any]]) -> None:
        optimizer = self._engine.basic_optimizer
        for (_, parameter), kept in zip(self._steps(), described, strict=True):
            if kept:
                optimizer.state[parameter] = {
                    name: torch.zeros_like(parameter, dtype=DTYPES[value]) if isinstance(value, str) else value[0]
                    for name, value in kept.items()
                }

    def _tensors(self, described: list[dict[str, Any]]) -> Iterator[torch.Tensor]:
        """In the same order everywhere."""
        for tensor in (*self._engine.module.parameters(), *self._engine.module.buffers()):
            yield tensor.data
        for (_, parameter), kept in zip(self._steps(), described, strict=True):
            yield parameter.data
            for name, value in kept.items():
                if isinstance(value, str):
                    yield self._engine.basic_optimizer.state[parameter][name]

    # ------------------------------------------------ compared

    def replicated_state(self, of: str) -> ReplicatedState:
        """What every replica has, this one being `of`: what is stepped, and what the optimizer keeps for it."""
        for part in parts(self._stepped(), self._engine.basic_optimizer):
            yield part.piece.tensor, "", dataclasses.replace(part.piece, whole=of), part.values

    def compare(self, slots: tuple[int, ...], step: int) -> None:
        """Raise unless all members hold the same, bit for bit; they come together. Each tells the sum of its digests,
        and all of them only where somebody's is another."""
        digests, of_each = self._digests(), len(slots) // self._lanes.lanes_apart
        sums = [0] * len(slots)
        dist.all_gather_object(sums, sum(digests.values()) % MODULUS)
        if set(Counter(sums).values()) == {of_each}:
            return
        told: list[Mapping[str, int]] = [{}] * len(slots)
        dist.all_gather_object(told, digests)
        said = defaultdict[str, dict[int, int]](dict)
        for slot, mine in zip(slots, told, strict=True):
            for name, number in mine.items():
                said[name][slot] = number
        wrong = [name for name, one in sorted(said.items()) if len(one) < of_each or len(set(one.values())) > 1]
        if wrong:
            named = ", ".join(f"slot {slot} {number:016x}" for slot, number in said[wrong[0]].items())
            raise StateLost(
                f"after the recovery the members hold different state of step {step}, in {len(wrong)} tensors; the"
                f" first is {wrong[0]}: {named}",
                way_out="restart from the last checkpoint",
            )

    def _digests(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for part in parts(self._stepped(), self._engine.basic_optimizer):
            salts = [f"{part.piece.tensor} {name}" for name in part.values]
            numbers = digest.digests(list(part.values.values()), part.piece.runs, salts=salts)
            names = [f"{part.piece.tensor} ({name})" for name in part.values]
            found |= dict(zip(names, numbers, strict=True))
        return found

    def _stepped(self) -> list[Stepped]:
        return [
            Stepped(parameter=parameter, pieces=((whole(self._lanes.named(name), parameter), 0),))
            for name, parameter in self._steps()
        ]


@torch.no_grad()
def hand_over(
    tensors: Iterable[torch.Tensor], giver: int, *, joiner: bool, lane: dist.ProcessGroup | None = None
) -> None:
    """From the rank `giver` to those who have just come; all members come together, and the others keep theirs."""
    for tensor in tensors:
        value = tensor if joiner or dist.get_rank() == giver else torch.empty_like(tensor)
        value = value.contiguous()
        dist.broadcast(value, src=giver, group=lane)
        if joiner and value.data_ptr() != tensor.data_ptr():
            tensor.copy_(value)


def whole(name: str, tensor: torch.Tensor) -> TensorSlice:
    """All of a tensor."""
    shape = tuple(tensor.shape) or (1,)
    return TensorSlice(tensor=name, shape=shape, dim=0, ranges=((0, shape[0]),), start=0, stop=tensor.numel())
