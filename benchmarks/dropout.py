"""Measure what exact masks cost: our dropout against torch's on this machine, in pairs, forward and backward.

python -m benchmarks.dropout
"""

import functools
import statistics
import time
from collections.abc import Callable

import torch

from ntp_plugin.training.dropout import dropout, row_keys, stream

PAIRS = 21
P = 0.1
SHAPES = {
    "attention, 4 heads of 64 x 64": (1, 4, 64, 64),
    "attention, 8 heads of 512 x 512": (1, 8, 512, 512),
    "hidden, 1024 rows of 4096": (1024, 1, 4096),
}
WHICH = stream(1234, "benchmark")


def ours(x: torch.Tensor) -> torch.Tensor:
    return dropout(x, P, row_keys(WHICH, *(torch.arange(size, device=x.device) for size in x.shape[:-1])))


def theirs(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x, P)


def seconds(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
    """Forward and backward once."""
    start = time.perf_counter()
    torch.autograd.backward(function(x), torch.ones_like(x))
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{device}, {torch.get_num_threads()} threads, median of {PAIRS} pairs")
    for what, shape in SHAPES.items():
        x = torch.randn(shape, device=device, requires_grad=True)
        measured = functools.partial(seconds, x=x)
        pairs = [(measured(ours), measured(theirs)) for _ in range(PAIRS)]
        mine, torchs = (statistics.median(side) * 1e6 for side in zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        print(f"{what:34} ours {mine:9.0f} us   torch {torchs:9.0f} us   ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
