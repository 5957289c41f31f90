"""Latent attention (`--multi-latent-attention`): a gradient that Megatron leaves partial.

Queries, keys and values come from latents of a lower rank, which are the same for all heads. So the down-projections
are replicated, and the up-projections are cut by heads, as is the projection of the output (`uneven_layers.py`). The
rotary part of the keys has no up-projection: all heads of the model use it as it is. Its gradient is the sum over all
heads, and a slot computes that of its own.

With `--sequence-parallel` each slot has this part for its own rows, and the backward of the gather that joins them adds
up the slots. Without it Megatron adds nothing, in a full-width replica neither: the gradients of the down-projection,
and of all below it, lack the heads of other slots, and the replicated weights of the slots drift apart (Megatron-LM
issue 1699, pull request 6839). Such weights depend on the width, so no other width could continue with them. The plugin
adds up the slots, from the first step on.
"""

import functools
import logging
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

_LOG = logging.getLogger(__name__)


def with_whole_gradients(original: Any, *, reports: bool) -> Any:
    """`MLASelfAttention._qkv_down_projection`: the backward adds up the slots' gradients of the rotary keys."""
    if reports:
        _LOG.warning(
            "--multi-latent-attention without --sequence-parallel: Megatron's gradients lack the heads of other TP"
            " slots in what all heads share of the keys, and the plugin adds them"
        )

    @functools.wraps(original)
    def project(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        queries, joined = original(module, hidden)
        if module.config.sequence_parallel:
            return queries, joined
        latent, rotary = torch.split(joined, [module.config.kv_lora_rank, module.config.qk_pos_emb_head_dim], dim=-1)
        rotary = copy_to_tensor_model_parallel_region(rotary, group=module.tp_group)
        return queries, torch.cat((latent, rotary), dim=-1)

    return project
