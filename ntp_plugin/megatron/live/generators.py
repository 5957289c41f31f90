"""Saves and restores the random number generators of a Megatron process, in the form of a manifest.

These are the generators of torch, NumPy and Python, that of the device, and Megatron's own by name, from which
tensor-parallel regions draw. They belong to a slot: a process that takes over another slot's state keeps its own.
"""

import array
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker


def states() -> dict[str, Any]:
    """Return the current states."""
    name, keys, *rest = np.random.get_state(legacy=True)
    version, numbers, last = random.getstate()
    return {
        "torch": _to_bytes(torch.get_rng_state()),
        "device": _to_bytes(torch.cuda.get_rng_state()),
        "megatron": {of: _to_bytes(state) for of, state in get_cuda_rng_tracker().get_states().items()},
        "numpy": [name, np.asarray(keys).tobytes(), *rest],
        "python": [version, array.array("I", numbers).tobytes(), last],
    }


def put_back(saved: Mapping[str, Any]) -> None:
    """Restore these states."""
    torch.cuda.set_rng_state(_from_hex(saved["device"]))
    torch.set_rng_state(_from_hex(saved["torch"]))
    get_cuda_rng_tracker().set_states({of: _from_hex(state) for of, state in saved["megatron"].items()})
    name, keys, *rest = saved["numpy"]
    np.random.set_state((name, np.frombuffer(bytes.fromhex(keys), dtype=np.uint32), *rest))
    version, numbers, last = saved["python"]
    if isinstance(numbers, str):  # earlier versions of the plugin saved them one by one
        numbers = array.array("I", bytes.fromhex(numbers))
    random.setstate((version, tuple(numbers), last))


def names() -> list[str]:
    """Return the names of Megatron's own generators; those of CUDA graphs are objects that cannot be saved."""
    found = get_cuda_rng_tracker().get_states().items()
    return [
        f"drawn {of}" if isinstance(state, torch.Tensor) else f"the generator {of} of graphs" for of, state in found
    ]


def _to_bytes(state: torch.Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def _from_hex(digits: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytes.fromhex(digits), dtype=np.uint8).copy())
