"""What planning needs to know of Megatron's arguments. PURE."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from ntp_plugin.config.sections import CopyPolicy, Model, State
from ntp_plugin.errors import Refused
from ntp_plugin.megatron.unsupported import is_fp8, is_latent
from ntp_plugin.planning.recovery_plan import Guard
from ntp_plugin.planning.sequence_rows import SequenceRows
from ntp_plugin.planning.topology import Topology
from ntp_plugin.planning.units import ModelUnits


def guard_of(args: Any, limit: float) -> Guard:
    """Return what the job puts into a GPU's memory, from its arguments; `limit` is in bytes."""
    low = args.bf16 or args.fp16
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    model = Model(
        layers=args.num_layers,
        hidden=args.hidden_size,
        heads=args.num_attention_heads,
        groups=groups,
        kv_channels=args.kv_channels,
        ffn=args.ffn_hidden_size,
        vocab=args.padded_vocab_size,
        seq=args.seq_length,
        gated=bool(args.swiglu),
    )
    model = _with_latents(model, args) if is_latent(args) else model
    return Guard(
        limit=limit,
        model=_with_experts(model, args) if args.num_experts and not args.hybrid_layer_pattern else model,
        state=State(
            weight_bytes=2 if low else 4,
            gradient_bytes=2 if low and not args.accumulate_allreduce_grads_in_fp32 else 4,
            optimizer_bytes=12 if low else 8,
            distributed_optimizer=bool(args.use_distributed_optimizer),
        ),
        recompute=args.recompute_granularity == "full",
        sequence_parallel=bool(args.sequence_parallel),
        activation=2 if low else 4,
        smaller=bool(args.calculate_per_token_loss),
    )


def expert_slots(args: Any) -> int:
    """Return how many ranks together hold all experts of a layer once; 0 without experts."""
    if not args.num_experts:
        return 0
    column_parts: int = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    return column_parts * int(args.expert_model_parallel_size)


def with_routed(units: ModelUnits, args: Any) -> ModelUnits:
    """Return the units with the work of tokens in experts, of which layers know nothing: it sets a replica's pace."""
    if not args.num_experts:
        return units
    routed = {"topk": args.moe_router_topk, "experts": args.num_experts}
    return ModelUnits(stages=tuple(stage.with_routed(**routed) for stage in units.stages))


def makes_copies(copies: CopyPolicy, topology: Topology, *, sharded: bool) -> bool:
    """Whether the ranks of a job copy their state; `sharded` says whether it has the distributed optimizer."""
    is_unique = sharded or topology.dp == 1 or topology.expert_slots > 0
    return copies.mode != "off" and (is_unique or copies.protect == "all")


def _with_latents(model: Model, args: Any) -> Model:
    return dataclasses.replace(
        model,
        kv_lora_rank=args.kv_lora_rank,
        q_lora_rank=args.q_lora_rank,
        qk_head_dim=args.qk_head_dim,
        qk_pos_emb_head_dim=args.qk_pos_emb_head_dim,
        v_head_dim=args.v_head_dim,
    )


def _with_experts(model: Model, args: Any) -> Model:
    return dataclasses.replace(
        model,
        experts=args.num_experts,
        moe_router_topk=args.moe_router_topk,
        moe_ffn=args.moe_ffn_hidden_size,
        moe_shared_expert_ffn=args.moe_shared_expert_intermediate_size or None,
        moe_shared_expert_gate=bool(getattr(args, "moe_shared_expert_gate", False)),
        moe_layer_freq=str(args.moe_layer_freq),  # Megatron has read a number, or a list
    )


_ROWS_OF_A_SLOT, _ROWS_OF_ALL = 8, 16
"""Of how many values the rows of a slot, and of all slots together, have a multiple, for FP8's matrix products."""


def rows_of_slots(args: Any, width: int, *, length: int | None = None) -> SequenceRows:
    """Return how a sequence is cut over this many slots, with `--sequence-parallel`; `length` is `--seq-length`.

    With FP8, slots store so many rows that a micro-batch has a multiple of 8 on a slot and of 16 on all.
    """
    granule = 1
    if is_fp8(args):
        size = 1 if args.ntp_gpu_memory_gb else args.micro_batch_size  # it may be split
        rows = _ROWS_OF_ALL if width % 2 else _ROWS_OF_A_SLOT
        granule = rows // math.gcd(rows, size)
    return SequenceRows(length=args.seq_length if length is None else length, width=width, granule=granule)


def taken_together(args: Any, replicas: int, batches: Iterable[int]) -> int:
    """Return how many micro-batches a replica can only run together; `batches` are all sizes of the global batch."""
    if args.virtual_pipeline_model_parallel_size is None:
        return 1
    together: int = args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size
    for size in batches:
        each = size // (args.micro_batch_size * replicas)
        if each % together:
            raise Refused(
                f"a replica has {each} micro-batches, and an interleaved pipeline takes them in groups of {together}: "
                "replicas of different width cannot share them",
                fix=f"a global batch that is a multiple of {args.micro_batch_size * replicas * together}",
            )
    return together
