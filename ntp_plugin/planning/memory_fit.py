"""Computes bytes per slot (weights, gradients, optimizer state, packing buffers of lanes, activations), and finds a
remedy if they do not fit.

The guard (`fit_groups`) tries the ladder

    as is -> smaller micro-batches -> full recompute -> optimizer in host memory -> fewer slots -> refuse

where each rung keeps the gains of those before it. It checks every affected group, so that nothing is begun that does
not fit on all ranks. A plan only climbs as far as a job can go by itself: to smaller micro-batches. Before any loss,
`narrowest` computes the least width at which a replica would fit, so that a narrower one is left out from the start.
Logits are not counted, nor is the memory of the framework and its libraries: leave room for them.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from fractions import Fraction

from ntp_plugin.config.sections import Batch, Model, State
from ntp_plugin.errors import Refused
from ntp_plugin.planning.expert_groups import NOMINAL_LOAD, GroupLoad
from ntp_plugin.planning.shard_layout import lay_experts_out, lay_out, place_elements, slot_elements
from ntp_plugin.planning.topology import WHOLE, Pattern, SurvivingReplicas, Topology
from ntp_plugin.planning.units import ATTENTION, MLP, SHARED_EXPERTS, ModelUnits, StageUnits, Tensor

PACKED_BUCKET = 40_000_000
"""Parameters of a bucket that is packed for its lanes (Megatron's default bucket); two are in flight."""
KEPT_ROWS, MASK_BYTES = 2, 1
"""What attention and MLP each keep of the data that sequence parallelism shards: the inputs of the norm and of the
first matrix, and a dropout mask. In bf16 both together are 10 bytes per element of a row; with 8 of attention and 16 of
an MLP of four times the width these are the 34 of Korthikanti et al. (arXiv 2205.05198, eq. 4, attention's own scores
recomputed or never kept)."""

AS_IS, SMALLER, RECOMPUTE, OFFLOAD = "as is", "smaller micro-batches", "full recompute", "optimizer in host memory"
NARROWER = "fewer slots"
LADDER = (AS_IS, SMALLER, RECOMPUTE, OFFLOAD, NARROWER)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Bytes of the fullest slot of a group."""

    weights: int
    gradients: int
    optimizer: int
    packing: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.packing


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One attempt: the remedy, and the bytes of the fullest slot with it."""

    name: str
    pattern: Pattern
    splits: int
    recompute: bool
    offload: bool
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A job as the guard sees it."""

    model: Model
    units: ModelUnits
    state: State
    batch: Batch
    micro_batches: int
    """Micro-batches of the replica in a step."""
    recompute: bool = False
    """True if it recomputes all activations in any case."""
    sequence_parallel: bool = True
    activation: int = 2
    """Bytes of each activation element (2: bf16)."""
    cp: int = 1
    """Parts of each sequence, nominally."""


def memory_use(
    units: StageUnits,
    tp: int,
    pattern: Pattern,
    state: State,
    *,
    replicas: int,
    packing: bool,
    load: GroupLoad = NOMINAL_LOAD,
) -> MemoryUse:
    """Memory of the fullest slot of a group with that pattern; `packing` if its stage reduces over uneven lanes. The
    optimizer state of experts is shared by the expert groups, that of all else by the replicas."""
    own, experts = max(slot_elements(units, tp, pattern)), max(place_elements(units, load.lost_places), default=0)
    elements = own + experts
    sharers = (replicas, load.expert_groups) if state.distributed_optimizer else (1, 1)
    return MemoryUse(
        weights=elements * state.weight_bytes,
        gradients=elements * state.gradient_bytes,
        optimizer=-(-own * state.optimizer_bytes // sharers[0]) - (-experts * state.optimizer_bytes // sharers[1]),
        packing=2 * min(elements, PACKED_BUCKET) * state.gradient_bytes if packing else 0,
    )


def activation_bytes(
    training: Training,
    stage: int,
    tp: int,
    pattern: Pattern,
    *,
    splits: int = 1,
    recompute: bool = False,
    load: GroupLoad = NOMINAL_LOAD,
) -> int:
    """Activation bytes of the fullest slot, with the micro-batches that a 1F1B pipeline has in flight in that stage."""
    units, width = training.units.stages[stage], tp - len(pattern)
    rows = math.ceil(training.model.seq * load.tokens / training.cp) * training.batch.micro_batch
    own_rows = -(-rows // width) if training.sequence_parallel else rows
    widest = {family.name: lay_out(family, tp, pattern).widest for family in units.families}
    kept, halves = 0, Counter[str]()
    for tensor, count in units.tensors:
        kind = next((kind for kind in (ATTENTION, MLP) if tensor.family.startswith(kind)), None)
        if kind is None or tensor.dim != 1:  # one row-parallel weight for each attention and each MLP
            continue
        if tensor.family != SHARED_EXPERTS:  # their input is that of the routed ones
            halves[kind] += count
            kept += count * own_rows * training.model.hidden * (KEPT_ROWS * training.activation + MASK_BYTES)
        kept += count * own_rows * (_latents(training.model) if kind == ATTENTION else 0) * training.activation
        kept += (
            count * rows * widest[tensor.family] * _kept_per_unit(tensor, kind, training.model) * training.activation
        )
    kept += _kept_for_experts(training, units, tp, own_rows, load)
    layers = max(halves.values(), default=0)
    in_flight = min(training.micro_batches * splits, len(training.units.stages) - stage)
    if recompute and layers:  # the input of every layer, and one layer as it is computed again
        inputs = layers * own_rows * training.model.hidden * training.activation * in_flight
        return (inputs + kept // layers) // splits
    return kept * in_flight // splits


def _kept_for_experts(training: Training, units: StageUnits, tp: int, own_rows: int, load: GroupLoad) -> int:
    """What layers of experts keep: the data that sequence parallelism shards, as other layers, and for each token that
    comes to the fullest slot its row, and what the second matrix is computed from."""
    if not units.experts:
        return 0
    model, family = training.model, units.experts[0]
    assert model.experts is not None, "a stage with experts is of a model with experts"
    layers = next(count for tensor, count in units.tensors if tensor.family == family.name)
    columns = Fraction(family.units * family.each, model.experts)  # parts of each expert, of which all have its tokens
    nominal = Fraction(model.seq * training.batch.micro_batch, training.cp * (tp if training.sequence_parallel else 1))
    rows = math.ceil(nominal * model.moe_router_topk * columns * load.expert_tokens)
    of_row = model.hidden + math.ceil(model.expert_ffn / columns) * (3 if model.gated else 2)
    shards = own_rows * model.hidden * (KEPT_ROWS * training.activation + MASK_BYTES)
    return layers * (shards + rows * of_row * training.activation)


def _kept_per_unit(tensor: Tensor, kind: str, model: Model) -> int:
    """Elements per row and unit: the input of the second matrix, and what it is computed from."""
    inner = tensor.runs[0].unit_size
    if kind == ATTENTION:
        queries = inner // model.value_channels * model.query_channels
        return queries + inner + model.query_channels + model.value_channels  # queries, the output, keys, values
    return inner * (3 if model.gated else 2)


def _latents(model: Model) -> int:
    """Elements per row that latent attention keeps in every slot: both latents, before and after their norms, and the
    rotary part of the keys."""
    if model.kv_lora_rank is None:
        return 0
    return 2 * ((model.q_lora_rank or 0) + model.kv_lora_rank) + model.qk_pos_emb_head_dim


def fit(
    training: Training,
    stage: int,
    tp: int,
    pattern: Pattern,
    *,
    limit: float,
    replicas: int,
    packing: bool,
    min_tp_width: int = 1,
    rungs: Collection[str] = LADDER,
    load: GroupLoad = NOMINAL_LOAD,
) -> tuple[Rung, ...]:
    """Return the rungs that were tried for a group, in order; the last one fits, or none does."""
    tried: list[Rung] = []
    for rung in _ladder(training, tp, pattern, min_tp_width):
        if rung.name not in rungs:
            continue
        units, state = training.units.stages[stage], training.state
        use = memory_use(units, tp, rung.pattern, state, replicas=replicas, packing=packing, load=load)
        active = activation_bytes(
            training, stage, tp, rung.pattern, splits=rung.splits, recompute=rung.recompute, load=load
        )
        size = use.total - (use.optimizer if rung.offload else 0) + active
        tried.append(dataclasses.replace(rung, bytes=size))
        if size <= limit:
            break
    return tuple(tried)


def fit_groups(
    training: Training,
    surviving: SurvivingReplicas,
    *,
    limit: float,
    min_tp_width: int = 1,
    rungs: Collection[str] = LADDER,
    load: GroupLoad = NOMINAL_LOAD,
) -> Mapping[tuple[int, Pattern], Rung]:
    """(stage, pattern) -> the rung on which its groups fit under that load; refuses if one of them fits on none.

    Undamaged groups are affected too: a sharded optimizer has fewer sharers once a replica is dropped.
    """
    found: dict[tuple[int, Pattern], Rung] = {}
    for stage in range(surviving.topology.pp):
        degraded = surviving.patterns_of_segment(stage)
        for pattern in (WHOLE, *degraded):
            tried = fit(
                training,
                stage,
                surviving.topology.tp,
                pattern,
                limit=limit,
                replicas=len(surviving.replicas),
                packing=bool(degraded or load.lost_places),
                min_tp_width=min_tp_width,
                rungs=rungs,
                load=load,
            )
            if tried[-1].bytes > limit:
                sizes = {rung.name: rung.bytes for rung in tried}
                what = _described(training.units.stages[stage], surviving.topology, stage, pattern, load)
                raise Refused(
                    f"{what} does not fit into {_gb(limit)} per GPU: "
                    + ", ".join(f"{name} {_gb(size)}" for name, size in sizes.items()),
                    fix=_FIX if surviving.topology.narrows else _FIX_AT_FULL_WIDTH,
                )
            found[stage, pattern] = tried[-1]
    return found


def narrowest(
    training: Training, topology: Topology, *, limit: float, min_tp_width: int, rungs: Collection[str] = LADDER
) -> int:
    """The least width from which on every width fits; the nominal one if no narrower one does, or none trains."""
    if not topology.narrows:
        return min_tp_width
    for width in range(topology.tp - 1, min_tp_width - 1, -1):
        pattern = tuple(range(width, topology.tp))
        for stage in range(topology.pp):
            tried = fit(
                training,
                stage,
                topology.tp,
                pattern,
                limit=limit,
                replicas=topology.dp,
                packing=True,
                min_tp_width=width,
                rungs=rungs,
            )
            if tried[-1].bytes > limit:
                return width + 1
    return min_tp_width


_FIX = "drop the replica (a higher min_tp_width), shard the optimizer, or bring slots back"
_FIX_AT_FULL_WIDTH = "shard the optimizer, bring slots back, or choose larger degrees of parallelism"


def _ladder(training: Training, tp: int, pattern: Pattern, min_tp_width: int) -> Iterator[Rung]:
    micro_batch = training.batch.micro_batch
    as_is = Rung(name=AS_IS, pattern=pattern, splits=1, recompute=training.recompute, offload=False, bytes=0)
    yield as_is
    rung = as_is
    for splits in range(2, micro_batch + 1):
        if micro_batch % splits == 0:
            rung = dataclasses.replace(rung, name=SMALLER, splits=splits)
            yield rung
    if not training.recompute:
        rung = dataclasses.replace(rung, name=RECOMPUTE, recompute=True)
        yield rung
    rung = dataclasses.replace(rung, name=OFFLOAD, offload=True)
    yield rung
    survivors = [slot for slot in range(tp) if slot not in pattern]
    while len(survivors) > min_tp_width:  # for bytes that an adapter has measured; units alone never shrink by this
        survivors.pop()
        narrower = tuple(slot for slot in range(tp) if slot not in survivors)
        rung = dataclasses.replace(rung, name=NARROWER, pattern=narrower)
        yield rung


def _described(units: StageUnits, topology: Topology, stage: int, pattern: Pattern, load: GroupLoad) -> str:
    if not load.lost_places:
        return f"stage {stage} at TP width {topology.tp - len(pattern)}"
    each = units.experts[0].each
    most = lay_experts_out(topology.expert_slots, each, load.lost_places).widest
    return f"stage {stage} with {most} experts on a slot, where {each} are nominal,"


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB"
