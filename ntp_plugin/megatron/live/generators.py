"""Every generator of random numbers that a Megatron process has, as a manifest takes it, and put back as it tells it.

Those of torch, NumPy and Python, that of the device, and Megatron's own by name (what tensor-parallel regions draw
from). They belong to a slot: a process that takes over what another held keeps its own.
"""

import array
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker


def states() -> dict[str, Any]:
    """As they are now."""
    name, keys, *rest = np.random.get_state(legacy=True)
    version, numbers, last = random.getstate()
    return {
        "torch": _told(torch.get_rng_state()),
        "device": _told(torch.cuda.get_rng_state()),
        "megatron": {of: _told(state) for of, state in get_cuda_rng_tracker().get_states().items()},
        "numpy": [name, np.asarray(keys).tobytes(), *rest],
        "python": [version, array.array("I", numbers).tobytes(), last],
    }


def put_back(told: Mapping[str, Any]) -> None:
    """Have them so again."""
    torch.cuda.set_rng_state(_heard(told["device"]))
    torch.set_rng_state(_heard(told["torch"]))
    get_cuda_rng_tracker().set_states({of: _heard(state) for of, state in told["megatron"].items()})
    name, keys, *rest = told["numpy"]
    np.random.set_state((name, np.frombuffer(bytes.fromhex(keys), dtype=np.uint32), *rest))
    version, numbers, last = told["python"]
    if isinstance(numbers, str):  # earlier versions of the plugin told them one by one
        numbers = array.array("I", bytes.fromhex(numbers))
    random.setstate((version, tuple(numbers), last))


def names() -> list[str]:
    """Of Megatron's own; those of CUDA graphs are objects that cannot be told."""
    found = get_cuda_rng_tracker().get_states().items()
    return [
        f"drawn {of}" if isinstance(state, torch.Tensor) else f"the generator {of} of graphs" for of, state in found
    ]


def _told(state: torch.Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def _heard(told: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytes.fromhex(told), dtype=np.uint8).copy())
