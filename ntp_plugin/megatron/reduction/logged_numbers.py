"""The numbers that Megatron logs of gradients and parameters, where the optimizer steps lane shards.

Megatron counts zeros and sums squares over what its own optimizers step, tensor by tensor, and waits for ranks that are
idle here. A lane shard has parts of many tensors and may end in pads. Every element of the model is in one shard of one
rank, so both numbers are sums over all ranks that train.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from ntp_plugin.reduction.sharded_optimizer import LaneShard


def zeros_in(shards: list[LaneShard], *, device: torch.device, everybody: dist.ProcessGroup | None) -> int:
    """Return how many elements of the model have a gradient of zero; all ranks that train call this together."""
    zeros = torch.zeros(1, dtype=torch.int64, device=device)
    for shard in shards:
        gradient = shard.gradient[: shard.own_elements]
        zeros += gradient.numel() - torch.count_nonzero(gradient)
    dist.all_reduce(zeros, group=everybody)
    return int(zeros)


def norm_of(values: Iterable[torch.Tensor], *, device: torch.device, everybody: dist.ProcessGroup | None) -> float:
    """Return the norm of what all ranks that train have together; they call this together."""
    squares = torch.zeros(1, dtype=torch.float64, device=device)
    for part in values:
        squares += torch.linalg.vector_norm(part, dtype=torch.float64).square()
    dist.all_reduce(squares, group=everybody)
    return float(squares.sqrt())
