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
from collections import Counter
from collections.abc import Iterable

from ntp_plugin.config.sections import Model
from ntp_plugin.errors import Refused
from ntp_plugin.planning import spans as sp
from ntp_plugin.planning.spans import Spans

ATTENTION, MLP, VOCABULARY = "attention", "mlp", "vocabulary"
SHARED_EXPERTS = f"{MLP} of shared experts"


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
    `expert_flops` is per token, forward, in all experts that it is sent to.
    """

    families: tuple[Family, ...]
    tensors: tuple[tuple[Tensor, int], ...]
    flops: tuple[int, ...]
    experts: tuple[Family, ...] = ()
    expert_flops: int = 0

    @functools.cached_property
    def elements_per_unit(self) -> dict[str, int]:
        """Family -> parameters per unit, over all layers of the stage."""
        found = {family.name: 0 for family in (*self.families, *self.experts)}
        for tensor, count in self.tensors:
            if tensor.family in found:
                found[tensor.family] += tensor.elements_per_unit * count
        return found

    @functools.cached_property
    def expert_elements(self) -> int:
        """Parameters of all routed experts of the stage, counted once."""
        return sum(family.units * self.elements_per_unit[family.name] for family in self.experts)

    def with_routed(self, *, topk: int, experts: int) -> "StageUnits":
        """Return the stage with the operations of tokens that are sent to `topk` of `experts` experts each."""
        return dataclasses.replace(self, expert_flops=2 * topk * self.expert_elements // experts)

    @classmethod
    def joined(cls, parts: Iterable["StageUnits"]) -> "StageUnits":
        """Return what has the content of all of these, in their order."""
        families: dict[str, Family] = {}
        experts: dict[str, Family] = {}
        flops: Counter[str] = Counter()
        tensors: Counter[Tensor] = Counter()
        expert_flops = 0
        for part in parts:
            for known, new in ((families, part.families), (experts, part.experts)):
                for family in new:
                    assert known.setdefault(family.name, family) == family, "a family has the same units everywhere"
            flops.update({family.name: work for family, work in zip(part.families, part.flops, strict=True)})
            tensors.update(dict(part.tensors))
            expert_flops += part.expert_flops
        return cls(
            families=tuple(families.values()),
            tensors=tuple(tensors.items()),
            flops=tuple(flops[name] for name in families),
            experts=tuple(experts.values()),
            expert_flops=expert_flops,
        )

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
    """The stages of the model, first to last, or its segments, or its layers (`layer_placement.py`)."""

    stages: tuple[StageUnits, ...]

    def cut(self, bounds: Iterable[tuple[int, int]]) -> "ModelUnits":
        """Join what is between each of these bounds."""
        return ModelUnits(stages=tuple(StageUnits.joined(self.stages[start:stop]) for start, stop in bounds))

    @property
    def experts_of_slot(self) -> int:
        """How many experts of a layer a slot nominally has; 0 without experts."""
        return next((family.each for stage in self.stages for family in stage.experts), 0)

    @property
    def elements(self) -> int:
        """All parameters of the model, those of tied embeddings as often as stages hold them."""
        return sum(stage.elements for stage in self.stages)

    @property
    def elements_of_token(self) -> int:
        """The parameters that a token uses: of the experts those that it is sent to."""
        return sum(stage.elements - stage.expert_elements + stage.expert_flops // 2 for stage in self.stages)


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
    model: Model,
    *,
    tp: int,
    pp: int,
    ep: int = 1,
    etp: int | None = None,
    granule: int | None = None,
    depths: tuple[int, ...] | None = None,
) -> ModelUnits:
    """Describe a transformer with Megatron's layers; refuses a shape that the nominal layout cannot divide.

    `depths` are the layers of each stage, if the job says them. Experts are laid out over `ep` slots, and cut into
    `etp` parts of their columns, or `tp`.
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
    attention, attention_tensors = _attention(model)
    stages, begin = [], 0
    for stage, layers in enumerate(stage_depths(model.layers, pp) if depths is None else depths):
        first, last = stage == 0, stage == pp - 1
        routed = sum(model.expert_layers[begin : begin + layers])
        begin += layers
        parts = [
            _FamilyLayers(
                family=attention,
                tensors=tuple((tensor, layers) for tensor in attention_tensors),
                more_flops=layers * _scores(model),
            ),
            *_feed_forward(model, granule, dense=layers - routed, routed=routed, tp=tp),
        ]
        tensors = [tensor for part in parts for tensor in part.tensors]
        tensors.append((Tensor(name="layer_norm_weight", shape=(model.hidden,)), 2 * layers))
        families, flops = [part.family for part in parts], [part.flops for part in parts]
        if first or last:
            vocabulary = Family(name=VOCABULARY, units=padded_vocabulary(model, tp), contiguous=True)
            families.append(vocabulary)
            tensors += [(tensor, 1) for tensor in _vocabulary(model, vocabulary.units, first=first, last=last)]
            flops.append(2 * model.hidden if last else 0)
        units = StageUnits(families=tuple(families), tensors=tuple(tensors), flops=tuple(flops))
        stages.append(_with_experts(units, model, ep=ep, etp=tp if etp is None else etp, layers=routed))
    return ModelUnits(stages=tuple(stages))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _FamilyLayers:
    """The layers of one family in a stage, each tensor with the number of layers that have it."""

    family: Family
    tensors: tuple[tuple[Tensor, int], ...]
    more_flops: int = 0
    """Besides products with the tensors."""

    @property
    def flops(self) -> int:
        cut = [tensor.elements_per_unit * count for tensor, count in self.tensors if tensor.family]
        return 2 * sum(cut) + self.more_flops


