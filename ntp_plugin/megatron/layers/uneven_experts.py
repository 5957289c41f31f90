"""MoE layers whose slots have any number of experts, from unmodified classes.

A slot nominally has `each` experts, numbered from 0, and a parameter of its own for each tensor of each of them. Where
a slot has another slot's expert of the same number as well, that parameter has its rows too, one expert after the
other. So the model has the same parameters in every layout, and their sizes say what a slot holds. To planning, the
experts of one number are a family, and a parameter is cut along its first dim (`planning/expert_groups.py`).

Layers are built for the nominal number of ranks, since Megatron refuses any that does not divide the experts. In a
group that has lost slots, the layers that multiply get a forward that takes the rows of one expert after the other, and
the dispatcher is `expert_dispatch.py`'s. In all other groups, and when everybody is back, Megatron's own are in place.
"""

import collections
import copy
import functools
import string
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.shared_experts import SharedExpertState

from ntp_plugin.megatron.layers.expert_dispatch import ExpertPlaces, UnevenDispatcher
from ntp_plugin.megatron.layers.uneven_layers import UnevenLayers, set_cut
from ntp_plugin.planning.expert_groups import holdings, in_group
from ntp_plugin.planning.units import Family, Run, Tensor

EXPERTS = "experts"


class NominalGroup:
    """Stands for a process group of nominal size where layers are built, and where they describe what they save."""

    EXPERTS, COLUMNS, ALL = "experts", "columns", "all"

    def __init__(self, role: str, size: int, rank: int) -> None:
        """`role`: whether the group's ranks have different experts, different columns of the same ones, or either."""
        self.role, self._size, self._rank = role, size, rank

    def move_to(self, rank: int) -> None:
        """Be the group as another rank sees it."""
        self._rank = rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class UnevenExperts:
    """Replaces the constructors of Megatron's MoE layers, and what a layer does in a reduced expert group."""

    def __init__(self, layers: UnevenLayers) -> None:
        self._layout, self._args, self._layers = layers.layout, layers.args, layers

    # ------------------------------------------------ constructors

    def layer(self, original: Any) -> Any:
        """`MoELayer.__init__`: built for the nominal group."""

        @functools.wraps(original)
        def init(module: Any, *args: Any, **kwargs: Any) -> None:
            groups = kwargs.get("pg_collection") or get_default_pg_collection()
            original(module, *args, **{**kwargs, "pg_collection": self._as_nominal(groups)})

        return init

    def experts(self, original: Any) -> Any:
        """`TEGroupedMLP.__init__` and `SequentialMLP.__init__`: describe how each parameter is cut."""

        @functools.wraps(original)
        def init(module: Any, *args: Any, **kwargs: Any) -> None:
            with self._layers.as_they_are():
                original(module, *args, **kwargs)
            for number, parameter in numbered(module):
                self._describe(parameter, number, module.num_local_experts)

        return init

    def _as_nominal(self, groups: Any) -> Any:
        if not self._layout.sends_experts_elsewhere:
            return groups
        column_parts, place = _column_parts(self._args), self._layout.expert_place.tp
        nominal = copy.copy(groups)
        of_all = self._layout.topology.expert_slots
        nominal.ep = NominalGroup(NominalGroup.EXPERTS, of_all // column_parts, place // column_parts)
        nominal.expt_tp = NominalGroup(NominalGroup.COLUMNS, column_parts, place % column_parts)
        nominal.tp_ep = NominalGroup(NominalGroup.ALL, of_all, place)
        return nominal

    def _describe(self, parameter: torch.nn.Parameter, number: int, each: int) -> None:
        places, (rows, *rest) = self._layout.topology.expert_slots, parameter.shape
        family = Family(name=f"{EXPERTS} {number} of {each}", units=places, number=number, each=each)
        run = Run(start=0, unit_size=rows)
        set_cut(parameter, Tensor(name="", shape=(places * rows, *rest), family=family.name, runs=(run,)), family)

    # ------------------------------------------------ what the real layers do

    def into(self, chunks: Iterable[torch.nn.Module], built: Iterable[torch.nn.Module], group: Any) -> None:
        """Have the layers of a model work in this layout; `built` is the same model as this layout's layers build it,
        and `group` has the ranks that are left of this rank's expert group."""
        for layer, model in zip(_moe_layers(chunks), _moe_layers(built), strict=True):
            places = self.places(layer.num_local_experts) if self._layout.sends_experts_elsewhere else None
            _have_forward_of(layer.experts, places)
            if places is None:
                layer.token_dispatcher = model.token_dispatcher
            else:
                groups = get_default_pg_collection()
                layer.token_dispatcher = UnevenDispatcher(places, group, config=layer.config, pg_collection=groups)
            if layer.use_shared_expert and layer.shared_expert_overlap:
                layer.shared_experts._overlap_state = SharedExpertState.IDLE  # of a step that was interrupted
                layer.token_dispatcher.set_shared_experts(layer.shared_experts)

    def places(self, each: int) -> ExpertPlaces:
        """Return who has which experts in this rank's group, if a slot nominally has so many."""
        layout, slots = self._layout, self._layout.topology.expert_slots
        families = [Family(name=f"{EXPERTS} {j} of {each}", units=slots, number=j, each=each) for j in range(each)]
        pattern = layout.expert_pattern
        ranks = [place for place in range(slots) if place not in pattern]
        return ExpertPlaces(
            of_ranks=tuple(holdings(families, slots, pattern, place) for place in ranks),
            own=ranks.index(in_group(layout.topology, layout.slot).tp),
            each=each,
            column_parts=_column_parts(self._args),
        )


def _column_parts(args: Any) -> int:
    parts: int = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    return parts


def _moe_layers(chunks: Iterable[torch.nn.Module]) -> list[Any]:
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, MoELayer)]


