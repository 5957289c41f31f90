"""What is replaced in TransformerEngine's own Python so that its fused attention, and the ring over it, runs on a CPU.

Two checks accept half precision alone, as a GPU's kernels do; a job of the emulation computes in float32 or float64.
And the ring waits for some requests twice, which is nothing to NCCL and never ends with gloo.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from ntp_plugin.patching import Replacement

_ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention"


def _as_if_half(original: Callable[..., Any]) -> Callable[..., Any]:
    """`get_attention_backend`, which chooses for tensors of more precision as it does for bfloat16."""

    @functools.wraps(original)
    def choose(wanted: Any) -> Any:
        if wanted.qkv_dtype in (torch.float32, torch.float64):
            wanted = dataclasses.replace(wanted, qkv_dtype=torch.bfloat16)
        return original(wanted)

    return choose


class _AnyDtype:
    """Equals each dtype."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, torch.dtype)

    def __hash__(self) -> int:
        return hash(_AnyDtype)


class _TorchOfAnyDtype:
    """torch, for a module that names bfloat16 only to compare with it."""

    bfloat16 = _AnyDtype()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Request:
    """A request whose second `wait` returns at once."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait()


def _waited_for_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """`flash_attn_p2p_communicate`, whose requests may be waited for twice."""

    @functools.wraps(original)
    def communicate(*args: Any, **kwargs: Any) -> list[_Request]:
        return [_Request(work) for work in original(*args, **kwargs)]

    return communicate


ATTENTION_CALLS: tuple[Replacement, ...] = (
    Replacement(
        target=f"{_ATTENTION}.utils:get_attention_backend",
        why="it offers fused attention to half precision alone",
        make=_as_if_half,
    ),
    Replacement(
        target=f"{_ATTENTION}.backends:torch",
        why="FusedAttention asserts that its inputs are in half precision",
        make=lambda _: _TorchOfAnyDtype(),
    ),
    Replacement(
        target=f"{_ATTENTION}.context_parallel:flash_attn_p2p_communicate",
        why="the ring's backward waits for each request twice, and a second wait for one of gloo's never ends",
        make=_waited_for_once,
    ),
)
