"""A vocabulary that AutoTP has cut without gathering: an output layer, the embedding that is tied to it, and the loss.

Each slot has the logits of its rows, and the model's loss is one of DeepSpeed's that sums over the slots. All three
have recorded which rows these are, and the loss refuses a change of them. So it is set as if it had just seen the new
rows. Only the whole embedding knows its padding row, which is remembered when the embedding is cut.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from deepspeed.module_inject.layers import VocabParallelEmbedding, VocabParallelLinear
from deepspeed.sequence.cross_entropy import VocabParallelCausalLMLoss

LAYERS = (VocabParallelLinear, VocabParallelEmbedding)
_PADDING = "ntp_row_of_padding"
_SEEN = ("tp_group", "vocab_start_index", "vocab_end_index", "_resolved_vocab_key", "_resolved_global_vocab_size")
"""Attributes in which the loss has recorded the rows."""


def remembered_padding(original: Any) -> Any:
    """`VocabParallelEmbedding.__init__`."""

    @functools.wraps(original)
    def build(layer: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        original(layer, module, *args, **kwargs)
        setattr(layer, _PADDING, module.padding_idx)

    return build


class CutVocabulary:
    """The cut vocabulary of a model, if it has one."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._layers: list[Any] = [module for module in model.modules() if type(module) in LAYERS]
        loss = getattr(model, "loss_function", None)
        self._loss = loss if isinstance(loss, VocabParallelCausalLMLoss) else None

    def tell(self, place: int, sizes: Sequence[int], device: torch.device) -> None:
        """Set the layers up for the part at position `place`, of parts of these sizes."""
        start, stop = sum(sizes[:place]), sum(sizes[: place + 1])
        for layer in self._layers:
            layer.vocab_start_index, layer.vocab_end_index = start, stop
            if type(layer) is VocabParallelEmbedding:
                padding = getattr(layer, _PADDING)
                is_here = padding is not None and start <= padding < stop
                layer.padding_idx = padding - start if is_here else None
        if self._loss is not None:
            self._see(self._loss.tp_group, start, stop, sum(sizes), device)

    def _see(self, group: Any, start: int, stop: int, rows: int, device: torch.device) -> None:
        loss: Any = self._loss
        loss.tp_group, loss.vocab_start_index, loss.vocab_end_index = group, start, stop
        loss._resolved_vocab_key = (group, device, stop - start, start, stop)
        loss._resolved_global_vocab_size = rows

    @contextlib.contextmanager
    def alone(self, rows: int, device: torch.device) -> Iterator[None]:
        """Have the loss cover all rows, without the other slots."""
        if self._loss is None:
            yield
            return
        seen = {name: getattr(self._loss, name) for name in _SEEN}
        self._see(None, 0, rows, rows, device)
        try:
            yield
        finally:
            for name, value in seen.items():
                setattr(self._loss, name, value)
