"""Norms, activations, rotary embedding and softmax in Triton's interpreter."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.triton import TritonOperators
from onpolicy.ops.triton.elementwise import is_silu

OPERATORS = TritonOperators()

few = settings(max_examples=6)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
rows, columns = st.integers(2, 20), st.integers(1, 1300)


def values(rows, columns, dtype):
    generator = torch.Generator().manual_seed(rows * 1009 + columns)
    return (4 * torch.randn(rows, columns, generator=generator)).to(dtype)


def norm(x):
    return OPERATORS.rms_norm(x, torch.linspace(0.5, 2, x.shape[-1]).to(x.dtype), 1e-6)


WEIGHT, BIAS = torch.linspace(0.5, 2, 1300), torch.linspace(-1, 1, 1300)

ROWWISE = {
    "rms_norm": norm,
    "rms_norm rounded last": lambda x: OPERATORS.rms_norm(x, WEIGHT[: x.shape[1]], 1e-6, True),
    "layer_norm": lambda x: OPERATORS.layer_norm(x, WEIGHT[: x.shape[1]], BIAS[: x.shape[1]], 1e-6),
    "gated": lambda x: OPERATORS.gated(F.silu, x, x.flip(1)),
    "softmax": OPERATORS.softmax,
    "topk": lambda x: OPERATORS.topk(x, 1)[1],
    "log_softmax": lambda x: OPERATORS.log_softmax(x, torch.full((len(x), 1), 0.7)),
    "sample": lambda x: OPERATORS.sample(F.log_softmax(x.float(), -1), x[:, 0].double().sigmoid()),
}


@pytest.mark.parametrize("name", ROWWISE)
@few
@given(rows, columns, dtypes, st.data())
def test_rows_do_not_depend_on_the_rest_of_the_batch(name, rows, columns, dtype, data):
    x = values(rows, columns, dtype)
    whole = ROWWISE[name](x)
    cut = data.draw(st.integers(1, rows - 1))
    assert torch.equal(torch.cat([ROWWISE[name](x[:cut]), ROWWISE[name](x[cut:])]), whole)
    order = torch.tensor(data.draw(st.permutations(range(rows))))
    assert torch.equal(ROWWISE[name](x[order]), whole[order])


@few
@given(rows, columns, dtypes)
def test_norms_and_their_gradients_are_close_to_those_of_the_cpu(rows, columns, dtype):
    x, weight = values(rows, columns, dtype), torch.linspace(0.5, 2, columns).to(dtype)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    got, want = (o.rms_norm(*leaves, 1e-6) for o in (OPERATORS, CpuOperators()))
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    )
    torch.testing.assert_close(got, want, **tolerance)
    grad = torch.randn(got.shape).to(dtype)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    normal = exact[0] * torch.rsqrt(exact[0].square().mean(-1, keepdim=True) + 1e-6)
    theirs = torch.autograd.grad(normal * exact[1], exact, grad.double())
    for a, b in zip(torch.autograd.grad(got, leaves, grad), theirs, strict=True):
        scale = {"rtol": tolerance["rtol"], "atol": tolerance["atol"] * (1 + b.abs().max())}
        torch.testing.assert_close(a.double(), b, **scale)


NORMS = {
    "rms_norm rounded last": lambda o, x, w, b: o.rms_norm(x, w.float() + 1, 1e-6, True) + b,
    "layer_norm": lambda o, x, w, b: o.layer_norm(x, w, b, 1e-2),
}


@pytest.mark.parametrize("name", NORMS)
@few
@given(rows, columns, dtypes)
def test_other_norms_and_their_gradients_are_those_of_the_cpu_within_rounding(
    name, rows, columns, dtype
):
    leaves = [values(rows, columns, dtype), WEIGHT[:columns].to(dtype), BIAS[:columns].to(dtype)]
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    exact = [leaf.detach().float().requires_grad_() for leaf in leaves]
    got, want = NORMS[name](OPERATORS, *leaves), NORMS[name](CpuOperators(), *exact)
    grad = values(rows, columns, dtype).cos()
    ours = got, *torch.autograd.grad(got, leaves, grad)
    theirs = want, *torch.autograd.grad(want, exact, grad.float())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == dtype
        atol = tolerance * (1 + b.abs().max().item())
        torch.testing.assert_close(a.float(), b, rtol=tolerance, atol=atol)


def test_a_norm_of_many_rows_sums_its_weight_gradient_over_all_of_them():
    x, weight = values(600, 24, torch.float32), torch.ones(24, requires_grad=True)
    OPERATORS.rms_norm(x, weight, 1e-6).sum().backward()
    torch.testing.assert_close(weight.grad, CpuOperators().rms_norm(x, torch.ones(24), 1e-6).sum(0))


def test_a_norm_with_another_weight_dtype_is_promoted_as_pytorch_does():
    x, weight = values(3, 20, torch.bfloat16), torch.linspace(0.5, 2, 20)
    want = CpuOperators().rms_norm(x, weight, 1e-6)
    got = OPERATORS.rms_norm(x.view(3, 1, 20), weight, 1e-6)
    assert got.dtype == want.dtype == torch.float32 and got.shape == (3, 1, 20)
    torch.testing.assert_close(got.view(3, 20), want)


@few
@given(rows, columns, dtypes)
def test_gated_silu_and_its_gradients_are_close_to_float64(rows, columns, dtype):
    gate_up = values(rows, 2 * columns, dtype).requires_grad_()
    got = OPERATORS.gated(nn.SiLU(), *gate_up.chunk(2, -1))
    exact = gate_up.detach().double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    want = F.silu(gate) * up
    eps = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), want, rtol=eps, atol=eps)
    grad = torch.randn(got.shape).to(dtype)
    (ours,) = torch.autograd.grad(got, gate_up, grad)
    (theirs,) = torch.autograd.grad(want, exact, grad.double())
    torch.testing.assert_close(ours.double(), theirs, rtol=eps, atol=32 * eps)


def test_silu_is_rounded_once_over_the_whole_range_and_again_after_the_product():
    """Every bfloat16 number, subnormal and infinite ones included."""
    gate = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    gate = gate[~gate.isnan()][None]
    with np.errstate(all="ignore"):
        one, three = (OPERATORS.gated(F.silu, gate, torch.full_like(gate, up)) for up in (1, 3))
    # Half a place; and below -88.7 the exponential is no float32, so the result is 0.
    half_a_place = {"rtol": 1.001 * 2**-8, "atol": 2**-121}
    torch.testing.assert_close(one.double(), F.silu(gate.double()), equal_nan=True, **half_a_place)
    assert torch.equal(three.nan_to_num(), (one * 3).nan_to_num())
    assert one.isnan().tolist() == three.isnan().tolist() == (gate == -torch.inf).tolist()


def test_silu_is_recognised_and_other_activations_are_left_to_pytorch():
    assert all(map(is_silu, (F.silu, nn.SiLU(), ACT2FN["silu"], ACT2FN["swish"])))
    gate, up = values(3, 50, torch.float32), values(4, 50, torch.float32)[:3]
    assert torch.equal(OPERATORS.gated(F.gelu, gate, up), F.gelu(gate) * up)


@few
@given(st.integers(1, 2), st.integers(1, 9), st.sampled_from([(4, 2, 16), (3, 1, 24)]), dtypes)
def test_rotary_embedding_has_the_bits_of_transformers(batch, tokens, shape, dtype):
    heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(tokens + dim)
    q = torch.randn(batch, tokens, heads, dim, generator=generator).to(dtype).transpose(1, 2)
    k = torch.randn(batch, kv_heads, tokens, dim, generator=generator).to(dtype)
    angles = torch.randn(batch, tokens, dim // 2, generator=generator).repeat(1, 1, 2)
    tables = angles.cos().to(dtype), angles.sin().to(dtype)
    leaves = [q.requires_grad_(), k.requires_grad_()]
    got, want = (f(*leaves, *tables) for f in (OPERATORS.rotary, apply_rotary_pos_emb))
    default = CpuOperators().rotary(*leaves, *tables)
    for a, b, c in zip(got, want, default, strict=True):
        assert torch.equal(a, b) and torch.equal(c, b)
    grads = [torch.randn(x.shape, generator=generator).to(dtype) for x in got]
    theirs = torch.autograd.grad(want, leaves, grads)
    for a, b in zip(torch.autograd.grad(got, leaves, grads), theirs, strict=True):
        torch.testing.assert_close(a, b)


@few
@given(rows, columns, dtypes)
def test_softmax_and_its_gradient_are_close_to_float64(rows, columns, dtype):
    x = values(rows, columns, dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    got, want = OPERATORS.softmax(x), torch.softmax(exact, -1)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-7)
    grad = torch.randn(got.shape)
    (ours,) = torch.autograd.grad(got, x, grad)
    (theirs,) = torch.autograd.grad(want, exact, grad.double())
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-2, atol=1e-3)


@few
@given(rows, st.integers(1, 40), st.data())
def test_topk_takes_the_first_of_equal_values(rows, columns, data):
    x = values(rows, columns, torch.float32).round()
    k = data.draw(st.integers(1, columns))
    got, indices = OPERATORS.topk(x, k)
    order = x.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(got, order.values[:, :k]) and torch.equal(indices, order.indices[:, :k])


def test_topk_of_masked_and_invalid_values_stays_inside_the_row():
    x = torch.tensor([[-torch.inf, 1, -torch.inf], [0, torch.nan, 2]], requires_grad=True)
    got, indices = OPERATORS.topk(x, 3)
    assert indices.tolist() == [[1, 0, 2], [1, 2, 0]]
    got[0, 0].backward()
    assert x.grad.tolist() == [[0, 1, 0], [0, 0, 0]]
