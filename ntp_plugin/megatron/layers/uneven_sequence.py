"""Sequence parallelism in a replica whose width does not divide the sequence.

Between the parallel layers each slot has its own rows of the sequence, and Megatron's collectives need the same number
of rows from all. So the last slots store extra rows without tokens, the pads (`planning/sequence_rows.py`). They exist
only there: attention, MLP and loss, which use the whole sequence, see exactly its rows.

    scatter             pads with zeros, then splits
    gather              gathers, then removes the pads
    reduce-scatter      pads with zeros, then adds up and splits

Megatron's autograd functions are made of only these three, each one the other's backward. So a pad's gradient is zero
everywhere, and what norms and biases compute on pads adds nothing to their gradients. The functions themselves, which
slot adds what, and the order of the sums stay Megatron's.

A column-parallel layer, Megatron's or TransformerEngine's, gathers by itself, and again in its backward, while it
computes. It works on the padded sequence, and its result is cut: its gradient on pads is then zero as well. So a slot
keeps no more than its own rows for the backward, as upstream, and computes at most width - 1 extra rows. What goes into
TransformerEngine's row-parallel layer is padded, and it splits evenly.

The true length is that of the arguments. Any other length is refused rather than cut wrongly.
"""

import functools
from typing import Any

import torch
from torch.nn import functional

from ntp_plugin.errors import Refused
from ntp_plugin.planning.sequence_rows import SequenceRows


class UnevenSequence:
    """Replaces Megatron's functions that split a sequence and join it."""

    def __init__(self, rows: SequenceRows) -> None:
        self._rows = rows

    def split(self, original: Any) -> Any:
        """`_split_along_first_dim`."""

        @functools.wraps(original)
        def split(whole: torch.Tensor, group: Any) -> Any:
            return original(self._with_pads(whole), group)

        return split

    def gather(self, original: Any) -> Any:
        """`_gather_along_first_dim`."""

        @functools.wraps(original)
        def gather(part: torch.Tensor, group: Any, *args: Any, **kwargs: Any) -> Any:
            _require_rows(part, self._rows.stored)
            return self._without_pads(original(part, group, *args, **kwargs))

        return gather

    def reduce_scatter(self, original: Any) -> Any:
        """`_reduce_scatter_along_first_dim`."""

        @functools.wraps(original)
        def reduce_scatter(whole: torch.Tensor, group: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self._with_pads(whole), group, *args, **kwargs)

        return reduce_scatter

    def column_linear(self, original: Any) -> Any:
        """`linear_with_grad_accumulation_and_async_allreduce`."""

        @functools.wraps(original)
        def linear(part: torch.Tensor, *args: Any, sequence_parallel: bool, **kwargs: Any) -> Any:
            result = original(part, *args, sequence_parallel=sequence_parallel, **kwargs)
            return self._without_pads(result) if sequence_parallel else result

        return linear

    def column_forward(self, original: Any) -> Any:
        """`forward` of TransformerEngine's column-parallel layers."""

        @functools.wraps(original)
        def forward(module: Any, part: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            result, bias = original(module, part, *args, **kwargs)
            return (self._without_pads(result) if module.sequence_parallel else result), bias

        return forward

    def row_forward(self, original: Any) -> Any:
        """`forward` of TransformerEngine's row-parallel layer."""

        @functools.wraps(original)
        def forward(module: Any, whole: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return original(module, self._with_pads(whole) if module.sequence_parallel else whole, *args, **kwargs)

        return forward

    def rotary_length(self, original: Any) -> Any:
        """`RotaryEmbedding.get_rotary_seq_len`."""

        @functools.wraps(original)
        def rotary_length(  # noqa: PLR0917  (upstream's)
            module: Any, inference: Any, block: Any, part: Any, config: Any, packed: Any = None, **kwargs: Any
        ) -> Any:
            if inference is not None or packed is not None:  # these bring the length along
                return original(module, inference, block, part, config, packed, **kwargs)
            arrived = getattr(block, "input_tensor", None)  # latent attention asks by itself, without a block
            _require_rows(part if arrived is None else arrived, self._rows.stored)
            return self._rows.length

        return rotary_length

    def delta_net(self, original: Any) -> Any:
        """`GatedDeltaNet.forward`, which multiplies a slot's rows by the width to know the length."""
        degree = _Degree(self._rows)

        @functools.wraps(original)
        def forward(module: Any, part: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            width, module.sp_size = module.sp_size, degree
            try:
                return original(module, part, *args, **kwargs)
            finally:
                module.sp_size = width

        return forward

    def _with_pads(self, whole: torch.Tensor) -> torch.Tensor:
        _require_rows(whole, self._rows.length)
        return functional.pad(whole, (0, 0) * (whole.dim() - 1) + (0, self._rows.pads))

    def _without_pads(self, whole: torch.Tensor) -> torch.Tensor:
        _require_rows(whole, self._rows.padded)
        return whole[: self._rows.length]


class _Degree(int):
    """A degree of sequence parallelism that makes the true length of the rows that a slot stores."""

    _rows: SequenceRows

    def __new__(cls, rows: SequenceRows) -> "_Degree":
        self = super().__new__(cls, rows.width)
        self._rows = rows
        return self

    def __rmul__(self, stored: int) -> int:
        assert stored == self._rows.stored, "a slot has its rows"
        return self._rows.length


def _require_rows(tensor: torch.Tensor, rows: int) -> None:
    if tensor.shape[0] != rows:
        raise Refused(
            f"--sequence-parallel: a tensor of {tensor.shape[0]} rows where those of --seq-length make {rows}",
            fix="make all sequences as long as --seq-length says, or start with full-width replicas",
        )
