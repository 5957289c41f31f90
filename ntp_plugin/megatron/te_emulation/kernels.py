"""The functions of TransformerEngine's extension, in torch: the same arguments, the same results.

Arguments that choose between GPU kernels (workspaces, SM margins, streams) are taken and not used. Matrices follow
cuBLAS: `generic_gemm(A, transa, B, transb)` is `op(B) @ op(A)` for row-major tensors.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as nn

from ntp_plugin.megatron.te_emulation.quantized import is_quantized, operand, quantize

type Tensor = torch.Tensor
type Activation = Callable[[Tensor], Tensor]

_DTYPES = {0: "uint8", 2: "int32", 4: "float32", 5: "float16", 6: "bfloat16"}
"""The extension's number for a dtype -> torch's name of it. In the float64 mode of the emulation, some names mean
doubles."""


def dtype_of(number: Any, default: torch.dtype) -> torch.dtype:
    """Torch's dtype for one of the extension; torch's own are accepted as they are."""
    if number is None:
        return default
    if isinstance(number, torch.dtype):
        return number
    found: torch.dtype = getattr(torch, _DTYPES[int(number)])
    return found


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _into(out: Tensor | None, value: Tensor, *, accumulate: bool = False) -> Tensor:
    """`value`, in `out` where there is one."""
    if out is None:
        return value
    if accumulate:
        return out.add_(value.reshape(out.shape))
    return out.copy_(value.reshape(out.shape))


# ---------------------------------------------------------------- matrices


def generic_gemm(
    a: Any,
    transa: bool,
    b: Any,
    transb: bool,
    out: Any,
    quantizer: Any,
    out_dtype: Any,
    bias: Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    *,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Any, Tensor | None, Tensor | None, Tensor | None]:
    """`op(b) @ op(a)`, with a bias added or its gradient, and GELU or its gradient. FP8 factors are multiplied in
    float32.

    Returns:
        The product, the gradient of the bias (`grad`), the input of GELU, and `extra_output` as it came.
    """
    _refuse(comm_overlap is not None, "generic_gemm with userbuffers")
    dtype = torch.get_default_dtype() if is_quantized(b) else b.dtype
    a, b = operand(a, across=not transa, what="its first factor"), operand(b, across=transb, what="its second factor")
    left, right = _flat(b), _flat(a)
    product = torch.mm(left.t() if transb else left, right.t() if transa else right)
    if alpha != 1.0:
        product = product * alpha
    if bias is not None and not grad:
        product = product + bias
    bias_gradient = left.sum(0).to(bias.dtype) if bias is not None and grad else None
    before_gelu = None
    if gelu and grad:
        assert gelu_in is not None, "the gradient of GELU needs its input"
        product = derived(gelu_tanh, _flat(gelu_in), product)
    elif gelu:
        before_gelu, product = product, gelu_tanh(product)
    product = product.to(dtype_of(out_dtype, dtype))
    if not transb:
        product = product.reshape(*b.shape[:-1], product.shape[-1])
    if accumulate and beta not in (None, 1.0):
        assert out is not None, "there is something to accumulate into"
        out.mul_(beta)
    if quantizer is not None:
        _refuse(accumulate, "generic_gemm that adds to a quantized output")
        return quantize(product, quantizer, out), bias_gradient, before_gelu, extra_output
    return _into(out, product, accumulate=accumulate), bias_gradient, before_gelu, extra_output


def te_general_grouped_gemm(
    a: Sequence[Tensor],
    transa: bool,
    b: Sequence[Tensor],
    transb: bool,
    out: Sequence[Tensor],
    out_dtype: Any,
    m_splits: Sequence[int],
    bias: Sequence[Tensor],
    bias_dtype: Any,
    single_output: bool,
    gelu_in: Sequence[Tensor] | None,
    grad: bool,
    workspaces: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    sm_count: int,
) -> Sequence[Tensor]:
    """One `generic_gemm` for each group; with `single_output` the products lie one after the other in `out[0]`."""
    _refuse(any(one.numel() for one in gelu_in or ()), "te_general_grouped_gemm with GELU")
    parts = list(torch.split(out[0], list(m_splits))) if single_output else list(out)
    for number, (one, other) in enumerate(zip(a, b, strict=True)):
        its_bias = bias[number] if len(bias) and bias[number] is not None and bias[number].numel() else None
        if other.numel() == 0:
            if not accumulate:
                parts[number].zero_()
            if grad and its_bias is not None:
                its_bias.zero_()
            continue
        _, bias_gradient, _, _ = generic_gemm(
            *(one, transa, other, transb, parts[number], None, out_dtype, its_bias, bias_dtype, False, None, grad),
            *(None, 0, accumulate, use_split_accumulator),
        )
        if bias_gradient is not None and its_bias is not None:
            its_bias.copy_(bias_gradient)
    return bias


# ---------------------------------------------------------------- norms


def _scale(weight: Tensor, zero_centered: bool) -> Tensor:
    return _wide(weight) + 1 if zero_centered else _wide(weight)


def _wide(tensor: Tensor) -> Tensor:
    """In the precision that kernels compute in: float32, or what the emulation takes for it."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.get_default_dtype()))


