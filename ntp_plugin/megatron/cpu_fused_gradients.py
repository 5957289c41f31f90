"""Apex's extension that multiplies a weight's gradient and adds it to `main_grad`, in torch, for the CPU emulation.

Megatron needs it for `--defer-embedding-wgrad-compute`. Everywhere else the emulation leaves the fusion out.
"""

import sys
import types

import torch

NAME = "fused_weight_gradient_mlp_cuda"


def install() -> None:
    """Have Megatron find the extension, whether its layers are imported already or not."""
    module = types.ModuleType(NAME)
    for kernel in ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16"):
        setattr(module, kernel, _multiply_and_add)
    sys.modules.setdefault(NAME, module)
    layers = sys.modules.get("megatron.core.tensor_parallel.layers")
    if layers is not None:
        vars(layers).update({NAME: module, "_grad_accum_fusion_available": True})


def _multiply_and_add(inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    main_grad.add_(grad_output.t().matmul(inputs).to(main_grad.dtype))
