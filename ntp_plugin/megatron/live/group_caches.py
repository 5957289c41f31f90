"""Makes TransformerEngine and Megatron forget what belonged to the layout before a recovery: what they cache of groups
that were edited, and quantized weights."""

import sys
from collections.abc import Sequence
from typing import Any

_TE = "transformer_engine.pytorch.distributed"
_FUSED_A2A = "megatron.core.transformer.moe.fused_a2a"
_SIZES = ("get_distributed_world_size", "get_distributed_rank")
_POSITIONS = {
    "megatron.core.models.common.embeddings.rotary_pos_embedding": "RotaryEmbedding",
    "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding": "YarnRotaryEmbedding",
}
"""Modules -> classes whose `forward` caches the part of the sequence that this rank's context group gives it."""


def forget_groups() -> None:
    """Have TransformerEngine ask groups for their size and this rank's place again, and Megatron cut positions again.

    A layer that is built after a loss would divide by the width of before, and the rest of a context group would have
    the positions of a part of the sequence.
    """
    module = sys.modules.get(_TE)
    for name in _SIZES if module is not None else ():
        getattr(module, name).cache_clear()
    if _FUSED_A2A in sys.modules:  # buffers that the ranks of a group share
        sys.modules[_FUSED_A2A]._buffer = None  # type: ignore[attr-defined]
        sys.modules[_FUSED_A2A].reset_hybrid_ep_buffer()
    for name, embedding in _POSITIONS.items():
        if name in sys.modules:
            getattr(sys.modules[name], embedding).forward.cache_clear()


def forget_quantized_weights(chunks: Sequence[Any]) -> None:
    """Have layers quantize their weights again: those that FP8 keeps for the micro-batches of a step have the old
    shapes."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(kept := getattr(module, "_fp8_workspaces", None), dict):
                kept.clear()