def _scores(model: Model) -> int:
    """Operations of causal attention per token and query group of a layer."""
    return model.seq * (model.query_channels + model.value_channels) * (model.heads // model.query_groups)


def _feed_forward(model: Model, granule: int, *, dense: int, routed: int, tp: int) -> list[_FamilyLayers]:
    """The MLPs of a stage's layers: its `dense` ones, and the shared experts of its `routed` ones."""
    parts = []
    if dense or not routed:
        mlp, tensors = _mlp(model, granule)
        parts.append(_FamilyLayers(family=mlp, tensors=tuple((tensor, dense) for tensor in tensors)))
    if routed and model.moe_shared_expert_ffn is not None:
        parts.append(_shared_experts(model, model.moe_shared_expert_ffn, routed, tp))
    return parts


def _shared_experts(model: Model, ffn: int, layers: int, tp: int) -> _FamilyLayers:
    if ffn % tp:
        raise Refused(
            f"moe_shared_expert_ffn = {ffn} does not divide over tp = {tp} slots", fix="choose a tp that divides it"
        )
    shape = dataclasses.replace(model, ffn=ffn)
    _, tensors = _mlp(shape, granule := default_granule(ffn, tp))
    family = Family(name=SHARED_EXPERTS, units=ffn // granule)
    of_shared = [
        (
            dataclasses.replace(tensor, name=f"shared_experts.{tensor.name}", family=tensor.family and family.name),
            layers,
        )
        for tensor in tensors
    ]
    if model.moe_shared_expert_gate:
        of_shared.append((Tensor(name="shared_experts.gate_weight", shape=(1, model.hidden)), layers))
    return _FamilyLayers(family=family, tensors=tuple(of_shared))


def _with_experts(stage: StageUnits, model: Model, *, ep: int, etp: int, layers: int) -> StageUnits:
    """Return the stage with the routers and experts of so many layers; as in a live job, each number of an expert has
    tensors of its own."""
    if not layers or model.experts is None:
        return stage
    places, each, columns = ep * etp, model.experts // ep, model.expert_ffn // etp
    halves, families = 2 if model.gated else 1, []
    tensors = [*stage.tensors, (Tensor(name="router.weight", shape=(model.experts, model.hidden)), layers)]
    shapes: dict[str, tuple[int, ...]] = {
        "linear_fc1.weight": (halves * columns, model.hidden),
        "linear_fc2.weight": (model.hidden, columns),
    }
    if model.bias:
        shapes |= {"linear_fc1.bias": (halves * columns,), "linear_fc2.bias": (model.hidden,)}
    for number in range(each):
        family = Family(name=f"experts {number} of {each}", units=places, number=number, each=each)
        families.append(family)
        for name, (rows, *rest) in shapes.items():
            run, shape = Run(start=0, unit_size=rows), (places * rows, *rest)
            tensors.append(
                (Tensor(name=f"experts.{number}.{name}", shape=shape, family=family.name, runs=(run,)), layers)
            )
    found = dataclasses.replace(stage, tensors=tuple(tensors), experts=tuple(families))
    return found.with_routed(topk=model.moe_router_topk, experts=model.experts)


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
