"""The extension's fused attention, in torch, for context parallelism: TransformerEngine refuses its unfused there.

A ring of ranks computes attention to one block of keys after the other, and merges the results by their softmax
statistics. So the forward returns the log-sum-exp of each row of scores, and the backward recomputes probabilities from
the one that it is given, which is that of all blocks together. Dropout is refused: no mask could be the one of a GPU.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from ntp_plugin.megatron.te_emulation.kernels import unsupported

type Tensor = torch.Tensor

_ARBITRARY_LENGTH = 1
"""The backend that the stand-in plays, by the extension's number for it."""


def get_fused_attn_backend(wanted: Any) -> tuple[int, str]:
    """The backend for such an attention, and no reason against it."""
    _require_plain(wanted.dropout, wanted.bias_type, wanted.softmax_type, wanted.return_max_logit)
    _formats(wanted.qkv_layout)
    if wanted.qkv_dtype.name not in ("kFloat32", "kFloat16", "kBFloat16"):
        raise unsupported(f"fused attention in {wanted.qkv_dtype.name}")
    return _ARBITRARY_LENGTH, ""


def fused_attn_fwd(
    longest_q: int,
    longest_kv: int,
    is_training: bool,
    scale: float,
    dropout: float,
    fast_zero_fill: bool,
    layout: Any,
    out_format: Any,
    scale_inv_format: Any,
    bias_type: Any,
    mask_type: Any,
    softmax_type: Any,
    window: Sequence[int],
    bottom_right: bool,
    ends_q: Tensor,
    ends_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dtype: Any,
    padded_ends_q: Tensor | None,
    padded_ends_kv: Tensor | None,
    page_table_k: Any,
    page_table_v: Any,
    s_quantizer: Any,
    o_quantizer: Any,
    bias: Any,
    softmax_offset: Any,
    generator: Any,
    draws_per_thread: int,
    return_max_logit: bool,
    cuda_graph: bool,
) -> list[Tensor]:
    """Attention of each head.

    Returns:
        The result; for each row of scores the logarithm of the sum of their exponentials, as (batch, heads, rows, 1);
        and the state of a generator, which draws nothing.
    """
    _require_plain(dropout, bias_type, softmax_type, return_max_logit)
    _require_unquantized(s_quantizer, o_quantizer)
    format_q, format_kv = _formats(layout)
    queries, keys, values = _grouped(q, k, v, format_q, format_kv)
    size = (queries.shape[-2], keys.shape[-2])
    hidden = _hidden(size, mask_type, window, bottom_right, (ends_q, ends_kv))
    scores = _scores(queries, keys, scale, hidden)
    statistics = torch.logsumexp(scores, -1, keepdim=True)
    out = _probabilities(scores, statistics) @ values
    return [_laid_out(out.flatten(1, 2), _format(out_format), q), statistics.flatten(1, 2), torch.zeros(2).long()]


def fused_attn_bwd(
    longest_q: int,
    longest_kv: int,
    scale: float,
    dropout: float,
    fast_zero_fill: bool,
    layout: Any,
    out_format: Any,
    gradient_format: Any,
    gradients_layout: Any,
    scale_inv_format: Any,
    gradient_scale_inv_format: Any,
    bias_type: Any,
    mask_type: Any,
    softmax_type: Any,
    window: Sequence[int],
    bottom_right: bool,
    deterministic: bool,
    ends_q: Tensor,
    ends_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    gradient: Tensor,
    dtype: Any,
    saved: Sequence[Tensor],
    padded_ends_q: Tensor | None,
    padded_ends_kv: Tensor | None,
    s_quantizer: Any,
    dp_quantizer: Any,
    dqkv_quantizer: Any,
    cuda_graph: bool,
) -> list[Tensor | None]:
    """The gradients of queries, keys and values; none for a bias and for an offset of the softmax.

    `out` and the statistics, the first of `saved`, may be those of more keys than there are here.
    """
    _require_plain(dropout, bias_type, softmax_type, False)
    _require_unquantized(s_quantizer, dp_quantizer, dqkv_quantizer)
    format_q, format_kv = _formats(layout)
    queries, keys, values = _grouped(q, k, v, format_q, format_kv)
    groups = keys.shape[1]
    results = _in_groups(_heads_first(out, _format(out_format)), groups)
    incoming = _in_groups(_heads_first(gradient, _format(gradient_format)), groups)
    size = (queries.shape[-2], keys.shape[-2])
    hidden = _hidden(size, mask_type, window, bottom_right, (ends_q, ends_kv))
    probabilities = _probabilities(_scores(queries, keys, scale, hidden), _in_groups(_wide(saved[0]), groups))
    of_values = (probabilities.transpose(-2, -1) @ incoming).sum(2)
    of_probabilities = incoming @ values.transpose(-2, -1)
    of_scores = probabilities * (of_probabilities - (incoming * results).sum(-1, keepdim=True)) * scale
    of_queries = (of_scores @ keys).flatten(1, 2)
    of_keys = (of_scores.transpose(-2, -1) @ queries).sum(2)
    format_q, format_kv = _formats(gradients_layout)
    return [
        _laid_out(of_queries, format_q, q),
        _laid_out(of_keys, format_kv, k),
        _laid_out(of_values, format_kv, v),
        None,
        None,
    ]