def _normed(out: Any, result: Tensor, quantizer: Any, dtype: torch.dtype) -> Any:
    """The result of a norm: in its dtype, or quantized."""
    result = result.to(dtype)
    return _into(out, result) if quantizer is None else quantize(result, quantizer, out)


def layernorm_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    sm_margin: int,
    zero_centered: bool,
) -> tuple[Any, Tensor, Tensor]:
    """LayerNorm over the last dimension; returns the result, the means and the reciprocal deviations.

    With a quantizer the result is an FP8 tensor; so with the other functions that take one.
    """
    wide = _wide(x)
    mean = wide.mean(-1)
    reciprocal = torch.rsqrt(wide.var(-1, unbiased=False) + eps)
    result = (wide - mean[..., None]) * reciprocal[..., None] * _scale(weight, zero_centered)
    if bias is not None:
        result = result + _wide(bias)
    return _normed(out, result, quantizer, dtype_of(out_dtype, x.dtype)), mean, reciprocal


def layernorm_bwd(
    gradient: Tensor,
    x: Tensor,
    mean: Tensor,
    reciprocal: Tensor,
    weight: Tensor,
    sm_margin: int,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the input, the weight and the bias of a LayerNorm."""
    wide = _wide(gradient)
    normed = (_wide(x) - mean[..., None]) * reciprocal[..., None]
    inner = wide * _scale(weight, zero_centered)
    of_x = reciprocal[..., None] * (
        inner - inner.mean(-1, keepdim=True) - normed * (inner * normed).mean(-1, keepdim=True)
    )
    return of_x.to(x.dtype), _flat(wide * normed).sum(0).to(weight.dtype), _flat(wide).sum(0).to(weight.dtype)


def rmsnorm_fwd(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    sm_margin: int,
    zero_centered: bool,
) -> tuple[Any, None, Tensor]:
    """RMSNorm over the last dimension; returns the result, nothing, and the reciprocal roots."""
    wide = _wide(x)
    reciprocal = torch.rsqrt(wide.square().mean(-1) + eps)
    result = wide * reciprocal[..., None] * _scale(weight, zero_centered)
    return _normed(out, result, quantizer, dtype_of(out_dtype, x.dtype)), None, reciprocal


def rmsnorm_bwd(
    gradient: Tensor, x: Tensor, reciprocal: Tensor, weight: Tensor, sm_margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of the input and the weight of an RMSNorm."""
    wide = _wide(gradient)
    normed = _wide(x) * reciprocal[..., None]
    inner = wide * _scale(weight, zero_centered)
    of_x = reciprocal[..., None] * (inner - normed * (inner * normed).mean(-1, keepdim=True))
    return of_x.to(x.dtype), _flat(wide * normed).sum(0).to(weight.dtype)


def rmsnorm_bwd_add(
    gradient: Tensor, x: Tensor, add: Tensor, reciprocal: Tensor, weight: Tensor, sm_margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """The same, with another gradient of the input added."""
    of_x, of_weight = rmsnorm_bwd(gradient, x, reciprocal, weight, sm_margin, zero_centered)
    return of_x + add, of_weight


# ---------------------------------------------------------------- activations


def derived(activation: Activation, x: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of an activation's input."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = activation(x)
    return torch.autograd.grad(y, x, gradient)[0]


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU in its tanh form."""
    return nn.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _squared_relu(x: Tensor) -> Tensor:
    return nn.relu(x).square()


def _gated(inner: Activation) -> Activation:
    def activation(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return inner(gate) * up

    return activation


ACTIVATIONS: dict[str, Activation] = {
    "gelu": gelu_tanh,
    "geglu": _gated(gelu_tanh),
    "qgelu": _quick_gelu,
    "qgeglu": _gated(_quick_gelu),
    "relu": nn.relu,
    "reglu": _gated(nn.relu),
    "srelu": _squared_relu,
    "sreglu": _gated(_squared_relu),
    "silu": nn.silu,
    "swiglu": _gated(nn.silu),
    "glu": _gated(torch.sigmoid),
}
"""Each is a function of the extension; `d<name>` is its gradient, `dbias_d<name>` that and the bias' as well."""


def _maybe_quantized(x: Tensor, quantizer: Any) -> Any:
    return x if quantizer is None else quantize(x, quantizer)


def forward_of(activation: Activation) -> Callable[..., Any]:
    """The extension's function for an activation."""

    def forward(x: Tensor, quantizer: Any = None) -> Any:
        return _maybe_quantized(activation(x), quantizer)

    return forward


def backward_of(activation: Activation) -> Callable[..., Any]:
    """The extension's function for the gradient of an activation's input."""

    def backward(gradient: Tensor, x: Tensor, quantizer: Any = None) -> Any:
        return _maybe_quantized(derived(activation, x, gradient), quantizer)

    return backward


def backward_with_bias_of(activation: Activation) -> Callable[..., tuple[Tensor, Any]]:
    """The extension's function for the gradients of a bias and of what an activation had as input."""

    def backward(gradient: Tensor, x: Tensor, quantizer: Any = None) -> tuple[Tensor, Any]:
        of_x = derived(activation, x, gradient)
        return _flat(of_x).sum(0), _maybe_quantized(of_x, quantizer)

    return backward


# ---------------------------------------------------------------- softmax


def scaled_softmax_forward(x: Tensor, scale: float) -> Tensor:
    """Softmax of scaled scores."""
    return torch.softmax(_wide(x) * scale, -1).to(x.dtype)


def scaled_masked_softmax_forward(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The same, without the scores that the mask has True for; a row without any has zeros."""
    scores = (_wide(x) * scale).masked_fill(mask.bool(), -math.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0).to(x.dtype)


def scaled_upper_triang_masked_softmax_forward(x: Tensor, scale: float) -> Tensor:
    """The same for causal attention: a row looks at itself and at those before it."""
    return scaled_masked_softmax_forward(x, _behind(x), scale)


def scaled_softmax_backward(gradient: Tensor, softmax: Tensor, scale: float) -> Tensor:
    """The gradient of the scores, for each of these."""
    wide, results = _wide(gradient), _wide(softmax)
    return (scale * results * (wide - (wide * results).sum(-1, keepdim=True))).to(gradient.dtype)


def _behind(x: Tensor) -> Tensor:
    rows, columns = x.shape[-2:]
    return torch.ones(rows, columns, dtype=torch.bool).triu(1 + columns - rows)


# ---------------------------------------------------------------- rotary positions


def _rotate_half(x: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _rotate_half_back(x: Tensor, interleaved: bool) -> Tensor:
    return -_rotate_half(x, interleaved)


def _angles(t: Tensor, freqs: Tensor, layout: Any) -> Tensor:
    """The angles of each position of a tensor, laid out as it is; `freqs` is (positions, 1, 1, rotated)."""
    name = getattr(layout, "name", str(layout))
    if name.endswith("SBHD"):
        return freqs[: t.shape[0]]
    if name.endswith("BSHD"):
        return freqs[: t.shape[1]].transpose(0, 1)
    raise unsupported(f"fused_rope with {name}")


def _rope(
    t: Tensor, freqs: Tensor, start: Any, layout: Any, interleaved: bool, lengths: Any, size: int, *, back: bool
) -> Tensor:
    _refuse(start is not None or lengths is not None or size > 1, "fused_rope with start positions, THD or CP")
    angles = _wide(_angles(t, freqs, layout))
    rotated = angles.shape[-1]
    inside, outside = _wide(t[..., :rotated]), t[..., rotated:]
    if back:
        turned = inside * angles.cos() + _rotate_half_back(inside * angles.sin(), interleaved)
    else:
        turned = inside * angles.cos() + _rotate_half(inside, interleaved) * angles.sin()
    return torch.cat((turned.to(t.dtype), outside), -1)


def fused_rope_forward(
    t: Tensor, freqs: Tensor, start: Any, layout: Any, interleaved: bool, lengths: Any, cp_size: int, cp_rank: int
) -> Tensor:
    """Rotate the first elements of each head by the angle of its position."""
    return _rope(t, freqs, start, layout, interleaved, lengths, cp_size, back=False)


def fused_rope_backward(
    gradient: Tensor, freqs: Tensor, start: Any, layout: Any, interleaved: bool, lengths: Any, size: int, rank: int
) -> Tensor:
    """Its gradient."""
    return _rope(gradient, freqs, start, layout, interleaved, lengths, size, back=True)


# ---------------------------------------------------------------- optimizers, over lists of tensors


def multi_tensor_l2norm(
    chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """The norm of all tensors together, and of each."""
    norms = [_wide(tensor).norm() for tensor in lists[0]]
    each = torch.stack(norms) if norms else torch.zeros(0)
    return each.norm().reshape(1), each if per_tensor else torch.zeros(0)


def multi_tensor_unscale_l2norm(
    chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], inverse_scale: Tensor, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """The same, of the tensors times `inverse_scale`."""
    total, each = multi_tensor_l2norm(chunk, overflow, lists, per_tensor)
    return total * inverse_scale, each * inverse_scale


def multi_tensor_scale(chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], scale: float) -> None:
    """Write the scaled tensors of the first list into the second; `overflow` becomes 1 where one is not finite."""
    for source, target in zip(*lists, strict=True):
        if not bool(torch.isfinite(source).all()):
            overflow.fill_(1)
        target.copy_(_wide(source) * scale)


def multi_tensor_scale_tensor(chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], scale: Tensor) -> None:
    """The same, by a number in a tensor."""
    multi_tensor_scale(chunk, overflow, lists, float(scale))


def multi_tensor_adam(
    chunk: int,
    overflow: Tensor,
    lists: Sequence[Sequence[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """A step of Adam (`mode` 0: decay in the gradient) or AdamW (1).

    The lists are gradients, parameters, first and second moments, and where parameters are of less precision their
    masters.
    """
    corrections = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    for gradient, parameter, first, second, *master in zip(*lists, strict=True):
        weight = master[0] if master else parameter
        wide, value = _wide(gradient), _wide(weight)
        if mode == 0 and weight_decay:
            wide = wide + weight_decay * value
        mean = beta1 * _wide(first) + (1 - beta1) * wide
        square = beta2 * _wide(second) + (1 - beta2) * wide * wide
        change = (mean / corrections[0]) / ((square / corrections[1]).sqrt() + eps)
        if mode == 1:
            change = change + weight_decay * value
        first.copy_(mean)
        second.copy_(square)
        weight.copy_(value - lr * change)
        if master:
            parameter.copy_(weight)


def multi_tensor_sgd(
    chunk: int,
    overflow: Tensor,
    lists: Sequence[Sequence[Tensor]],
    weight_decay: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    decay_after_momentum: bool,
    scale: float,
) -> None:
    """A step of SGD with momentum. The lists are gradients, parameters, momenta, and maybe copies of the parameters."""
    for gradient, parameter, moving, *copies in zip(*lists, strict=True):
        wide, value = _wide(gradient) * scale, _wide(parameter)
        if weight_decay and not decay_after_momentum:
            wide = wide + weight_decay * value
        if momentum:
            moving.copy_(wide if first_run else momentum * _wide(moving) + (1 - dampening) * wide)
            wide = wide + momentum * moving if nesterov else _wide(moving)
        if weight_decay and decay_after_momentum:
            wide = wide + weight_decay * value
        parameter.copy_(value - lr * wide)
        for copy in copies:
            copy.copy_(parameter)


# ---------------------------------------------------------------- small things


def bgrad_quantize(gradient: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """The gradient of a bias, and the gradient itself, quantized where there is a quantizer."""
    return _flat(gradient).sum(0), _maybe_quantized(gradient, quantizer)


def splits_to_offsets(splits: Tensor, factor: int = 1) -> Tensor:
    """Where each split begins, and the end of the last."""
    return torch.cat((torch.zeros(1, dtype=splits.dtype), splits.cumsum(0))) * factor


def get_cudnn_version() -> int:
    """One that TransformerEngine accepts."""
    return 91800


def get_cublasLt_version() -> int:  # noqa: N802  (the extension's name)
    """One that TransformerEngine accepts."""
    return 130000


def get_num_cublas_streams() -> int:
    """As many as on a GPU."""
    return 4


def device_supports_multicast(device: int = -1) -> bool:
    """No device here does."""
    return False


def ubuf_built_with_mpi() -> bool:
    """There are no userbuffers here."""
    return False


def unsupported(what: str) -> NotImplementedError:
    """The error for what the emulation has not."""
    return NotImplementedError(f"{what} of TransformerEngine has no counterpart in the CPU emulation")


def _refuse(present: bool, what: str) -> None:
    if present:
        raise unsupported(what)
