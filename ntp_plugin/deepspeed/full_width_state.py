"""State that every replica holds in full: compares it, and sends it to joining ranks.

The state is the weights, what is stepped for them, and what the optimizer keeps, so none of it is lost with a replica.
After a change of the membership all ranks compare the digests of what they step, and a joining process receives the
state, tensor by tensor, from a rank that had it. If a replica has several slots, which hold different state, each slot
does this with the slots at the same position in the other replicas.
"""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ntp_plugin.copies import digest
from ntp_plugin.copies.layout import DTYPES, dtype_name
from ntp_plugin.copies.runs import MODULUS
from ntp_plugin.copies.slices import TensorSlice
from ntp_plugin.deepspeed.sharded_weights import shape_of
from ntp_plugin.errors import StateLost
from ntp_plugin.recovery.replica_comparison import ReplicatedState
from ntp_plugin.reduction.stepped import Stepped, parts
from ntp_plugin.training.optimizers import accept_rounding_by_place, kept_by, refuse_unknown_state


class Lanes(Protocol):
    """Which ranks hold the same state."""

    lane: dist.ProcessGroup | None
    """The ranks that hold what this one holds; None for all."""

    @property
    def lanes_apart(self) -> int:
        """The number of lanes, which hold different state."""

    def named(self, name: str) -> str:
        """Return a name that is unique per lane."""


class FullWidthState:
    """One rank's state in a job without ZeRO."""

    def __init__(self, engine: Any, lanes: Lanes) -> None:
        self._engine, self._lanes = engine, lanes
        accept_rounding_by_place(engine.basic_optimizer)
        known = kept_by(engine.basic_optimizer)
        for name, parameter in self._steps():
            refuse_unknown_state(known, name, parameter, engine.basic_optimizer.state.get(parameter, {}))

    def _steps(self) -> Iterator[tuple[str, torch.Tensor]]:
        names = {id(parameter): name for name, parameter in self._engine.module.named_parameters()}
        for number, group in enumerate(self._engine.basic_optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                yield names.get(id(parameter), f"group {number}, parameter {place}"), parameter

    # ------------------------------------------------ for joining ranks

    @torch.no_grad()
    def hand_over(self, giver: int, *, joiner: bool) -> None:
        """Send all of it from the rank `giver` to the joining ranks; all members take part, each with the giver of its
        lane."""
        lane = self._lanes.lane
        described: list[Any] = [self._described() if dist.get_rank() == giver else None]
        dist.broadcast_object_list(described, src=giver, group=lane)
        if joiner:
            self._make_room(described[0])
        hand_over(self._tensors(described[0]), giver, joiner=joiner, lane=lane)

    def _described(self) -> list[dict[str, Any]]:
        """Return what the optimizer keeps, parameter by parameter: a dtype for tensors of its shape, else the value."""
        cut, found = kept_by(self._engine.basic_optimizer).cut, []
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
        """Yield all tensors, in the same order on all ranks."""
        for tensor in (*self._engine.module.parameters(), *self._engine.module.buffers()):
            yield tensor.data
        for (_, parameter), kept in zip(self._steps(), described, strict=True):
            yield parameter.data
            for name, value in kept.items():
                if isinstance(value, str):
                    yield self._engine.basic_optimizer.state[parameter][name]

    # ------------------------------------------------ compared

    def replicated_state(self, of: str) -> ReplicatedState:
        """Yield what every replica holds, in the replica `of`: what is stepped, and what the optimizer keeps for it."""
        for part in parts(self._stepped(), self._engine.basic_optimizer):
            yield part.tensor_slice.tensor, "", dataclasses.replace(part.tensor_slice, whole=of), part.values

    def compare(self, slots: tuple[int, ...], step: int) -> None:
        """Raise `StateLost` unless all members hold the same, bit for bit; all take part. Each sends the sum of its
        digests, and all digests only if a sum differs."""
        digests, of_each = self._digests(), len(slots) // self._lanes.lanes_apart
        sums = [0] * len(slots)
        dist.all_gather_object(sums, sum(digests.values()) % MODULUS)
        if set(Counter(sums).values()) == {of_each}:
            return
        gathered: list[Mapping[str, int]] = [{}] * len(slots)
        dist.all_gather_object(gathered, digests)
        by_name = defaultdict[str, dict[int, int]](dict)
        for slot, mine in zip(slots, gathered, strict=True):
            for name, number in mine.items():
                by_name[name][slot] = number
        wrong = [name for name, one in sorted(by_name.items()) if len(one) < of_each or len(set(one.values())) > 1]
        if wrong:
            named = ", ".join(f"slot {slot} {number:016x}" for slot, number in by_name[wrong[0]].items())
            raise StateLost(
                f"after the recovery the members hold different state of step {step}, in {len(wrong)} tensors; the"
                f" first is {wrong[0]}: {named}",
                fix="restart from the last checkpoint",
            )

    def _digests(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for part in parts(self._stepped(), self._engine.basic_optimizer):
            salts = [f"{part.tensor_slice.tensor} {name}" for name in part.values]
            numbers = digest.digests(list(part.values.values()), part.tensor_slice.runs, salts=salts)
            names = [f"{part.tensor_slice.tensor} ({name})" for name in part.values]
            found |= dict(zip(names, numbers, strict=True))
        return found

    def _stepped(self) -> list[Stepped]:
        return [
            Stepped(parameter=parameter, tensor_slices=((whole(self._lanes.named(name), parameter), 0),))
            for name, parameter in self._steps()
        ]


@torch.no_grad()
def hand_over(
    tensors: Iterable[torch.Tensor], giver: int, *, joiner: bool, lane: dist.ProcessGroup | None = None
) -> None:
    """Send tensors from the rank `giver` to the joining ranks; all members take part, and the others keep theirs."""
    for tensor in tensors:
        value = tensor if joiner or dist.get_rank() == giver else torch.empty_like(tensor)
        value = value.contiguous()
        dist.broadcast(value, src=giver, group=lane)
        if joiner and value.data_ptr() != tensor.data_ptr():
            tensor.copy_(value)


def whole(name: str, tensor: torch.Tensor) -> TensorSlice:
    """Return the slice that is all of a tensor."""
    shape = tuple(shape_of(tensor)) or (1,)
    return TensorSlice(tensor=name, shape=shape, dim=0, ranges=((0, shape[0]),), start=0, stop=math.prod(shape))
