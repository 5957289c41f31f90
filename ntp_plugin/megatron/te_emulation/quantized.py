"""FP8 tensors of TransformerEngine, one scale for each tensor: how they are made, read, transposed and scaled.

Values are rounded to torch's own float8 types, exactly as on a GPU. A product of two FP8 matrices is emulated: they are
dequantized and multiplied in float32 (`kernels.generic_gemm`), where a tensor core adds in its own order and
precision. The rules for shapes are the GPU's, so that a layout which breaks them fails here, too.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

type Tensor = torch.Tensor

ALIGNED = 16
"""A row of an FP8 matrix is a multiple of this many values, for cuBLAS; in either direction that a product reads."""

_FLOAT8 = {7: torch.float8_e4m3fn, 8: torch.float8_e5m2}
"""The extension's number for an FP8 type -> torch's type."""
_KINDS = ("Float8Quantizer", "Float8CurrentScalingQuantizer")


def is_quantized(tensor: Any) -> bool:
    """Whether this is an FP8 tensor with one scale: TransformerEngine's plain storage of one, or its tensor class."""
    return hasattr(tensor, "_fp8_dtype") and hasattr(tensor, "_transpose")


def largest(number: Any) -> float:
    """The largest finite value of an FP8 type."""
    return float(torch.finfo(_FLOAT8[int(number)]).max)


def cast(x: Tensor, scale: Tensor, number: Any) -> Tensor:
    """The bytes of `x * scale` in an FP8 type; what is too large becomes the largest value."""
    limit = largest(number)
    return (_single(x) * scale).clamp(-limit, limit).to(_FLOAT8[int(number)]).view(torch.uint8)


def from_bytes(data: Tensor, scale_inv: Tensor, number: Any) -> Tensor:
    """The values that these bytes stand for."""
    return _single(data.view(_FLOAT8[int(number)])) * scale_inv


def scale_of(amax: Tensor, number: Any, *, power_of_two: bool = False, epsilon: float = 0.0) -> Tensor:
    """The scale that takes the largest absolute value to the largest value of an FP8 type."""
    scale = largest(number) / amax.clamp(min=epsilon)
    scale = torch.where(scale.isinf(), torch.full_like(scale, torch.finfo(scale.dtype).max), scale)
    if power_of_two:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return torch.where((amax > 0) & amax.isfinite(), scale, torch.ones_like(scale))


def quantize(x: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """`x` as an FP8 tensor, in `output` where there is one; `noop` leaves that as it is."""
    if output is None:
        output = create_empty_quantized_tensor(quantizer, x.shape, x.dtype, x.device)
    elif noop is not None and bool(noop.any()):
        return output
    scale = _scale_for(x, quantizer)
    data = cast(x, scale, quantizer.dtype)
    if output._data is not None:
        output._data.copy_(data.reshape(output._data.shape))
    if output._transpose is not None:
        output._transpose.copy_(fp8_transpose(data, quantizer.dtype).reshape(output._transpose.shape))
        output._transpose_invalid = False
    output._scale_inv = (1 / scale).reshape(output._scale_inv.shape)
    output._fp8_dtype = quantizer.dtype
    return output


def _scale_for(x: Tensor, quantizer: Any) -> Tensor:
    """The scale of this tensor; where scaling is delayed, its largest absolute value is kept for the next one."""
    amax = _single(x).abs().max() if x.numel() else torch.zeros((), device=x.device)
    if type(quantizer).__name__ == "Float8Quantizer":
        quantizer.amax.copy_(torch.maximum(quantizer.amax, amax))
        scale: Tensor = quantizer.scale
        return scale
    if quantizer.with_amax_reduction:
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=quantizer.amax_reduction_group)
    power, epsilon = quantizer.force_pow_2_scales, quantizer.amax_epsilon
    return scale_of(amax, quantizer.dtype, power_of_two=power, epsilon=epsilon)


def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any, pin_memory: bool = False
) -> Any:
    """An FP8 tensor without values, with room for the directions that its quantizer is set to."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor  # noqa: PLC0415  (imports this module)
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import (  # noqa: PLC0415
        Float8TensorStorage,
    )

    if type(quantizer).__name__ not in _KINDS:
        raise NotImplementedError(
            f"{type(quantizer).__name__} of TransformerEngine has no counterpart in the CPU emulation"
        )
    shape = tuple(shape)
    across = (shape[-1], *shape[:-1])
    kept: dict[str, Any] = {
        "data": torch.empty(shape, dtype=torch.uint8) if quantizer.rowwise_usage else None,
        "data_transpose": torch.empty(across, dtype=torch.uint8) if quantizer.columnwise_usage else None,
        "fp8_scale_inv": torch.ones(1, dtype=torch.float32),
        "fp8_dtype": quantizer.dtype,
        "quantizer": quantizer,
    }
    if quantizer.internal:
        return Float8TensorStorage(**kept, fake_dtype=dtype)
    return Float8Tensor(shape=shape, dtype=dtype, **kept, device=torch.device("cpu"))


def dequantize(tensor: Any, dtype: torch.dtype) -> Tensor:
    """The values of an FP8 tensor."""
    return from_bytes(tensor._data, tensor._scale_inv, tensor._fp8_dtype).to(dtype)


def fp8_transpose(data: Tensor, number: Any, *, out: Tensor | None = None) -> Tensor:
    """The bytes with the last dimension first."""
    across = data.movedim(-1, 0).contiguous()
    return across if out is None else out.copy_(across)


def compute_amax(x: Tensor, amax: Tensor) -> None:
    """Write the largest absolute value into `amax`."""
    amax.copy_(_single(x).abs().max().reshape(amax.shape))


def operand(tensor: Any, *, across: bool, what: str) -> Tensor:
    """The values of a factor of a product, which reads it along its rows or, `across`, along its columns.

    Raises:
        NotImplementedError: A GPU could not multiply it: bytes in that direction are not there, or rows are not
            aligned.
    """
    if not is_quantized(tensor):
        return tensor  # type: ignore[no-any-return]
    number = tensor._fp8_dtype
    data = None if across and tensor._transpose_invalid else tensor._transpose if across else tensor._data
    if data is None:
        raise NotImplementedError(f"an FP8 product reads {what} in a direction that it has not been quantized in")
    row = math.prod(data.shape[1:]) if across else data.shape[-1]
    if row % ALIGNED:
        raise NotImplementedError(f"an FP8 product has rows of {row} values in {what}, no multiple of {ALIGNED}")
    values = from_bytes(data, tensor._scale_inv, number)
    return values.movedim(0, -1) if across else values


def fused_amax_and_scale_update_after_reduction(
    reduced: Tensor,
    histories: Sequence[Tensor],
    scales: Sequence[Tensor],
    algorithm: str,
    number: Any,
    margin: float,
) -> None:
    """Put the reduced maxima into the histories, and compute the scales of the next micro-batch from them."""
    limit = largest(number) * 2.0**-margin
    of_each = torch.split(reduced, [history.shape[1] for history in histories])
    for latest, history, scale in zip(of_each, histories, scales, strict=True):
        newest = torch.where(latest != 0, latest, history[0])
        rolled = torch.cat((history[1:], newest[None]))
        amax = rolled.max(0).values if algorithm == "max" else newest
        rolled[0] = 0
        history.copy_(rolled)
        wanted = torch.where((amax > 0) & amax.isfinite(), limit / amax, scale)
        scale.copy_(wanted.clamp(max=torch.finfo(torch.float32).max))


def _single(x: Tensor) -> Tensor:
    """In the precision that casts compute in: float32, or what the emulation takes for it."""
    return x.to(torch.get_default_dtype())
