"""The layers that AutoTP has cut: their units, and what of a layer follows the width of its replica.

AutoTP replaces a model's linear layers by its own. A `LinearLayer` holds some rows of a weight, a `LinearAllreduce`
some columns. AutoTP's own rule decides how small a part may be: the units are the parts of the finest cut that it would
make. That is a key-value head with its queries in attention layers, and a column elsewhere; columns are combined into
granules. Layers with the same number of units get the same layout, so that a pair of them always fits. If AutoTP
gathers a layer's output, the parts must be in order: such a layer belongs to a family that stays contiguous. So does a
vocabulary that is not gathered (`autotp_vocabulary.py`).

A layer asks its group for the number of slots, except for what it counted itself when it was made; and AutoTP writes
into some attention layers how many heads a slot has. `CutLayers.tell` updates both.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.module_inject.layers import (
    LinearAllreduce,
    LinearLayer,
    TensorParallel_Layer,
    VocabParallelLinear,
)
from deepspeed.module_inject.tp_shard import get_shard_size_list
from torch.utils._pytree import tree_map

from ntp_plugin.deepspeed.autotp_vocabulary import LAYERS, CutVocabulary
from ntp_plugin.errors import Refused
from ntp_plugin.planning import spans as sp
from ntp_plugin.planning.shard_layout import lay_out
from ntp_plugin.planning.topology import Pattern
from ntp_plugin.planning.units import Family, ModelUnits, Run, StageUnits, Tensor, default_granule

_FIX = "leave ntp out, or have AutoTP cut this model in rows and columns of linear layers only"
_RECORDS = "ntp_autotp_records"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _ModuleRecord:
    """An attribute that AutoTP has changed in a module: its value before, and the rule by which it was cut."""

    attribute: str
    whole: int
    meta: Any
    name: str


def remembered(original: Any) -> Any:
    """`AutoTP.update_mp_params`."""

    @functools.wraps(original)
    def update(autotp: Any, child: Any, name: Any = None) -> None:
        before = {attribute: value for attribute, value in vars(child).items() if type(value) is int}
        original(autotp, child, name)
        changed = [attribute for attribute, value in before.items() if getattr(child, attribute) != value]
        if changed:
            records = [
                _ModuleRecord(attribute=attribute, whole=before[attribute], meta=autotp.tp_meta, name=str(name))
                for attribute in changed
            ]
            setattr(child, _RECORDS, records)

    return update


@dataclasses.dataclass(frozen=True, kw_only=True)
class CutLayer:
    """One layer that AutoTP has cut."""

    name: str
    module: Any
    family: Family
    unit_size: int

    @property
    def is_column(self) -> bool:
        """Whether each slot computes a part of the output."""
        return isinstance(self.module, LinearLayer)

    @property
    def dim(self) -> int:
        """The dim along which the weight is cut."""
        return 1 if type(self.module) is LinearAllreduce else 0

    @property
    def rows(self) -> int:
        """The number of rows, or columns, of the whole layer."""
        return self.family.units * self.unit_size

    @property
    def run(self) -> Run:
        """Where the units of the layer are."""
        return Run(start=0, unit_size=self.unit_size)

    def sizes(self, tp: int, pattern: Pattern) -> tuple[int, ...]:
        """Return the sizes of the parts of the surviving slots, in order."""
        return _sizes(self.family, self.unit_size, tp, pattern)


class CutLayers:
    """All cut layers of a model, in nominal replicas of `tp` slots."""

    def __init__(self, model: torch.nn.Module, *, tp: int, granule: int | None) -> None:
        self._model, self._tp = model, tp
        modules = [(name, module) for name, module in model.named_modules() if isinstance(module, TensorParallel_Layer)]
        # An embedding that is tied to an output layer is cut like it, by a rule that uses names.
        heads = {id(module.weight): module.name for _, module in modules if type(module) is VocabParallelLinear}
        self._layers = [
            _cut_layer(name, module, heads.get(id(module.weight), module.name), tp, granule) for name, module in modules
        ]
        self._vocabulary = CutVocabulary(model)
        self._counts = [
            (module, record.attribute, *_finest(record.whole, record.meta, record.name, tp, granule))
            for module in model.modules()
            for record in getattr(module, _RECORDS, ())
        ]

    def units(self) -> ModelUnits:
        """Describe the model for planning, in the order in which it names its parameters."""
        cut = {
            id(parameter): (layer, dim)
            for layer in self._layers
            for parameter, dim in (
                (layer.module.weight, layer.dim),
                *([(layer.module.bias, 0)] if layer.module.bias is not None and layer.dim == 0 else []),
            )
        }
        tensors = []
        for name, parameter in self._model.named_parameters():
            layer, dim = cut.get(id(parameter), (None, 0))
            if layer is None:
                tensors.append(Tensor(name=name, shape=tuple(parameter.shape)))
                continue
            shape = list(parameter.shape)
            shape[dim] = layer.rows
            tensors.append(Tensor(name=name, shape=tuple(shape), family=layer.family.name, dim=dim, runs=(layer.run,)))
        families = tuple(dict.fromkeys(layer.family for layer in self._layers))
        return ModelUnits(
            stages=(
                StageUnits(
                    families=families,
                    tensors=tuple((tensor, 1) for tensor in tensors),
                    flops=tuple(
                        2 * sum(tensor.elements_per_unit for tensor in tensors if tensor.family == family.name)
                        for family in families
                    ),
                ),
            )
        )

    def tell(self, place: int, pattern: Pattern) -> None:
        """Set the layers up for a replica without the slots in `pattern`, with this rank at position `place`."""
        for layer in self._layers:
            module, sizes = layer.module, layer.sizes(self._tp, pattern)
            module.tp_world_size = module.world_size = len(sizes)
            module.tp_index = module.rank = place
            module.is_tp_parallel = len(sizes) > 1
            module._partition_sizes = sizes
            if type(module) in LAYERS:
                self._vocabulary.tell(place, sizes, module.weight.device)
        for module, attribute, family, unit in self._counts:
            setattr(module, attribute, _sizes(family, unit, self._tp, pattern)[place])

    # ------------------------------------------------ alone

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Run a forward without the other slots; the output has the right shape and nobody uses it."""
        groups = [layer.module.mp_group for layer in self._layers]
        with contextlib.ExitStack() as hooks:
            for layer in self._layers:
                layer.module.mp_group = None
                if layer.family.contiguous and layer.is_column:  # full width, for a slot that runs alone as well
                    hooks.callback(layer.module.register_forward_hook(functools.partial(_widened, layer)).remove)
                if type(layer.module) is VocabParallelLinear:
                    hooks.enter_context(self._vocabulary.alone(layer.rows, layer.module.weight.device))
            try:
                yield
            finally:
                for layer, group in zip(self._layers, groups, strict=True):
                    layer.module.mp_group = group


