"""Saves experts that are not spread evenly, in the entries of the nominal layout.

Megatron's entries say which expert of the whole model a parameter is, from the rank's place in its expert group. A slot
that has experts of other slots asks Megatron for the entries of each of these slots, with that part of its parameters,
and joins those of one parameter in a factory, so that an optimizer saves its state through it as well.

All expert groups hold all experts, and exactly one may write each: the groups take turns, expert by expert.

Nobody loads in such a layout: a job with experts begins with full-width replicas.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.transformer.moe.experts import SequentialMLP

from ntp_plugin.megatron.layers.uneven_experts import NominalGroup, UnevenExperts, numbered
from ntp_plugin.megatron.layers.uneven_layers import cut_of
from ntp_plugin.megatron.layout import Layout
from ntp_plugin.planning.expert_groups import groups_of

type Entry = Any

_MARK = "ntp_of_experts"


def is_of_experts(entry: Entry) -> bool:
    """Whether an entry says already who writes it."""
    return bool(getattr(entry, _MARK, False))


class ExpertCheckpoints:
    """Replaces `sharded_state_dict` of Megatron's experts."""

    def __init__(self, layout: Layout, experts: UnevenExperts) -> None:
        self._layout, self._experts = layout, experts

    def entries(self, original: Any) -> Any:
        """`TEGroupedMLP.sharded_state_dict` and `SequentialMLP.sharded_state_dict`."""

        @functools.wraps(original)
        def entries(module: Any, *args: Any, **kwargs: Any) -> dict[str, Entry]:
            found = self._entries(module, functools.partial(original, module, *args, **kwargs))
            for name, entry in found.items():
                number = _number_of(name, module)
                found[name] = marked = dataclasses.replace(entry, replica_id=self._replica(entry.replica_id, number))
                setattr(marked, _MARK, True)
            return found

        return entries

    def _replica(self, replica_id: Any, number: int) -> Any:
        """Return the number of this copy of an expert; that with number 0 is written."""
        groups: Sequence[int] = groups_of(self._layout.surviving).replicas
        return (*replica_id[:-1], (groups.index(self._layout.expert_place.replica) - number) % len(groups))

    def _entries(self, module: Any, as_megatron: Any) -> dict[str, Entry]:
        if not self._layout.sends_experts_elsewhere:
            found: dict[str, Entry] = as_megatron()
            return found
        found = {}
        places = self._experts.places(module.num_local_experts)
        parts: dict[str, list[Entry]] = {}
        whole = dict(module.named_parameters())
        for place in dict.fromkeys(place for place, _ in places.mine):
            held = {number: _rank_among(places.mine, place, number) for at, number in places.mine if at == place}
            with _as_at(module, place, held, column_parts=places.column_parts):
                entries = as_megatron()
            for name, entry in entries.items():
                if _number_of(name, module) not in held:
                    continue
                if _local_name(name, module) in whole:
                    parts.setdefault(name, []).append(entry)
                else:
                    own = place == self._layout.expert_place.tp
                    found[name if own else f"{name} of place {place}"] = entry
        return found | {name: _joined(of, whole[_local_name(name, module)]) for name, of in parts.items()}


def _rank_among(mine: Sequence[tuple[int, int]], place: int, number: int) -> int:
    """Return which part of the parameters of a number an expert is."""
    return [at for at, other in mine if other == number].index(place)


@contextlib.contextmanager
def _as_at(module: Any, place: int, held: dict[int, int], *, column_parts: int) -> Iterator[None]:
    """Have the experts' modules be those of another place, with nominal parameters: the parts that are held."""
    collections = {id(one): one for layer in module.modules() if (one := getattr(layer, "_pg_collection", None))}
    moved = [*_groups_in([*module.modules(), *collections.values()])]
    swapped = []
    for layer in module.modules():
        for name, parameter in list(layer._parameters.items()):
            if parameter is not None:
                swapped.append((layer, name, parameter))
    numbers = {id(parameter): number for number, parameter in numbered(module)}
    before = [(group, group.rank()) for group in moved]
    ranks = {
        NominalGroup.EXPERTS: place // column_parts,
        NominalGroup.COLUMNS: place % column_parts,
        NominalGroup.ALL: place,
    }
    try:
        for group in moved:
            group.move_to(ranks[group.role])
        for layer, name, parameter in swapped:
            number = numbers[id(parameter)]
            rows = _nominal_rows(parameter)
            part = parameter.detach().narrow(0, held.get(number, 0) * rows, rows)
            layer._parameters[name] = torch.nn.Parameter(part, requires_grad=parameter.requires_grad)
        yield
    finally:
        for layer, name, parameter in swapped:
            layer._parameters[name] = parameter
        for group, rank in before:
            group.move_to(rank)


def _nominal_rows(parameter: torch.nn.Parameter) -> int:
    cut = cut_of(parameter)
    assert cut is not None, "the parameters of experts are cut"
    return cut[0].runs[0].unit_size


def _groups_in(owners: Sequence[Any]) -> Iterator[NominalGroup]:
    seen = set[int]()
    for owner in owners:
        for value in vars(owner).values():
            if isinstance(value, NominalGroup) and id(value) not in seen:
                seen.add(id(value))
                yield value


def _joined(parts: Sequence[Entry], whole: torch.nn.Parameter) -> ShardedTensorFactory:
    """Return one entry for a parameter that has several experts, whose entries these are."""
    rows = whole.shape[0] // len(parts)

    def build(key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any) -> list[Any]:
        return [
            _of_part(part, key, data.detach().narrow(0, at * rows, rows), replica_id, flattened_range)
            for at, part in enumerate(parts)
        ]

    def merge(_: Any) -> torch.Tensor:
        raise AssertionError("nobody loads in a degraded layout with experts")

    return ShardedTensorFactory(
        key=parts[0].key, data=whole, build_fn=build, merge_fn=merge, replica_id=parts[0].replica_id
    )


def _of_part(part: Entry, key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any) -> Any:
    if isinstance(part, ShardedTensorFactory):
        return part.build_fn(key, data, replica_id, flattened_range)
    return dataclasses.replace(part, key=key, data=data, dtype=data.dtype, replica_id=replica_id)


def _local_name(name: str, module: Any) -> str:
    """Return the name of a parameter inside of its experts, from that in the model's state."""
    first = "local_experts" if isinstance(module, SequentialMLP) else "linear_fc"
    return name[name.rindex(first) :]


def _number_of(name: str, module: Any) -> int:
    """Return the number of an expert among those of its place, from the name of an entry."""
    local = _local_name(name.partition(" of place ")[0], module)
    if isinstance(module, SequentialMLP):
        return int(local.split(".")[1])
    digits = local[len(local.rstrip("0123456789")) :]
    return int(digits or 0)  # TransformerEngine gives the first of its other entries no number
