"""Dtypes that DeepSpeed trains in with masters in float32."""

import pytest
import torch

NEEDS_FLOAT16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    reason="DeepSpeed does not train in float16 on this processor",
)
HALVES = ["bfloat16", pytest.param("float16", marks=NEEDS_FLOAT16)]
