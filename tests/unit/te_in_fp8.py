"""TransformerEngine's own FP8 layers and quantizers in the CPU emulation, against torch. Run as a program: importing
TransformerEngine changes a process for good. Raises where something differs."""

import os
import sys

import torch
import torch.nn.functional as nn

from ntp_plugin.megatron import cpu_emulation

HIDDEN, ROWS, OUT = 32, 16, 48
LIMITS = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def rounded(x, scale, kind):
    """What is left of x after a cast and back."""
    return (x * scale).clamp(-LIMITS[kind], LIMITS[kind]).to(kind).float() / scale


def scale_for(x, kind, recipe):
    """The scale of a first micro-batch: 1 where scaling is delayed."""
    return torch.ones(()) if recipe == "delayed" else LIMITS[kind] / x.abs().max()


def layers(te, recipes):
    """A linear layer without and with a norm is three products of rounded matrices."""
    norms = (None, "RMSNorm", "LayerNorm")
    for name, recipe in recipes.items():
        for norm in norms:
            torch.manual_seed(3)
            layer = te.Linear(HIDDEN, OUT, bias=False) if norm is None else None
            layer = layer or te.LayerNormLinear(HIDDEN, OUT, bias=False, normalization=norm)
            x = torch.randn(ROWS, HIDDEN, requires_grad=True)
            with te.autocast(enabled=True, recipe=recipe):
                y = layer(x)
            gradient = torch.randn(ROWS, OUT) * 0.01
            y.backward(gradient)

            leaf = x.detach().requires_grad_()
            inner = leaf
            if norm == "RMSNorm":
                inner = nn.rms_norm(leaf, (HIDDEN,), torch.ones(HIDDEN), 1e-5)
            elif norm == "LayerNorm":
                inner = nn.layer_norm(leaf, (HIDDEN,), torch.ones(HIDDEN), torch.zeros(HIDDEN), 1e-5)
            weight, forward, backward = layer.weight.detach(), torch.float8_e4m3fn, torch.float8_e5m2
            q_in = rounded(inner.detach(), scale_for(inner.detach(), forward, name), forward)
            q_weight = rounded(weight, scale_for(weight, forward, name), forward)
            q_gradient = rounded(gradient, scale_for(gradient, backward, name), backward)
            inner.backward(q_gradient @ q_weight)
            close(y, q_in @ q_weight.t(), f"{name} {norm} forward")
            close(layer.weight.grad, q_gradient.t() @ q_in, f"{name} {norm} gradient of the weight")
            close(x.grad, leaf.grad, f"{name} {norm} gradient of the input")
            differs = (y - inner.detach() @ weight.t()).abs().max()
            assert differs > 1e-3, f"{name} {norm}: nothing has been rounded"


def close(found, expected, what):
    """One cast may be to the neighbour, where a norm's last bit differs."""
    apart = (found.detach() - expected).abs().max() / expected.abs().max()
    assert apart < 2e-3, f"{what}: {apart}"


def updates(te, quantization):
    """The histories and scales of several steps are those of TransformerEngine's own update in Python."""
    from transformer_engine.common.recipe import DelayedScaling, Format  # noqa: PLC0415

    for algorithm, length in (("most_recent", 1), ("max", 4), ("most_recent", 3)):
        found = []
        for unfused in ("0", "1"):
            os.environ["NVTE_UNFUSED_FP8_UPDATE"] = unfused
            quantization.FP8GlobalStateManager.reset()
            torch.manual_seed(5)
            recipe = DelayedScaling(
                fp8_format=Format.HYBRID, amax_history_len=length, amax_compute_algo=algorithm, margin=1
            )
            layer = te.Linear(HIDDEN, OUT, bias=False)
            for step in range(6):
                with te.autocast(enabled=True, recipe=recipe):
                    y = layer(torch.randn(ROWS, HIDDEN) * (step + 1))
                y.backward(torch.randn(ROWS, OUT) / (step + 1))
            state = [layer.fp8_meta[key] for key in ("scaling_fwd", "scaling_bwd")]
            found.append([tensor.clone() for one in state for tensor in (one.scale, one.amax_history)])
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other), (algorithm, length, one, other)
        assert any((one != 1).any() for one in found[0]), "scales have moved"


