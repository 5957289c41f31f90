"""Layers of any width from unmodified classes, and how each parameter is cut.

Megatron's layers divide global sizes by the width of their TP group. Each gets the *virtual* size (what this slot
holds) x (the width), so that the division gives what the slot holds. Attention and MLP get it in a copy of their
configuration, vocabulary layers as the number of rows. The plugin only corrects where Megatron computes the beginning
of a slot's rows.

The types decide which layers these are: `SelfAttention`, `MLASelfAttention` and `MLP`, with the parallel layers inside;
the embedding; a column-parallel layer of `MultiTokenPredictionLayer` itself, which is its projection; and one outside
of all of them with as many rows as the vocabulary, which is the output layer. Any other parallel layer is refused. How
a parameter is cut follows from the attributes that Megatron's layers set on it: parallel or not, along which dim, in
how many runs (`partition_stride`). The plugin stores it as a `planning` tensor in an attribute of its own.

Initial weights: Megatron draws the whole matrix and takes the slot's part. Here the matrix is drawn in its nominal
shape, so that everything that is drawn later is the same too, and the part is made of the slot's units.
"""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, set_tensor_model_parallel_attributes

from ntp_plugin.errors import Refused
from ntp_plugin.megatron.layers.token_prediction import projection_of
from ntp_plugin.megatron.layout import SHARED, Layout
from ntp_plugin.planning import spans as sp
from ntp_plugin.planning.units import (
    ATTENTION,
    MLP,
    VOCABULARY,
    Family,
    Run,
    StageUnits,
    Tensor,
    default_granule,
)

_CUT = "ntp_cut"
"""The attribute of a parameter that says how it is cut."""


