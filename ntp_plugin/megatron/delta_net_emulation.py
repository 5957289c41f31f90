"""The functions of flash-linear-attention that gated delta nets call, in torch: the real ones are for a GPU.

Part of CPU emulation (`cpu_emulation.py`). The delta rule itself is Megatron's own, of `--deterministic-mode`.
"""

from typing import Any

import torch
from torch.nn import functional

from ntp_plugin.patching import Replacement

_PACKAGE = "megatron.core.ssm.gated_delta_net"


def of_unit_length(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """`l2norm`: divide by the length of the last dim."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def causal_convolution(
    *, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, cu_seqlens: Any, **_: Any
) -> tuple[torch.Tensor, None]:
    """`causal_conv1d`: convolve each channel with its own weights over earlier positions.

    Args:
        x: Batch, sequence, channels.
        weight: Channels, positions.
        bias: Of each channel.
        activation: What follows; Megatron asserts that it is SiLU.
        cu_seqlens: Where packed sequences begin, which are not emulated.
    """
    assert activation in ("silu", "swish"), "as Megatron asserts"
    assert cu_seqlens is None, "packed sequences need the kernel"
    channels, width = weight.shape
    convolved = functional.conv1d(x.transpose(1, 2), weight[:, None], bias, padding=width - 1, groups=channels)
    return functional.silu(convolved[..., : x.shape[1]]).transpose(1, 2), None


def _of_megatron(_: Any) -> Any:
    from megatron.core.ssm.gated_delta_net.common import torch_chunk_gated_delta_rule  # noqa: PLC0415  (at install)

    return torch_chunk_gated_delta_rule


DELTA_NET: tuple[Replacement, ...] = (
    Replacement(
        target=f"{_PACKAGE}.common:HAVE_FLA",
        why="the layer refuses to be built without the package",
        make=lambda _: True,
    ),
    Replacement(target=f"{_PACKAGE}.common:l2norm", why="a kernel for a GPU", make=lambda _: of_unit_length),
    Replacement(target=f"{_PACKAGE}.gdn:causal_conv1d", why="a kernel for a GPU", make=lambda _: causal_convolution),
    Replacement(target=f"{_PACKAGE}.gdn:chunk_gated_delta_rule", why="a kernel for a GPU", make=_of_megatron),
)
