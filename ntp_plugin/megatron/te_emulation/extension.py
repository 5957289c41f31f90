"""The module that stands for TransformerEngine's compiled extension, `transformer_engine_torch`."""

import enum
import types
from typing import Any

from ntp_plugin.megatron.te_emulation import attention, kernels, quantized

NAME = "transformer_engine_torch"

_NUMBERS = {
    "DType": {
        "kByte": 0,
        "kInt32": 2,
        "kFloat32": 4,
        "kFloat16": 5,
        "kBFloat16": 6,
        "kFloat8E4M3": 7,
        "kFloat8E5M2": 8,
        "kFloat4E2M1": 10,
    },
    "NVTE_Fused_Attn_Backend": {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2},
}
"""Enums whose numbers mean something to TransformerEngine's Python."""

_NAMES = {
    "CommOverlapType": "RS AG",
    "CommOverlapAlgo": "BULK_OVERLAP_AG BULK_OVERLAP_RS SPLIT_PIPELINED_AG_P2P SPLIT_PIPELINED_RS "
    "SPLIT_PIPELINED_RS_P2P ATOMIC_GEMM_RS ATOMIC_GEMM_AG_P2P ATOMIC_GEMM_RS_P2P EXTERNAL_BULK_OVERLAP_AG",
    "FP8FwdTensors": "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT GEMM3_INPUT "
    "GEMM3_WEIGHT GEMM3_OUTPUT",
    "FP8BwdTensors": "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3",
    "NVTEScalingMode": "NVTE_DELAYED_TENSOR_SCALING NVTE_MXFP8_1D_SCALING NVTE_BLOCK_SCALING_1D "
    "NVTE_BLOCK_SCALING_2D NVTE_NVFP4_1D_SCALING NVTE_INVALID_SCALING",
    "Float8BlockScaleTensorFormat": "GEMM_READY COMPACT",
    "NVTE_Bias_Type": "NVTE_NO_BIAS NVTE_PRE_SCALE_BIAS NVTE_POST_SCALE_BIAS NVTE_ALIBI",
    "NVTE_Mask_Type": "NVTE_NO_MASK NVTE_PADDING_MASK NVTE_CAUSAL_MASK NVTE_PADDING_CAUSAL_MASK "
    "NVTE_CAUSAL_BOTTOM_RIGHT_MASK NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
    "NVTE_Softmax_Type": "NVTE_VANILLA_SOFTMAX NVTE_OFF_BY_ONE_SOFTMAX NVTE_LEARNABLE_SOFTMAX",
    "NVTE_QKV_Format": "NVTE_SBHD NVTE_BSHD NVTE_THD NVTE_BSHD_2SBHD NVTE_SBHD_2BSHD NVTE_THD_2BSHD NVTE_THD_2SBHD "
    "NVTE_BHSD NVTE_QKV_Format_NOT_SET",
    "NVTE_QKV_Layout": "NVTE_SB3HD NVTE_SBH3D NVTE_SBHD_SB2HD NVTE_SBHD_SBH2D NVTE_SBHD_SBHD_SBHD NVTE_BS3HD "
    "NVTE_BSH3D NVTE_BSHD_BS2HD NVTE_BSHD_BSH2D NVTE_BSHD_BSHD_BSHD NVTE_T3HD NVTE_TH3D NVTE_THD_T2HD NVTE_THD_TH2D "
    "NVTE_THD_THD_THD NVTE_SBHD_BSHD_BSHD NVTE_BSHD_SBHD_SBHD NVTE_THD_BSHD_BSHD NVTE_THD_SBHD_SBHD "
    "NVTE_Paged_KV_BSHD_BSHD_BSHD NVTE_Paged_KV_BSHD_SBHD_SBHD NVTE_Paged_KV_SBHD_BSHD_BSHD "
    "NVTE_Paged_KV_SBHD_SBHD_SBHD NVTE_Paged_KV_THD_BSHD_BSHD NVTE_Paged_KV_THD_SBHD_SBHD NVTE_BHSD_BHSD_BHSD "
    "NVTE_QKV_Layout_NOT_SET",
    "NVTERoutingMapFormat": "BYTEMAP BITMAP_U8",
    "NVTEQBHistogramMode": "TWO_KERNEL FUSED_ATOMIC",
}
"""Enums that are only compared with themselves: the numbers follow the order."""

_CLASSES = ("FP8TensorMeta", "CommOverlap", "CommOverlapP2P", "CommOverlapHelper", "CommOverlapBase", "CommGemmOverlap")
"""Classes that are named in annotations, and made only for what the emulation has not."""

_FUNCTIONS = (
    kernels.generic_gemm,
    kernels.te_general_grouped_gemm,
    kernels.layernorm_fwd,
    kernels.layernorm_bwd,
    kernels.rmsnorm_fwd,
    kernels.rmsnorm_bwd,
    kernels.rmsnorm_bwd_add,
    kernels.scaled_softmax_forward,
    kernels.scaled_softmax_backward,
    kernels.scaled_masked_softmax_forward,
    kernels.scaled_upper_triang_masked_softmax_forward,
    kernels.fused_rope_forward,
    kernels.fused_rope_backward,
    kernels.multi_tensor_l2norm,
    kernels.multi_tensor_unscale_l2norm,
    kernels.multi_tensor_scale,
    kernels.multi_tensor_scale_tensor,
    kernels.multi_tensor_adam,
    kernels.multi_tensor_sgd,
    attention.get_fused_attn_backend,
    attention.fused_attn_fwd,
    attention.fused_attn_bwd,
    kernels.bgrad_quantize,
    quantized.quantize,
    quantized.dequantize,
    quantized.create_empty_quantized_tensor,
    quantized.fp8_transpose,
    quantized.compute_amax,
    quantized.fused_amax_and_scale_update_after_reduction,
    kernels.splits_to_offsets,
    kernels.get_cudnn_version,
    kernels.get_cublasLt_version,
    kernels.get_num_cublas_streams,
    kernels.device_supports_multicast,
    kernels.ubuf_built_with_mpi,
)


class _Extension(types.ModuleType):
    """The module; what it has not is a function that says so when it is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: Any, **__: Any) -> Any:
            raise kernels.unsupported(name)

        missing.__name__ = name
        return missing


def build() -> types.ModuleType:
    """The extension, with all that the emulation has of it."""
    module = _Extension(NAME, "TransformerEngine's extension, in torch (ntp_plugin's CPU emulation).")
    for name, numbers in _NUMBERS.items():
        setattr(module, name, enum.IntEnum(name, numbers))
    for name, members in _NAMES.items():
        setattr(module, name, enum.IntEnum(name, {member: at for at, member in enumerate(members.split())}))
    for name in _CLASSES:
        setattr(module, name, type(name, (), {}))
    for function in _FUNCTIONS:
        setattr(module, function.__name__, function)
    for name in ("scaled_masked", "scaled_upper_triang_masked", "scaled_aligned_causal_masked"):
        setattr(module, f"{name}_softmax_backward", kernels.scaled_softmax_backward)
    module.scaled_aligned_causal_masked_softmax_forward = kernels.scaled_upper_triang_masked_softmax_forward  # type: ignore[attr-defined]
    for name, activation in kernels.ACTIVATIONS.items():
        setattr(module, name, kernels.forward_of(activation))
        setattr(module, f"d{name}", kernels.backward_of(activation))
        setattr(module, f"dbias_d{name}", kernels.backward_with_bias_of(activation))
    return module
