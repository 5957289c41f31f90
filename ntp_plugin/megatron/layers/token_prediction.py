"""Multi-token prediction (`--mtp-num-layers`) in a replica of uneven width.

A layer of it joins the hidden states with the embeddings of later tokens by a column-parallel projection
(`uneven_layers.py` cuts its rows in order), and gathers the result, since attention wants whole rows. Megatron's gather
takes all parts for equally wide; here each slot brings as many columns as it holds. Between a gather and its backward
nothing depends on the width, so gradients are exact.

For its log Megatron compares predictions with tokens. It finds the most likely one by the widths of vocabulary parts,
which it takes for equal as well.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from ntp_plugin.megatron.layout import Layout
from ntp_plugin.planning import spans as sp
from ntp_plugin.planning.units import VOCABULARY, Family


def projection_of(rows: int) -> Family:
    """Return the family of the rows that a layer of multi-token prediction projects to, in order."""
    return Family(name=f"projection to {rows}", units=rows, contiguous=True)


class UnevenPrediction:
    """Replaces what takes the parts of a replica for equally wide."""

    def __init__(self, layout: Layout, args: Any) -> None:
        self._layout, self._args = layout, args
        self._projection = projection_of(args.hidden_size)

    def gather(self, original: Any) -> Any:
        """`gather_from_tensor_model_parallel_region`, of the projection."""

        @functools.wraps(original)
        def gather(part: torch.Tensor, group: Any = None) -> Any:
            widths = self._widths(dist.get_world_size(group), part)
            if len(set(widths)) == 1:
                return original(part, group=group)
            return _Gather.apply(part, widths, group)

        return gather

    def _widths(self, members: int, part: torch.Tensor) -> list[int]:
        """Return the columns of each slot of this rank's group."""
        layout = self._layout
        assert members == layout.width, "the slots of a stage gather together"
        held = layout.held_by(self._projection)
        widths = [sp.size(held[tp]) for tp in layout.survivors]
        assert widths[layout.survivors.index(layout.slot.tp)] == part.shape[-1], "a slot gathers what it has computed"
        return widths

    def most_likely(self, original: Any) -> Any:
        """`_vocab_parallel_argmax`."""

        @functools.wraps(original)
        def most_likely(logits: torch.Tensor, tp_group: Any, tp_size: int) -> torch.Tensor:
            vocabulary = Family(name=VOCABULARY, units=self._args.padded_vocab_size, contiguous=True)
            ((start, _),) = self._layout.held(vocabulary)
            largest, places = logits.max(dim=-1)
            found = [torch.empty_like(largest) for _ in range(tp_size)]
            tokens = [torch.empty_like(places) for _ in range(tp_size)]
            dist.all_gather(found, largest, group=tp_group)
            dist.all_gather(tokens, places + start, group=tp_group)
            first = torch.stack(found).argmax(dim=0, keepdim=True)
            return torch.gather(torch.stack(tokens), 0, first).squeeze(0)

        return most_likely


class _Gather(torch.autograd.Function):
    """Joins the columns of all slots; the backward takes this slot's own."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, widths: Sequence[int], group: Any) -> torch.Tensor:
        bounds, rank = [0, *itertools.accumulate(widths)], dist.get_rank(group)
        ctx.bounds = bounds[rank], bounds[rank + 1]
        padded = functional.pad(part, (0, max(widths) - part.shape[-1])).contiguous()
        parts = [torch.empty_like(padded) for _ in widths]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([one[..., :width] for one, width in zip(parts, widths, strict=True)], dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        start, stop = ctx.bounds
        return gradients[0][..., start:stop].contiguous(), None, None