def numbered(experts: torch.nn.Module) -> Iterator[tuple[int, torch.nn.Parameter]]:
    """Yield the parameters of a slot's experts, each with the number of its expert."""
    for name, parameter in experts.named_parameters():
        if isinstance(experts, SequentialMLP):
            yield int(name.split(".")[1]), parameter
        else:
            yield int(name.rpartition(".")[2].lstrip(string.ascii_letters)), parameter


# ---------------------------------------------------------------- the forward of a reduced group


def _have_forward_of(experts: Any, places: ExpertPlaces | None) -> None:
    """Have the modules of a slot's experts compute for all that it holds, or, without `places`, as Megatron does."""
    layers = [*_multiplying(experts)]
    for module in (experts, *(layer for layer, _ in layers)):
        vars(module).pop("forward", None)
    if places is None:
        return
    if isinstance(experts, TEGroupedMLP):
        for layer, _ in layers:
            layer.forward = functools.partial(_grouped, layer, _rows(places))
    else:
        now, parts = _CurrentPart(), collections.Counter(number for _, number in places.mine)
        for layer, number in layers:
            layer.forward = functools.partial(_single, layer, parts[number], now)
        experts.forward = functools.partial(_sequential, experts, _rows(places), now)


def _multiplying(experts: Any) -> Iterator[tuple[Any, int]]:
    """Yield the layers that multiply, each with the number of its expert."""
    owners = enumerate(experts.local_experts) if isinstance(experts, SequentialMLP) else [(0, experts)]
    for number, owner in owners:
        yield owner.linear_fc1, number
        yield owner.linear_fc2, number


def _rows(places: ExpertPlaces) -> list[tuple[int, int]]:
    """Return the number of each expert of this slot, and which part of that number's parameters it is."""
    found: list[tuple[int, int]] = []
    for _, number in places.mine:
        found.append((number, sum(other == number for other, _ in found)))
    return found


def _part(parameter: torch.Tensor, which: int, rows: int) -> torch.Tensor:
    return parameter.narrow(0, which * rows, rows)


def _grouped(layer: Any, rows: list[tuple[int, int]], x: torch.Tensor, splits: list[int], *_: Any, **__: Any) -> Any:
    """`TEGroupedLinear.forward`, expert by expert."""
    biases = [
        _part(getattr(layer, f"bias{number}"), part, layer.out_features) for number, part in rows if layer.use_bias
    ]
    outputs = [
        torch.nn.functional.linear(tokens, _part(getattr(layer, f"weight{number}"), part, layer.out_features))
        for tokens, (number, part) in zip(torch.split(x, list(splits)), rows, strict=True)
    ]
    if biases and not layer.te_return_bias:
        outputs = [output + bias for output, bias in zip(outputs, biases, strict=True)]
    return torch.cat(outputs), biases if layer.te_return_bias else None


class _CurrentPart:
    """Which part of its parameters an expert computes with."""

    part = 0


def _single(layer: Any, parts: int, now: _CurrentPart, x: torch.Tensor, *_: Any, **__: Any) -> Any:
    """The forward of a layer of one expert, whose parameters have so many parts."""
    bias = _part(layer.bias, now.part, layer.bias.shape[0] // parts) if layer.bias is not None else None
    bias = None if bias is None or not bias.numel() else bias  # TransformerEngine has an empty one
    output = torch.nn.functional.linear(x, _part(layer.weight, now.part, layer.weight.shape[0] // parts))
    return output, bias  # an MLP adds biases itself


def _sequential(
    experts: Any, rows: list[tuple[int, int]], now: _CurrentPart, tokens: torch.Tensor, *counted: torch.Tensor
) -> Any:
    """`SequentialMLP.forward`, with the experts that the slot has."""
    tokens_per_expert, probs = counted
    if experts.config.moe_apply_probs_on_input:
        tokens = (probs.unsqueeze(-1) * tokens).to(tokens.dtype)
        probs = torch.ones_like(probs)
    counts, outputs = tokens_per_expert.tolist(), []
    for (number, part), some, weights in zip(
        rows, torch.split(tokens, counts), torch.split(probs, counts), strict=True
    ):
        now.part = part
        outputs.append(experts.local_experts[number](some, weights)[0])
    return torch.cat(outputs), None
