"""Describes what an optimizer steps as slices of full tensors, to copy it where it lives, and to restore it.

However a framework shards its optimizer, each parameter of torch's optimizer holds elements of some tensors, one after
the other. Described as tensor slices (`copies/slices.py`), it can be copied, and restored into another layout.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from ntp_plugin.copies.layout import DTYPES, dtype_name
from ntp_plugin.copies.manifest import CopiedSlice
from ntp_plugin.copies.replicator import Part
from ntp_plugin.copies.slices import TensorSlice
from ntp_plugin.errors import Refused
from ntp_plugin.planning.spans import Spans
from ntp_plugin.reduction.sharded_optimizer import LaneShard
from ntp_plugin.training.optimizers import Numbers, kept_by

MAIN = "main"
"""The values that are stepped, beside what the optimizer keeps in their shape."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stepped:
    """One parameter of torch's optimizer: its tensor slices, and where each begins in it, flat."""

    parameter: torch.Tensor
    tensor_slices: tuple[tuple[TensorSlice, int], ...]


type SliceOf = Callable[[str, Spans, int, int], TensorSlice]
"""Returns the slice of a tensor, by its name here: these places of it, and of them the elements from one to another."""


def shards_of_lanes(shards: Iterable[LaneShard], slice_of: SliceOf) -> list[Stepped]:
    """Describe the shards of lanes; every element of the job is in one of these, once."""
    return [
        Stepped(
            parameter=shard.parameter,
            tensor_slices=tuple(
                (slice_of(held.name, held.places, start, stop), at) for held, start, stop, at in shard.holds()
            ),
        )
        for shard in shards
    ]


def parts(stepped: list[Stepped], optimizer: Any) -> list[Part]:
    """The parts to copy, where they live now."""
    known, kept = kept_by(optimizer), Numbers(optimizer)
    found = []
    for one in stepped:
        state = optimizer.state.get(one.parameter, {})
        cut = {key: state[key] for key in known.cut if isinstance(state.get(key), torch.Tensor)}
        numbers = {key: _to_json(value) for key, value in kept.of(one.parameter).items()}
        found += list(_parts(one, {MAIN: one.parameter.data} | cut, numbers))
    return found


def make_room(stepped: list[Stepped], optimizer: Any, kinds: Mapping[str, CopiedSlice]) -> list[Part]:
    """Have the optimizer keep what the copies have for these tensors, and return the parts to fill."""
    kept = Numbers(optimizer)
    optimizer.state.clear()
    kept.forget()
    for one in stepped:
        likes = [_like(tensor_slice, kinds) for tensor_slice, _ in one.tensor_slices]
        if not likes:
            continue
        like = likes[0]
        state = {
            entry.name: torch.zeros_like(one.parameter, dtype=DTYPES[entry.dtype])
            for entry in like.entries
            if entry.name != MAIN
        }
        if state:
            optimizer.state[one.parameter] = state
            _require_numbers(like, kept.required(one.parameter))
        numbers = {key: _from_json(value, one.parameter.device) for key, value in like.numbers.items()}
        kept.put(one.parameter, numbers)
    return parts(stepped, optimizer)


def _like(tensor_slice: TensorSlice, kinds: Mapping[str, CopiedSlice]) -> CopiedSlice:
    like = kinds.get(tensor_slice.tensor)
    if like is None or like.tensor_slice.shape != tensor_slice.shape:
        found = (
            f"have {tensor_slice.tensor} of shape {like.tensor_slice.shape}"
            if like is not None
            else f"have no {tensor_slice.tensor}"
        )
        raise Refused(
            f"the copies {found}, and this model has it of shape {tensor_slice.shape}",
            fix="resume with the model, and the number of stages, of the run that made them",
        )
    return like


def _require_numbers(like: CopiedSlice, of_group: tuple[str, ...]) -> None:
    missing = [key for key in of_group if key not in like.numbers]
    if missing:  # an Adam that counts from zero again would step several times too far
        raise Refused(
            f"the copies of {like.tensor_slice.tensor} lack its optimizer's {', '.join(missing)}: an earlier version of"
            " the plugin made them, or another optimizer",
            fix="restart from the last checkpoint",
        )


def _parts(one: Stepped, values: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> Iterator[Part]:
    for tensor_slice, at in one.tensor_slices:
        flat = {name: _flat(value, at, tensor_slice.size) for name, value in values.items()}
        yield Part(tensor_slice=tensor_slice, values=flat, numbers=numbers)


def _flat(value: torch.Tensor, at: int, size: int) -> torch.Tensor:
    if value.dim() == 1 and size == value.numel():  # most are a shard of their own, and a step has hundreds of them
        return value
    return value.detach().view(-1).narrow(0, at, size)


def _to_json(value: Any) -> Any:
    """The value as JSON has it; a tensor of one number becomes its value, dtype and device."""
    if isinstance(value, torch.Tensor):
        return {"value": value.item(), "dtype": dtype_name(value.dtype), "device": value.device.type}
    return value


def _from_json(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        on = device if value["device"] == device.type else value["device"]
        return torch.tensor(value["value"], dtype=DTYPES[value["dtype"]], device=on)
    return value