def _widened(layer: CutLayer, module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    del module, inputs
    return torch.nn.functional.pad(output, (0, layer.rows - output.shape[-1]))


def without_numbers(output: Any) -> Any:
    """Return the output with all floating-point values NaN, so that nobody takes it for a result."""

    def blank(value: Any) -> Any:
        is_real = isinstance(value, torch.Tensor) and value.is_floating_point()
        return torch.full_like(value, torch.nan) if is_real else value

    return tree_map(blank, output)


def _cut_layer(name: str, module: Any, ruled_as: str | None, tp: int, granule: int | None) -> CutLayer:
    if type(module) not in (LinearLayer, LinearAllreduce, *LAYERS):
        raise Refused(f"{name} is a {type(module).__name__}, which cannot be cut anew after a loss", fix=_FIX)
    size = sum(module._partition_sizes)
    in_order = type(module) in LAYERS or bool(getattr(module, "gather_output", False))
    family, unit = _finest(size, module.tp_meta, str(ruled_as), tp, granule, in_order=in_order)
    layer = CutLayer(name=name, module=module, family=family, unit_size=unit)
    if layer.rows != size or layer.sizes(tp, ()) != tuple(module._partition_sizes):
        raise Refused(
            f"AutoTP has cut {name} in parts of {list(module._partition_sizes)}, which are not {family.units} units of"
            f" {unit} dealt evenly",
            fix="choose an autotp_size (or ntp.granule) that divides them",
        )
    return layer


def _finest(
    size: int, meta: Any, name: str, tp: int, granule: int | None, *, in_order: bool = False
) -> tuple[Family, int]:
    """Return the units of `size` rows, and how many rows each has."""
    unit = _smallest(size, meta, name)
    if unit == 1 and not in_order:
        unit = granule or (1 if size % tp else default_granule(size, tp))
    units = size // unit
    return Family(name=f"{units} in order" if in_order else f"{units}", units=units, contiguous=in_order), unit


def _sizes(family: Family, unit: int, tp: int, pattern: Pattern) -> tuple[int, ...]:
    holdings = lay_out(family, tp, pattern).holdings
    return tuple(sp.size(units) * unit for slot, units in enumerate(holdings) if slot not in pattern)


@functools.cache
def _smallest(size: int, meta: Any, name: str) -> int:
    """Return the smallest part that AutoTP's rule makes of `size` rows, for any number of slots."""
    return int(max(get_shard_size_list(size, size, meta, name)))