def tensors(te):
    """Quantizers: both directions, a dequantized tensor, an update in place, one that is left out."""
    import transformer_engine_torch as tex  # noqa: PLC0415
    from transformer_engine.pytorch.custom_recipes import reference_current_scaling as reference  # noqa: PLC0415
    from transformer_engine.pytorch.tensor.float8_tensor import (  # noqa: PLC0415
        Float8CurrentScalingQuantizer,
        Float8Quantizer,
    )

    x, kind = torch.randn(4, ROWS, HIDDEN), torch.float8_e4m3fn
    for power in (False, True):
        quantizer = Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, torch.device("cpu"), force_pow_2_scales=power)
        quantized = quantizer(x)
        theirs = reference.CurrentScalingQuantizerRef(dtype=kind, pow_2_scales=power).quantize(x.reshape(-1, HIDDEN))
        assert torch.equal(quantized._data.view(kind).float().reshape(-1, HIDDEN), theirs.data.float()), power
        assert torch.allclose(quantized._scale_inv, theirs.scale.reshape(1), rtol=1e-6)
        assert torch.equal(quantized._transpose, quantized._data.movedim(-1, 0)), "the other direction"
    assert torch.equal(tex.dequantize(quantized, torch.float32), quantized.dequantize())
    scale, amax = torch.full((1,), 2.0), torch.zeros(1)
    delayed = Float8Quantizer(scale, amax, tex.DType.kFloat8E5M2)
    kept = delayed(x)
    assert torch.equal(kept.dequantize(), rounded(x, scale, torch.float8_e5m2))
    assert float(amax) == float(x.abs().max()), "the largest value is kept for the next scale"
    before = kept._data.clone()
    kept.quantize_(3 * x, noop_flag=torch.ones(1))
    assert torch.equal(kept._data, before), "left out"
    kept.quantize_(3 * x)
    assert torch.equal(kept.dequantize(), rounded(3 * x, scale, torch.float8_e5m2))
    module = sys.modules["transformer_engine_torch"]
    of_bias, gradient = module.bgrad_quantize(x[0], delayed)
    assert torch.allclose(of_bias, x[0].sum(0))
    assert torch.equal(gradient.dequantize(), rounded(x[0], scale, torch.float8_e5m2))
    silu = module.silu(x[0], delayed)
    assert torch.equal(silu.dequantize(), rounded(nn.silu(x[0]), scale, torch.float8_e5m2))
    found = torch.zeros(1)
    module.compute_amax(x, found)
    assert float(found) == float(x.abs().max())


def shapes(te, recipe):
    """Rows of 8 values pass TransformerEngine's check in Python, and a product of a GPU refuses them."""
    layer = te.Linear(HIDDEN, OUT, bias=False)
    x = torch.randn(8, HIDDEN, requires_grad=True)
    with te.autocast(enabled=True, recipe=recipe):
        y = layer(x)
    try:
        y.sum().backward()
    except NotImplementedError as found:
        assert "rows of 8 values" in str(found), found
    else:
        raise AssertionError("a product that a GPU refuses")


def main():
    """All of it."""
    cpu_emulation.install(cpu_emulation.ON, ["--transformer-impl", "transformer_engine"])
    import transformer_engine.pytorch as te  # noqa: PLC0415
    from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling  # noqa: PLC0415
    from transformer_engine.pytorch import quantization  # noqa: PLC0415

    recipes = {"delayed": DelayedScaling(amax_history_len=1), "tensorwise": Float8CurrentScaling()}
    tensors(te)
    layers(te, recipes)
    updates(te, quantization)
    shapes(te, recipes["tensorwise"])


if __name__ == "__main__":
    main()
