"""The stand-in for TransformerEngine's extension, function by function against torch's autograd in float64."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as nn

from ntp_plugin.megatron.te_emulation import extension, kernels, quantized

ROWS, INNER, OUTER = 6, 8, 10


@pytest.fixture(autouse=True)
def _doubles():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    yield
    torch.set_default_dtype(before)


def gemm(a, transa, b, transb, out=None, *, bias=None, gelu=False, gelu_in=None, grad=False, accumulate=False):
    of_kernels = (None, 0, accumulate, False)
    return kernels.generic_gemm(a, transa, b, transb, out, None, None, bias, None, gelu, gelu_in, grad, *of_kernels)


def gradients(function, *inputs):
    """What `function(*inputs)` is, a gradient for it, and those that autograd finds for the inputs."""
    leaves = [one.detach().requires_grad_() for one in inputs]
    result = function(*leaves)
    gradient = torch.randn_like(result)
    return result.detach(), gradient, torch.autograd.grad(result, leaves, gradient)


def test_a_linear_layer_is_three_products():
    """TN is its forward, NN the gradient of its input, NT that of its weight."""
    x, weight, bias = torch.randn(3, 2, INNER), torch.randn(OUTER, INNER), torch.randn(OUTER)
    result, gradient, (of_x, of_weight, of_bias) = gradients(nn.linear, x, weight, bias)
    assert torch.allclose(gemm(weight, True, x, False, bias=bias)[0], result, rtol=1e-14)
    assert torch.allclose(gemm(weight, False, gradient, False)[0], of_x, rtol=1e-14)
    found, bias_gradient, _, _ = gemm(x, False, gradient, True, bias=bias, grad=True)
    assert torch.allclose(found, of_weight, rtol=1e-14)
    assert torch.allclose(bias_gradient, of_bias, rtol=1e-14)


def test_a_product_is_written_or_added_where_it_is_asked_for():
    a, b = torch.randn(OUTER, INNER), torch.randn(ROWS, INNER)
    product = b @ a.t()
    out = torch.ones(ROWS, OUTER)
    assert gemm(a, True, b, False, out)[0] is out
    assert torch.equal(out, product)
    gemm(a, True, b, False, out, accumulate=True)
    assert torch.allclose(out, 2 * product, rtol=1e-14)


def test_gelu_rides_on_a_product():
    a, b = torch.randn(OUTER, INNER), torch.randn(ROWS, INNER)
    found, _, before, _ = gemm(a, True, b, False, gelu=True)
    assert torch.equal(before, b @ a.t())
    assert torch.allclose(found, nn.gelu(before, approximate="tanh"), rtol=1e-14)
    inner = torch.randn(ROWS, INNER)
    _, _, (expected,) = gradients(kernels.gelu_tanh, inner)
    torch.manual_seed(3)
    gradient = torch.randn(ROWS, OUTER)
    weight = torch.randn(OUTER, INNER)
    expected = kernels.derived(kernels.gelu_tanh, inner, gradient @ weight)
    assert torch.allclose(gemm(weight, False, gradient, False, gelu=True, gelu_in=inner, grad=True)[0], expected)


@pytest.mark.parametrize("single_output", [True, False])
def test_groups_of_products_with_an_empty_one(single_output):
    splits = [4, 0, 2]
    weights = [torch.randn(OUTER, INNER) for _ in splits]
    inputs = list(torch.split(torch.randn(ROWS, INNER), splits))
    out = [torch.empty(ROWS, OUTER)] if single_output else [torch.empty(split, OUTER) for split in splits]
    kernels.te_general_grouped_gemm(
        *(weights, True, inputs, False, out, None, splits, [torch.empty(0)] * 3, None, single_output, None, False),
        *(None, 0, False, False, 0),
    )
    assert torch.allclose(torch.cat(out), torch.cat([x @ w.t() for x, w in zip(inputs, weights, strict=True)]))


@pytest.mark.parametrize("zero_centered", [False, True])
def test_norms(zero_centered):
    x, weight, bias = torch.randn(3, 2, INNER), torch.randn(INNER), torch.randn(INNER)
    shift = 1.0 if zero_centered else 0.0

    result, gradient, expected = gradients(
        lambda *p: nn.layer_norm(p[0], (INNER,), p[1] + shift, p[2]), x, weight, bias
    )
    found, mean, reciprocal = kernels.layernorm_fwd(x, weight, bias, 1e-5, None, None, None, 0, zero_centered)
    assert torch.allclose(found, result, rtol=1e-12)
    backward = kernels.layernorm_bwd(gradient, x, mean, reciprocal, weight, 0, zero_centered)
    assert all(
        torch.allclose(one, other, rtol=1e-10, atol=1e-12) for one, other in zip(backward, expected, strict=True)
    )

    result, gradient, expected = gradients(lambda *p: nn.rms_norm(p[0], (INNER,), p[1] + shift, 1e-5), x, weight)
    found, _, reciprocal = kernels.rmsnorm_fwd(x, weight, 1e-5, None, None, None, 0, zero_centered)
    assert torch.allclose(found, result, rtol=1e-12)
    backward = kernels.rmsnorm_bwd(gradient, x, reciprocal, weight, 0, zero_centered)
    assert all(
        torch.allclose(one, other, rtol=1e-10, atol=1e-12) for one, other in zip(backward, expected, strict=True)
    )
    added, _ = kernels.rmsnorm_bwd_add(gradient, x, x, reciprocal, weight, 0, zero_centered)
    assert torch.allclose(added, backward[0] + x)


@pytest.mark.parametrize("name", kernels.ACTIVATIONS)
def test_activations(name):
    module, x = extension.build(), torch.randn(ROWS, INNER)
    result, gradient, (expected,) = gradients(kernels.ACTIVATIONS[name], x)
    assert torch.equal(getattr(module, name)(x, None), result)
    assert torch.allclose(getattr(module, f"d{name}")(gradient, x, None), expected, rtol=1e-14)
    of_bias, of_x = getattr(module, f"dbias_d{name}")(gradient, x, None)
    assert torch.equal(of_x, getattr(module, f"d{name}")(gradient, x, None))
    assert torch.allclose(of_bias, expected.sum(0), rtol=1e-12)


def test_softmax_leaves_out_what_is_masked():
    x = torch.randn(2, 3, 4, 4)
    causal = kernels.scaled_upper_triang_masked_softmax_forward(x, 0.5)
    mask = torch.ones(4, 4, dtype=torch.bool).triu(1)
    expected, gradient, (of_x,) = gradients(lambda t: torch.softmax((t * 0.5).masked_fill(mask, -torch.inf), -1), x)
    assert torch.allclose(causal, expected, rtol=1e-14)
    assert torch.allclose(kernels.scaled_softmax_backward(gradient, causal, 0.5), of_x, rtol=1e-12)
    nothing = kernels.scaled_masked_softmax_forward(x, torch.ones(2, 1, 4, 4), 1.0)
    assert not nothing.any(), "a row of which all is masked"


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["NVTE_SBHD", "NVTE_BSHD"])
def test_rotary_positions(layout, interleaved):
    length, batch, heads, size, rotated = 5, 2, 3, 8, 6
    angles = torch.randn(length, 1, 1, rotated // 2)
    freqs = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    shape = (length, batch, heads, size) if layout == "NVTE_SBHD" else (batch, length, heads, size)
    of_module = getattr(extension.build().NVTE_QKV_Format, layout)

    def forward(t):
        return kernels.fused_rope_forward(t, freqs, None, of_module, interleaved, None, 1, 0)

    t = torch.randn(shape)
    result, gradient, (expected,) = gradients(forward, t)
    found = kernels.fused_rope_backward(gradient, freqs, None, of_module, interleaved, None, 1, 0)
    assert torch.allclose(found, expected, rtol=1e-12)
    assert torch.allclose(result.norm(), t.norm()), "it turns, and stretches nothing"
    assert torch.equal(result[..., rotated:], t[..., rotated:])


@pytest.mark.parametrize(("mode", "kind"), [(0, torch.optim.Adam), (1, torch.optim.AdamW)])
def test_adam_is_torchs(mode, kind):
    ours, theirs = [torch.randn(4, 3), torch.randn(5)], None
    theirs = [torch.nn.Parameter(one.clone()) for one in ours]
    first, second = [torch.zeros_like(one) for one in ours], [torch.zeros_like(one) for one in ours]
    optimizer = kind(theirs, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(1, 5):
        gradient = [torch.randn_like(one) for one in ours]
        lists = [gradient, ours, first, second]
        kernels.multi_tensor_adam(65536, torch.zeros(1), lists, 0.01, 0.9, 0.95, 1e-8, step, mode, 1, 0.1)
        for parameter, one in zip(theirs, gradient, strict=True):
            parameter.grad = one.clone()
        optimizer.step()
    assert all(torch.allclose(one, other, rtol=1e-12) for one, other in zip(ours, theirs, strict=True))


def test_sgd_with_momentum_is_torchs():
    ours = [torch.randn(4, 3)]
    theirs, momentum = torch.nn.Parameter(ours[0].clone()), [torch.zeros(4, 3)]
    optimizer = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, weight_decay=0.01)
    for step in range(3):
        gradient = torch.randn(4, 3)
        of_list = [[gradient], ours, momentum]
        kernels.multi_tensor_sgd(65536, torch.zeros(1), of_list, 0.01, 0.9, 0.0, 0.1, False, step == 0, False, 1.0)
        theirs.grad = gradient.clone()
        optimizer.step()
    assert torch.allclose(ours[0], theirs, rtol=1e-12)


def test_norms_and_scales_of_lists():
    lists = [[torch.randn(3, 4), torch.randn(5)]]
    total, each = kernels.multi_tensor_l2norm(65536, torch.zeros(1), lists, True)
    assert torch.allclose(total, torch.cat([one.flatten() for one in lists[0]]).norm())
    assert torch.allclose(each, torch.stack([one.norm() for one in lists[0]]))
    overflow, into = torch.zeros(1), [torch.empty(3, 4), torch.empty(5)]
    kernels.multi_tensor_scale(65536, overflow, [lists[0], into], 0.5)
    assert torch.equal(into[0], lists[0][0] * 0.5)
    assert not overflow.any()
    kernels.multi_tensor_scale_tensor(
        65536, overflow, [[torch.tensor([torch.inf])], [torch.empty(1)]], torch.tensor(2.0)
    )
    assert overflow.all(), "what is not finite is noticed"


FP8 = {7: (torch.float8_e4m3fn, 448.0), 8: (torch.float8_e5m2, 57344.0)}


@pytest.mark.parametrize("number", FP8)
def test_a_cast_to_fp8_rounds_as_torch_does_and_does_not_overflow(number):
    kind, limit = FP8[number]
    x = torch.cat((torch.randn(1000) * 30, torch.tensor([0.0, 1e30, -1e30])))
    data = quantized.cast(x, torch.tensor(2.0), number)
    assert torch.equal(data[:-2].view(kind), (2 * x[:-2]).to(kind))
    assert data[-2:].view(kind).double().tolist() == [limit, -limit]
    assert torch.equal(quantized.from_bytes(data, torch.tensor(0.5), number), data.view(kind).double() / 2)
    module = extension.build()
    assert torch.equal(
        module.fp8_transpose(data[:1000].reshape(10, 20, 5), number), data[:1000].reshape(10, 20, 5).movedim(-1, 0)
    )


@pytest.mark.parametrize("number", FP8)
def test_a_scale_takes_the_largest_value_to_the_largest_of_fp8(number):
    limit = FP8[number][1]
    amax = torch.tensor([0.3, 7.0, 1e-320, 0.0, torch.inf])
    scales = quantized.scale_of(amax, number)
    assert torch.allclose(scales[:2] * amax[:2], torch.full((2,), limit), rtol=1e-15)
    assert scales[2] == torch.finfo(torch.float64).max, "as large as there are numbers"
    assert scales[3:].tolist() == [1, 1], "there is nothing to scale by"
    powers = quantized.scale_of(amax[:2], number, power_of_two=True)
    assert torch.equal(torch.exp2(torch.log2(powers).round()), powers)
    assert bool(((powers <= scales[:2]) & (powers > scales[:2] / 2)).all())


def test_a_history_takes_the_newest_maximum_and_forgets_the_oldest():
    history, scale = torch.tensor([[5.0], [1.0], [2.0], [3.0]]), torch.tensor([8.0])
    update = extension.build().fused_amax_and_scale_update_after_reduction
    update(torch.tensor([4.0]), [history], [scale], "max", 7, 1.0)
    assert history.flatten().tolist() == [0, 2, 3, 4], "the reduced maximum, and not the rank's own 5"
    assert scale.item() == 448 / 2 / 4
    update(torch.zeros(1), [history], [scale], "most_recent", 7, 0.0)
    assert scale.item() == 448 / 2 / 4, "nothing was seen: the scale stays"


@pytest.mark.short
def test_transformer_engines_fp8_layers_are_products_of_rounded_matrices():
    """Both recipes, layers with and without a norm, quantizers, scales over steps, and shapes that a GPU refuses."""
    program = Path(__file__).with_name("te_in_fp8.py")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_is_not_there_says_so_by_its_name():
    module = extension.build()
    assert isinstance(module, types.ModuleType)
    with pytest.raises(NotImplementedError, match="convert_thd_to_bshd of TransformerEngine"):
        module.convert_thd_to_bshd()
    with pytest.raises(NotImplementedError, match="userbuffers"):
        kernels.generic_gemm(
            *(torch.ones(2, 2), True, torch.ones(2, 2), False, None, None, None, None, None, False, None, False),
            *(None, 0, False, False),
            comm_overlap=object(),
        )


def test_a_wrong_kernel_is_noticed(monkeypatch):
    """The comparison can fail: a product that forgets a transposition, a norm without its mean."""
    monkeypatch.setattr(kernels.torch, "mm", lambda a, b: torch.matmul(a, b) * 1.0000001)
    with pytest.raises(AssertionError):
        test_a_linear_layer_is_three_products()
