"""Makes TransformerEngine forget what belonged to the layout before a recovery: the sizes of groups that were edited,
which it caches by the group's handle, and the weights that it has quantized."""

import sys
from collections.abc import Sequence
from typing import Any

_MODULE = "transformer_engine.pytorch.distributed"
_CACHED = ("get_distributed_world_size", "get_distributed_rank")


def forget_group_sizes() -> None:
    """Have TransformerEngine ask groups for their size and this rank's place again.

    A layer that is built after a loss would divide by the width of before.
    """
    module = sys.modules.get(_MODULE)
    for name in _CACHED if module is not None else ():
        getattr(module, name).cache_clear()


def forget_quantized_weights(chunks: Sequence[Any]) -> None:
    """Have layers quantize their weights again: those that FP8 keeps for the micro-batches of a step have the old
    shapes."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(kept := getattr(module, "_fp8_workspaces", None), dict):
                kept.clear()
