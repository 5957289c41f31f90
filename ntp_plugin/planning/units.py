"""Defines which tensors are sharded, along which dim, in which units.

A *unit* is the smallest slice that must stay whole: a query group, a granule of MLP columns, a vocabulary row. In
latent attention each head is a query group. A *family* is a sequence of units that several tensors are cut by together
(qkv + proj, fc1 + fc2), so they share one layout. A tensor is cut along one dim in *runs*, each holding every unit of
its family once: a gated fc1 has two, the gate half and the up half, and a slot holds the same units of both.

`transformer_units` describes Megatron's layers from a model's shape. An adapter describes the user's own modules
with the same types, found by module type and never by name.
"""

import dataclasses
import functools
import math

from ntp_plugin.config.sections import Model
from ntp_plugin.errors import Refused
from ntp_plugin.planning import spans as sp
from ntp_plugin.planning.spans import Spans

ATTENTION, MLP, VOCABULARY = "attention", "mlp", "vocabulary"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Units that are laid out together. A contiguous family is cut anew in order; the others are kept and dealt.

    Experts are laid out over the slots of an expert group (`expert_groups.py`): the family of those with this `number`
    among the `each` experts that a slot nominally has.
    """

    name: str
    units: int
    contiguous: bool = False
    number: int = 0
    each: int = 0

    @property
    def is_experts(self) -> bool:
        return self.each > 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The position of a family's units along the cut dim: unit `u` begins at `start + u * unit_size`."""

    start: int
    unit_size: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """One parameter of a stage, in its global shape. Without a family it is replicated over the group."""

    name: str
    shape: tuple[int, ...]
    family: str = ""
    dim: int = 0
    runs: tuple[Run, ...] = ()

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def elements_per_unit(self) -> int:
        return self.elements // self.shape[self.dim] * sum(run.unit_size for run in self.runs)

    def local_index(self, units: Spans) -> Spans:
        """Ordered ranges along `dim` that a slot with these units (in storage order) holds, run after run."""
        return sp.joined(
            (run.start + start * run.unit_size, run.start + stop * run.unit_size)
            for run in self.runs
            for start, stop in units
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageUnits:
    """The content of one pipeline stage. `flops` is per token and unit, forward; only ratios of it are used.

    `families` are laid out over the TP slots of a replica, and `experts` over the slots of an expert group.
    """

    families: tuple[Family, ...]
    tensors: tuple[tuple[Tensor, int], ...]
    flops: tuple[int, ...]
    experts: tuple[Family, ...] = ()

    @functools.cached_property
    def elements_per_unit(self) -> dict[str, int]:
        """Family -> parameters per unit, over all layers of the stage."""
        return {
            family.name: sum(
                tensor.elements_per_unit * count for tensor, count in self.tensors if tensor.family == family.name
            )
            for family in self.families
        }

    @functools.cached_property
    def replicated_elements(self) -> int:
        """Parameters that every slot of the group holds whole."""
        return sum(tensor.elements * count for tensor, count in self.tensors if not tensor.family)

    @functools.cached_property
    def elements(self) -> int:
        """All parameters of the stage, counted once."""
        return sum(tensor.elements * count for tensor, count in self.tensors)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelUnits:
    """The stages of the model, first to last."""

    stages: tuple[StageUnits, ...]


OF_UNITS = (ModelUnits, StageUnits, Tensor, Run, Family)
"""All types that a description of a model's units is made of."""


def padded_vocabulary(model: Model, tp: int) -> int:
    """Vocabulary rows with Megatron's padding, pinned to the nominal TP degree so that no loss changes it."""
    multiple = model.vocab_multiple * tp
    return -(-model.vocab // multiple) * multiple


def default_granule(ffn: int, tp: int) -> int:
    """The widest of 64 and 16 columns (suited to tensor cores) that cuts a nominal slot's part into 8 or more; else 1.

    Eight, so that the one granule by which some survivors exceed others is at most an eighth.
    """
    columns = ffn // tp
    return next((width for width in (64, 16) if columns % width == 0 and columns // width >= 8), 1)


def stage_depths(layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each stage; if they do not divide, the first stages have one more (the last has the vocabulary)."""
    return tuple(layers // pp + (stage < layers % pp) for stage in range(pp))


def transformer_units(
    model: Model, *, tp: int, pp: int, granule: int | None = None, depths: tuple[int, ...] | None = None
) -> ModelUnits:
    """Describe a transformer with Megatron's layers; refuses a shape that the nominal layout cannot divide.

    `depths` are the layers of each stage, if the job says them.
    """
    if model.query_groups % tp:
        raise Refused(
            f"groups = {model.query_groups} query groups do not divide over tp = {tp} slots",
            fix=f"a query group stays whole, so choose a tp that divides {model.query_groups}",
        )
    if model.ffn % tp:
        raise Refused(f"ffn = {model.ffn} does not divide over tp = {tp} slots", fix="choose a tp that divides ffn")
    granule = default_granule(model.ffn, tp) if granule is None else granule
    if model.ffn // tp % granule:
        raise Refused(
            f"granule = {granule} does not divide a slot's {model.ffn // tp} MLP columns (ffn {model.ffn} / tp {tp})",
            fix=f"choose a divisor of {model.ffn // tp}, or leave granule out",
        )
    (attention, attention_tensors), (mlp, mlp_tensors) = _attention(model), _mlp(model, granule)
    stages = []
    for stage, layers in enumerate(stage_depths(model.layers, pp) if depths is None else depths):
        first, last = stage == 0, stage == pp - 1
        norms = (Tensor(name="layer_norm_weight", shape=(model.hidden,)), 2 * layers)
        families, tensors = [attention, mlp], [(tensor, layers) for tensor in (*attention_tensors, *mlp_tensors)]
        tensors.append(norms)
        stage_flops: tuple[int, ...] = (
            2 * layers * sum(tensor.elements_per_unit for tensor in attention_tensors)
            + layers * model.seq * (model.query_channels + model.value_channels) * (model.heads // model.query_groups),
            2 * layers * sum(tensor.elements_per_unit for tensor in mlp_tensors),
        )
        if first or last:
            vocabulary = Family(name=VOCABULARY, units=padded_vocabulary(model, tp), contiguous=True)
            families.append(vocabulary)
            tensors += [(tensor, 1) for tensor in _vocabulary(model, vocabulary.units, first=first, last=last)]
            stage_flops = (*stage_flops, 2 * model.hidden if last else 0)
        stages.append(StageUnits(families=tuple(families), tensors=tuple(tensors), flops=stage_flops))
    return ModelUnits(stages=tuple(stages))


def _attention(model: Model) -> tuple[Family, list[Tensor]]:
    if model.is_latent:
        return _latent_attention(model)
    per_group = model.heads // model.query_groups
    qkv = Run(start=0, unit_size=(per_group + 2) * model.head_channels)
    proj = Run(start=0, unit_size=per_group * model.head_channels)
    qkv_rows, proj_columns = qkv.unit_size * model.query_groups, proj.unit_size * model.query_groups
    tensors = [
        Tensor(name="linear_qkv.weight", shape=(qkv_rows, model.hidden), family=ATTENTION, dim=0, runs=(qkv,)),
        Tensor(name="linear_proj.weight", shape=(model.hidden, proj_columns), family=ATTENTION, dim=1, runs=(proj,)),
    ]
    if model.bias:
        tensors.append(Tensor(name="linear_qkv.bias", shape=(qkv_rows,), family=ATTENTION, runs=(qkv,)))
        tensors.append(Tensor(name="linear_proj.bias", shape=(model.hidden,)))
    return Family(name=ATTENTION, units=model.query_groups), tensors


def _latent_attention(model: Model) -> tuple[Family, list[Tensor]]:
    """The down-projections are replicated; the unit of all others is a head."""
    assert model.kv_lora_rank is not None, "this is what makes attention latent"

    def of_heads(name: str, channels: int, inputs: int) -> Tensor:
        run = Run(start=0, unit_size=channels)
        return Tensor(name=name, shape=(channels * model.heads, inputs), family=ATTENTION, dim=0, runs=(run,))

    proj = Run(start=0, unit_size=model.v_head_dim)
    tensors = [
        Tensor(name="linear_kv_down_proj.weight", shape=(model.kv_lora_rank + model.qk_pos_emb_head_dim, model.hidden)),
        of_heads("linear_kv_up_proj.weight", model.qk_head_dim + model.v_head_dim, model.kv_lora_rank),
        Tensor(
            name="linear_proj.weight",
            shape=(model.hidden, model.v_head_dim * model.heads),
            family=ATTENTION,
            dim=1,
            runs=(proj,),
        ),
    ]
    if model.q_lora_rank is None:
        tensors.append(of_heads("linear_q_proj.weight", model.query_channels, model.hidden))
    else:
        tensors.append(Tensor(name="linear_q_down_proj.weight", shape=(model.q_lora_rank, model.hidden)))
        tensors.append(of_heads("linear_q_up_proj.weight", model.query_channels, model.q_lora_rank))
    if model.bias:
        tensors.append(Tensor(name="linear_proj.bias", shape=(model.hidden,)))
    return Family(name=ATTENTION, units=model.heads), tensors


def _mlp(model: Model, granule: int) -> tuple[Family, list[Tensor]]:
    halves = 2 if model.gated else 1
    fc1 = tuple(Run(start=half * model.ffn, unit_size=granule) for half in range(halves))
    fc2 = (Run(start=0, unit_size=granule),)
    tensors = [
        Tensor(name="linear_fc1.weight", shape=(halves * model.ffn, model.hidden), family=MLP, dim=0, runs=fc1),
        Tensor(name="linear_fc2.weight", shape=(model.hidden, model.ffn), family=MLP, dim=1, runs=fc2),
    ]
    if model.bias:
        tensors.append(Tensor(name="linear_fc1.bias", shape=(halves * model.ffn,), family=MLP, runs=fc1))
        tensors.append(Tensor(name="linear_fc2.bias", shape=(model.hidden,)))
    return Family(name=MLP, units=model.ffn // granule), tensors


def _vocabulary(model: Model, rows: int, *, first: bool, last: bool) -> list[Tensor]:
    shape, row = (rows, model.hidden), (Run(start=0, unit_size=1),)
    tensors = []
    if first or (last and model.tied):
        tensors.append(Tensor(name="word_embeddings.weight", shape=shape, family=VOCABULARY, runs=row))
    if last and not model.tied:
        tensors.append(Tensor(name="output_layer.weight", shape=shape, family=VOCABULARY, runs=row))
    if last:
        tensors.append(Tensor(name="final_layer_norm.weight", shape=(model.hidden,)))
    return tensors