class UnevenLayers:
    """Replaces the constructors of Megatron's layers."""

    def __init__(self, layout: Layout, args: Any, *, granule: int | None) -> None:
        self.layout, self.args, self._granule = layout, args, granule
        self._open: Family | None = None
        self._vocabulary: Family | None = None
        self._as_they_are = False
        self._predicts = False

    # ------------------------------------------------ constructors

    def attention(self, original: Any) -> Any:
        """`SelfAttention.__init__`, and `MLASelfAttention.__init__`, in which each head is a query group."""

        @functools.wraps(original)
        def init(module: Any, config: Any, *args: Any, **kwargs: Any) -> None:
            groups = config.num_query_groups
            family = self.family(ATTENTION, groups)
            virtual = copy.copy(config)
            virtual.num_query_groups = self.virtual(family)
            virtual.num_attention_heads = self.virtual(family) * (config.num_attention_heads // groups)
            virtual.tensor_model_parallel_size = self.layout.width  # TransformerEngine's layers divide by it
            with self.cutting(family):
                original(module, virtual, *args, **kwargs)
            _require_whole_latents(module)
            self._describe(module, family)

        return init

    def mlp(self, original: Any) -> Any:
        """`MLP.__init__`."""

        @functools.wraps(original)
        def init(module: Any, config: Any, *args: Any, **kwargs: Any) -> None:
            if self._as_they_are:
                original(module, config, *args, **kwargs)
                return
            columns, tp = config.ffn_hidden_size, self.layout.topology.tp
            granule = default_granule(columns, tp) if self._granule is None else self._granule
            if columns % (granule * tp):
                raise Refused(
                    f"an MLP of {columns} columns does not divide over {tp} TP slots in granules of {granule}",
                    fix=f"--ntp-granule with a divisor of {columns} / {tp}",
                )
            family = self.family(MLP, columns // granule, label=columns)
            virtual = copy.copy(config)
            virtual.ffn_hidden_size = self.virtual(family) * granule
            virtual.tensor_model_parallel_size = self.layout.width
            if kwargs.get("ffn_hidden_size") is not None:
                assert kwargs["ffn_hidden_size"] == columns, "both layers of an MLP are as wide"
                kwargs["ffn_hidden_size"] = virtual.ffn_hidden_size
            with self.cutting(family):
                original(module, virtual, *args, **kwargs)
            self._describe(module, family)

        return init

    def embedding(self, original: Any) -> Any:
        """`VocabParallelEmbedding.__init__`."""

        @functools.wraps(original)
        def init(module: Any, num_embeddings: int, *args: Any, **kwargs: Any) -> None:
            family = self._vocabulary = self._vocabulary_of(num_embeddings)
            with self.cutting(family):
                original(module, self.virtual(family), *args, **kwargs)
            ((module.vocab_start_index, module.vocab_end_index),) = self.layout.held(family)
            module.num_embeddings = num_embeddings
            self._describe(module, family)

        return init

    def column(self, original: Any) -> Any:
        """`ColumnParallelLinear.__init__`."""

        @functools.wraps(original)
        def init(module: Any, input_size: int, output_size: int, *args: Any, **kwargs: Any) -> None:
            if self._open is not None or self._as_they_are:
                original(module, input_size, output_size, *args, **kwargs)
                return
            if self._predicts:
                self._project(original, module, input_size, output_size, **kwargs)
                return
            family = self._vocabulary or self._vocabulary_of(self.args.padded_vocab_size)
            if output_size != family.units:
                raise _unknown(f"a column-parallel layer with {output_size} rows")
            self._vocabulary = family
            with self.cutting(family):
                original(module, input_size, self.virtual(family), *args, **kwargs)
            self._describe(module, family)

        return init

    def te_column(self, original: Any) -> Any:
        """`TEColumnParallelLinear.__init__`."""

        @functools.wraps(original)
        def init(module: Any, *sizes: int, **kwargs: Any) -> None:
            if self._predicts and self._open is None and not self._as_they_are:
                self._project(original, module, *sizes, **kwargs)
            else:
                original(module, *sizes, **kwargs)

        return init

    def prediction(self, original: Any) -> Any:
        """`MultiTokenPredictionLayer.__init__`."""

        @functools.wraps(original)
        def init(*args: Any, **kwargs: Any) -> None:
            self._predicts = True
            try:
                original(*args, **kwargs)
            finally:
                self._predicts = False

        return init

    def _project(self, original: Any, module: Any, inputs: int, outputs: int, *, config: Any, **kwargs: Any) -> None:
        """Make the projection of multi-token prediction."""
        family = projection_of(outputs)
        virtual = copy.copy(config)
        virtual.tensor_model_parallel_size = self.layout.width
        with self.cutting(family):
            original(module, inputs, self.virtual(family), config=virtual, **kwargs)
        self._describe(module, family)

    def row(self, original: Any) -> Any:
        """`RowParallelLinear.__init__`."""

        @functools.wraps(original)
        def init(module: Any, input_size: int, *args: Any, **kwargs: Any) -> None:
            if self._open is None and not self._as_they_are:
                raise _unknown(f"a row-parallel layer with {input_size} columns")
            original(module, input_size, *args, **kwargs)

        return init

    # ------------------------------------------------ where rows are, and their initial values

    def vocabulary_range(self, _: Any) -> Any:
        """`VocabUtility.vocab_range_from_per_partition_vocab_size`."""

        def vocabulary_range(rows: int, rank: int, width: int) -> tuple[int, int]:
            family = self._open or self._vocabulary
            assert family is not None and family.contiguous, "nothing else is found by its first row"
            assert width == self.layout.width, "rows are looked for in this rank's group"
            ((start, stop),) = self.layout.held_by(family)[self.layout.survivors[rank]]
            assert rows == stop - start, "a rank asks for its own rows"
            return start, stop

        return vocabulary_range

    def initial_weight(self, original: Any) -> Any:
        """`_initialize_affine_weight_cpu`: draw the whole matrix in its nominal shape, and keep this slot's units."""

        @functools.wraps(original)
        def initialize(weight: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if self._as_they_are:
                if not weight.is_meta:
                    original(weight, *args, **kwargs)
                return
            _outputs, _inputs, _part, dim, *rest = args
            assert self._open is not None, "a parallel weight belongs to a family"
            stride = kwargs.get("stride", 1)
            is_marked = kwargs.get("skip_set_tensor_parallel_attributes", False)  # by TransformerEngine itself
            cut = self._cut(self._open, weight.shape, dim, stride)
            if weight.is_meta:  # a model that is built for its sizes alone
                return
            whole = torch.empty(cut.shape, dtype=weight.dtype)
            kwargs |= {"rank": 0, "world_size": 1, "skip_set_tensor_parallel_attributes": True}
            original(whole, *cut.shape, cut.shape[dim], dim, *rest, **kwargs)
            parts = [whole.narrow(dim, a, b - a) for a, b in cut.local_index(self.layout.held(self._open))]
            weight.data.copy_(torch.cat(parts, dim))
            if not is_marked:
                set_tensor_model_parallel_attributes(tensor=weight, is_parallel=True, dim=dim, stride=stride)

        return initialize

    # ------------------------------------------------ families and cuts

    def family(self, kind: str, units: int, *, label: int | None = None) -> Family:
        """Return the family of layers with this number of units, which are cut alike."""
        return Family(name=f"{kind} of {label or units}", units=units)

    def _vocabulary_of(self, rows: int) -> Family:
        return Family(name=VOCABULARY, units=rows, contiguous=True)

    def virtual(self, family: Family) -> int:
        """Return the size that Megatron divides by the width of the group, to get what this slot holds."""
        return sp.size(self.layout.held(family)) * self.layout.width

    @contextlib.contextmanager
    def cutting(self, family: Family) -> Iterator[None]:
        """Say that the parallel layers built here are of this family."""
        assert self._open is None, "attention and MLP do not hold one another"
        self._open = family
        try:
            yield
        finally:
            self._open = None

    @contextlib.contextmanager
    def as_they_are(self) -> Iterator[None]:
        """Leave the layers that are built here alone: those of an expert, which is cut as a whole."""
        self._as_they_are = True
        try:
            yield
        finally:
            self._as_they_are = False

    def _cut(self, family: Family, local: tuple[int, ...], dim: int, stride: int) -> Tensor:
        """Return the whole tensor of which the slot holds a part with this shape."""
        unit, rest = divmod(local[dim], stride * sp.size(self.layout.held(family)))
        assert not rest, f"a part of {tuple(local)} is not made of whole units of {family.name}"
        runs = tuple(Run(start=run * unit * family.units, unit_size=unit) for run in range(stride))
        shape = (*local[:dim], unit * family.units * stride, *local[dim + 1 :])
        return Tensor(name="", shape=shape, family=family.name, dim=dim, runs=runs)

    def _describe(self, module: torch.nn.Module, family: Family) -> None:
        for layer in module.modules():
            _mark(layer)
        for parameter in module.parameters():
            if getattr(parameter, "tensor_model_parallel", False):
                cut = self._cut(family, parameter.shape, parameter.partition_dim, parameter.partition_stride)  # type: ignore[attr-defined]
                set_cut(parameter, cut, family)


def _mark(layer: torch.nn.Module) -> None:
    """Say of the parameters of TransformerEngine's layer how they are cut: on the meta device it puts that off."""
    dim = {"column": 0, "row": 1}.get(getattr(layer, "parallel_mode", None) or "")
    if dim is None:
        return
    for name, parameter in layer.named_parameters(recurse=False):
        is_cut = name.startswith("weight") or (name.startswith("bias") and dim == 0)
        if is_cut and parameter.is_meta and not getattr(parameter, "tensor_model_parallel", False):
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
            parameter.partition_dim = dim  # type: ignore[attr-defined]
            parameter.partition_stride = getattr(parameter, "partition_stride", 1)  # type: ignore[attr-defined]


def set_cut(parameter: torch.nn.Parameter, whole: Tensor, family: Family) -> None:
    """Say of which whole tensor a parameter is a part."""
    setattr(parameter, _CUT, (whole, family))


def cut_of(parameter: Any) -> tuple[Tensor, Family] | None:
    """Return the whole tensor of which a parameter is a part, and its family; None if it is replicated, or no
    parameter."""
    return getattr(parameter, _CUT, None)


def copy_cuts(module: torch.nn.Module, model: torch.nn.Module) -> None:
    """Copy the cuts of a model that was built of the plugin's layers to another one; cuts describe the whole tensor,
    and are the same in every layout."""
    built = dict(model.named_parameters())
    for name, parameter in module.named_parameters():
        cut = cut_of(built[name])
        if cut is not None:
            setattr(parameter, _CUT, cut)


def _require_whole_latents(module: torch.nn.Module) -> None:
    """Raise if a layer spec cuts a down-projection of latent attention, whose rows are not those of heads."""
    for name in ("linear_q_down_proj", "linear_kv_down_proj"):
        layer = getattr(module, name, None)
        if isinstance(layer, ColumnParallelLinear) or getattr(layer, "parallel_mode", None) == "column":
            raise Refused(
                f"{name} is a column-parallel layer: the latents of latent attention would be cut",
                fix="a layer spec with TELinear there, as Megatron's own has",
            )


def _unknown(what: str) -> Refused:
    return Refused(
        f"{what} is neither in self-attention nor in an MLP, nor is it the output layer: how it is cut is unknown",
        fix="start with full-width replicas",
    )


# ---------------------------------------------------------------- for planning


def describe(parameters: Mapping[str, torch.nn.Parameter], *, sequence: int, last: bool) -> StageUnits:
    """Return the units of the layers that were built: cut parameters by their families, all others replicated."""
    tensors, families = [], dict[str, Family]()
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            raise Refused(f"{name} is frozen, and lanes sum all gradients", fix="start with full-width replicas")
        cut = cut_of(parameter)
        if cut is None:
            if getattr(parameter, "tensor_model_parallel", False):
                raise _unknown(f"the layer of {name}")
            tensors.append(Tensor(name=name, shape=tuple(parameter.shape)))
            continue
        part, family = cut
        if getattr(parameter, "shared_embedding", False):
            family = dataclasses.replace(family, name=SHARED)
        families[family.name] = family
        tensors.append(Tensor(name=name, shape=part.shape, family=family.name, dim=part.dim, runs=part.runs))
    of_slots = [family for family in families.values() if not family.is_experts]
    return StageUnits(
        families=tuple(of_slots),
        tensors=tuple((tensor, 1) for tensor in tensors),
        flops=tuple(_flops(family, tensors, sequence, last=last) for family in of_slots),
        experts=tuple(family for family in families.values() if family.is_experts),
    )


def _flops(family: Family, tensors: list[Tensor], sequence: int, *, last: bool) -> int:
    """Return the forward operations per token and unit; attention over the past adds half of the sequence on average,
    twice."""
    mine = [tensor for tensor in tensors if tensor.family == family.name]
    if family.contiguous:
        return 2 * mine[0].shape[1] if last else 0  # an embedding is looked up; the output is computed
    total = 2 * sum(tensor.elements_per_unit for tensor in mine)
    if family.name.startswith(ATTENTION):
        total += 2 * sequence * sum(run.unit_size for tensor in mine if tensor.dim == 1 for run in tensor.runs)
    return total