# ---------------------------------------------------------------- what is computed


def _scores(queries: Tensor, keys: Tensor, scale: float, hidden: Tensor) -> Tensor:
    return (queries @ keys.transpose(-2, -1) * scale).masked_fill(hidden, -math.inf)


def _probabilities(scores: Tensor, statistics: Tensor) -> Tensor:
    """From scores and the log-sum-exp of their rows; a row that sees no key has zeros."""
    return torch.exp(scores - statistics).masked_fill(scores == -math.inf, 0.0)


def _hidden(
    size: tuple[int, int], mask_type: Any, window: Sequence[int], bottom_right: bool, ends: tuple[Tensor, Tensor]
) -> Tensor:
    """True where a row does not see a column: of these sizes, or (batch, 1, 1, rows, columns) where there is padding.

    The diagonal begins in the corner at the top left, or ends in the one at the bottom right. The window is the number
    of columns that a row sees to the left and to the right of it, -1 for all.
    """
    padded, causal = "PADDING" in mask_type.name, "CAUSAL" in mask_type.name
    rows, columns = torch.arange(size[0])[:, None], torch.arange(size[1])
    lengths = [_lengths(one) for one in ends] if padded else [torch.tensor(length) for length in size]
    diagonal = rows + (lengths[1] - lengths[0] if bottom_right else 0)
    left, right = window[0], 0 if causal else window[1]
    hidden = torch.zeros(size, dtype=torch.bool)
    if right >= 0:
        hidden = hidden | (columns > diagonal + right)
    if left >= 0:
        hidden = hidden | (columns < diagonal - left)
    if padded:
        hidden = hidden | (rows >= lengths[0]) | (columns >= lengths[1])
    return hidden


def _lengths(ends: Tensor) -> Tensor:
    """The length of each sequence of a batch, to be compared with (batch, 1, 1, rows, columns)."""
    return ends.diff().reshape(-1, 1, 1, 1, 1)


# ---------------------------------------------------------------- layouts


def _grouped(q: Tensor, k: Tensor, v: Tensor, format_q: str, format_kv: str) -> tuple[Tensor, Tensor, Tensor]:
    """Queries as (batch, groups, heads of a group, rows, size), keys and values with one head for each group."""
    keys, values = (_heads_first(one, format_kv).unsqueeze(2) for one in (k, v))
    return _in_groups(_heads_first(q, format_q), keys.shape[1]), keys, values


def _in_groups(x: Tensor, groups: int) -> Tensor:
    batch, heads, *rest = x.shape
    return x.reshape(batch, groups, heads // groups, *rest)


def _heads_first(x: Tensor, form: str) -> Tensor:
    """(batch, heads, rows, size), in the precision that kernels compute in."""
    return _wide(x.permute(1, 2, 0, 3) if form == "SBHD" else x.permute(0, 2, 1, 3))


def _laid_out(x: Tensor, form: str, like: Tensor) -> Tensor:
    """(batch, heads, rows, size) in such a format, in the precision of `like`."""
    return (x.permute(2, 0, 1, 3) if form == "SBHD" else x.permute(0, 2, 1, 3)).to(like.dtype).contiguous()


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.get_default_dtype()))


def _formats(layout: Any) -> tuple[str, str]:
    """The formats of queries, and of keys and values. Slices of one tensor come as a tensor each."""
    parts = ["".join(sign for sign in part if sign.isalpha()) for part in layout.name.split("_")[1:]]
    return _known(parts[0], layout), _known(parts[-1], layout)


def _format(number: Any) -> str:
    return _known(number.name.removeprefix("NVTE_"), number)


def _known(form: str, named: Any) -> str:
    if form not in ("SBHD", "BSHD"):
        raise unsupported(f"fused attention with {named.name}")
    return form


# ---------------------------------------------------------------- refused


def _require_plain(dropout: float, bias_type: Any, softmax_type: Any, max_logit: bool) -> None:
    if dropout:
        raise unsupported(f"fused attention with a dropout of {dropout} (use --attention-dropout 0)")
    if bias_type.name != "NVTE_NO_BIAS" or softmax_type.name != "NVTE_VANILLA_SOFTMAX" or max_logit:
        raise unsupported("fused attention with a bias, another softmax, or the largest logit")


def _require_unquantized(*quantizers: Any) -> None:
    if any(quantizer is not None for quantizer in quantizers):
        raise unsupported("fused attention in FP8")
