"""The stand-in for TransformerEngine's fused attention against plain attention by autograd, in float64."""

import math
import types

import pytest
import torch

from ntp_plugin.megatron.te_emulation import attention, extension

BATCH, HEADS, ROWS, SIZE = 2, 4, 8, 6
NEAR = {"rtol": 1e-12, "atol": 1e-13}
TEX = extension.build()
MASKS, LAYOUTS, FORMATS = TEX.NVTE_Mask_Type, TEX.NVTE_QKV_Layout, TEX.NVTE_QKV_Format
NONE = TEX.NVTE_Bias_Type.NVTE_NO_BIAS, TEX.NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX
SCALE = 1 / math.sqrt(SIZE)
CAUSAL, NO_MASK = MASKS.NVTE_CAUSAL_MASK, MASKS.NVTE_NO_MASK


@pytest.fixture(autouse=True)
def _doubles():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(5)
    yield
    torch.set_default_dtype(before)


def ends(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def forward(q, k, v, *, form="SBHD", mask=CAUSAL, window=(-1, -1), corner=False, lengths=None, dropout=0.0):
    lengths_q, lengths_kv = lengths or (ends(*[ROWS] * BATCH),) * 2
    return attention.fused_attn_fwd(
        *(ROWS, ROWS, True, SCALE, dropout, True, LAYOUTS[f"NVTE_{form}_{form}_{form}"], FORMATS[f"NVTE_{form}"]),
        *(FORMATS.NVTE_QKV_Format_NOT_SET, NONE[0], mask, NONE[1], window, corner, lengths_q, lengths_kv, q, k, v),
        *(q.dtype, None, None, None, None, None, None, None, None, None, 16, False, False),
    )


def backward(given, out, gradient, statistics, *, form="SBHD", mask=CAUSAL, window=(-1, -1), corner=False):
    layout, (q, k, v) = LAYOUTS[f"NVTE_{form}_{form}_{form}"], given
    return attention.fused_attn_bwd(
        *(ROWS, ROWS, SCALE, 0.0, True, layout, FORMATS[f"NVTE_{form}"], FORMATS[f"NVTE_{form}"], layout),
        *(FORMATS.NVTE_QKV_Format_NOT_SET, FORMATS.NVTE_QKV_Format_NOT_SET, NONE[0], mask, NONE[1], window, corner),
        *(True, ends(*[ROWS] * BATCH), ends(*[ROWS] * BATCH), q, k, v, out, gradient, q.dtype),
        *([statistics, torch.zeros(2)], None, None, None, None, None, False),
    )


def inputs(*, groups=HEADS, columns=ROWS):
    shapes = [(ROWS, BATCH, HEADS, SIZE), (columns, BATCH, groups, SIZE), (columns, BATCH, groups, SIZE + 1)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def plain(q, k, v, seen):
    """Attention of (rows, batch, heads, size), written out; a row sees the columns that have True in `seen`."""
    repeated = [one.repeat_interleave(q.shape[2] // one.shape[2], 2) for one in (k, v)]
    scores = torch.einsum("sbhd,tbhd->bhst", q, repeated[0]) * SCALE
    scores = scores.masked_fill(~seen, -math.inf)
    return torch.einsum("bhst,tbhd->sbhd", torch.softmax(scores, -1), repeated[1]), torch.logsumexp(scores, -1)


SEEN = {
    CAUSAL: torch.ones(ROWS, ROWS, dtype=torch.bool).tril(),
    NO_MASK: torch.ones(ROWS, ROWS, dtype=torch.bool),
}


def turned(tensors, form):
    return [one.transpose(0, 1).contiguous() if form == "BSHD" else one for one in tensors]


@pytest.mark.parametrize("form", ["SBHD", "BSHD"])
@pytest.mark.parametrize("groups", [HEADS, 2, 1])
@pytest.mark.parametrize("mask", [CAUSAL, NO_MASK])
def test_it_is_attention(mask, groups, form):
    q, k, v = inputs(groups=groups)
    expected, statistics = plain(q, k, v, SEEN[mask])
    gradient = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad(expected, (q, k, v), gradient)
    given = [one.detach() for one in turned((q, k, v), form)]
    out, found, _ = forward(*given, form=form, mask=mask)
    assert torch.allclose(out, *turned((expected,), form), **NEAR)
    assert found.shape == (BATCH, HEADS, ROWS, 1)
    assert torch.allclose(found.squeeze(-1), statistics, **NEAR)
    gradients = backward(given, out, *turned((gradient,), form), found, form=form, mask=mask)
    assert gradients[3:] == [None, None]
    for one, other in zip(gradients, turned(expected_gradients, form), strict=False):
        assert one.is_contiguous()
        assert torch.allclose(one, other, **NEAR)


@pytest.mark.parametrize("corner", [False, True])
@pytest.mark.parametrize("window", [(-1, 0), (2, 0), (1, 2)])
def test_a_row_sees_a_window_around_the_diagonal(window, corner):
    """More columns than rows: the diagonal begins in the corner at the top left, or ends in the other."""
    q, k, v = inputs(groups=2, columns=ROWS + 3)
    distance = torch.arange(ROWS + 3) - torch.arange(ROWS)[:, None] - (3 if corner else 0)
    left, right = window
    seen = (distance <= right) & ((distance >= -left) | (left < 0))
    expected, _ = plain(q, k, v, seen)
    gradient = torch.randn_like(expected)
    given = [one.detach() for one in (q, k, v)]
    how = {"mask": NO_MASK, "window": window, "corner": corner}
    out, statistics, _ = forward(*given, **how)
    assert torch.allclose(out, expected, **NEAR)
    found = backward(given, out, gradient, statistics, **how)
    for one, other in zip(found, torch.autograd.grad(expected, (q, k, v), gradient), strict=False):
        assert torch.allclose(one, other, **NEAR)


def test_padding_is_not_seen_and_has_no_result():
    q, k, v = (one.detach() for one in inputs())
    lengths = (ends(5, ROWS), ends(5, ROWS))
    out, _, _ = forward(q, k, v, mask=MASKS.NVTE_PADDING_MASK, lengths=lengths)
    assert torch.equal(out[5:, 0], torch.zeros(ROWS - 5, HEADS, SIZE + 1))
    short, _ = plain(q[:5, :1], k[:5, :1], v[:5, :1], torch.ones(5, 5, dtype=torch.bool))
    assert torch.allclose(out[:5, :1], short, **NEAR)


def test_blocks_of_keys_merge_by_their_statistics_and_share_a_backward():
    """What a ring does: forward by blocks of keys, backward of each with the statistics of all."""
    q, k, v = inputs()
    expected, _ = plain(q, k, v, SEEN[NO_MASK])
    gradient = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad(expected, (q, k, v), gradient)
    given, half = [one.detach() for one in (q, k, v)], ROWS // 2
    blocks = [(given[0], given[1][part], given[2][part]) for part in (slice(half), slice(half, None))]
    parts = [forward(*block, mask=NO_MASK) for block in blocks]
    statistics = torch.logsumexp(torch.cat([part[1] for part in parts], -1), -1, keepdim=True)
    weights = [torch.exp(part[1] - statistics).permute(2, 0, 1, 3) for part in parts]
    out = sum(part[0] * weight for part, weight in zip(parts, weights, strict=True))
    assert torch.allclose(out, expected, **NEAR)
    found = [backward(block, out, gradient, statistics, mask=NO_MASK) for block in blocks]
    assert torch.allclose(found[0][0] + found[1][0], expected_gradients[0], **NEAR)
    for place in (1, 2):
        assert torch.allclose(torch.cat([one[place] for one in found]), expected_gradients[place], **NEAR)


def test_half_precision_is_computed_in_full():
    q, k, v = (one.detach().bfloat16() for one in inputs())
    out, statistics, _ = forward(q, k, v)
    assert (out.dtype, statistics.dtype) == (torch.bfloat16, torch.float64)
    exact, _ = plain(q.double(), k.double(), v.double(), SEEN[CAUSAL])
    assert torch.equal(out, exact.bfloat16())


def wanted(**changed):
    plain_attention = {
        "dropout": 0.0,
        "bias_type": NONE[0],
        "softmax_type": NONE[1],
        "return_max_logit": False,
        "qkv_layout": LAYOUTS.NVTE_SB3HD,
        "qkv_dtype": TEX.DType.kBFloat16,
    }
    return types.SimpleNamespace(**plain_attention | changed)


def test_a_backend_is_offered_for_what_there_is():
    backend = TEX.NVTE_Fused_Attn_Backend(attention.get_fused_attn_backend(wanted())[0])
    assert backend is TEX.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dropout": 0.1}, r"dropout of 0\.1 \(use --attention-dropout 0\)"),
        ({"qkv_layout": LAYOUTS.NVTE_T3HD}, "NVTE_T3HD"),
        ({"qkv_layout": LAYOUTS.NVTE_Paged_KV_SBHD_SBHD_SBHD}, "NVTE_Paged_KV"),
        ({"bias_type": TEX.NVTE_Bias_Type.NVTE_ALIBI}, "with a bias"),
        ({"qkv_dtype": TEX.DType.kFloat8E4M3}, "in kFloat8E4M3"),
    ],
)
def test_what_there_is_not_is_refused_by_its_name(changed, message):
    with pytest.raises(NotImplementedError, match=message):
        attention.get_fused_attn_backend(wanted(**changed))


def test_dropout_is_refused_where_it_would_be_computed():
    with pytest.raises(NotImplementedError, match=r"dropout of 0\.1"):
        forward(*inputs(), dropout=0.1)


def test_a_wrong_kernel_is_noticed(monkeypatch):
    """The comparison can fail: probabilities that are a little too large."""
    right = attention._probabilities
    monkeypatch.setattr(attention, "_probabilities", lambda *given: right(*given) * (1 + 1e-10))
    for mask in (CAUSAL, NO_MASK):
        with pytest.raises(AssertionError):
            test_it_is_attention(mask, HEADS, "SBHD")
