"""The experts' kernels in Triton's interpreter."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onpolicy.ops.triton import TritonOperators

OPERATORS = TritonOperators()

few = settings(max_examples=6)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
counts = st.lists(st.sampled_from([0, 0, 1, 3, 16, 17, 40]), min_size=1, max_size=6)


def operands(counts, n, k, dtype):
    generator = torch.Generator().manual_seed(sum(counts) * 31 + n + k)
    x = torch.randn(sum(counts), k, generator=generator).to(dtype)
    weight = (torch.randn(len(counts), n, k, generator=generator) / k**0.5).to(dtype)
    return x, weight, torch.tensor([0, *counts]).cumsum(0)


@few
@given(counts, st.integers(1, 70), st.integers(1, 100), dtypes)
def test_every_expert_has_the_bits_of_its_own_linear(counts, n, k, dtype):
    x, weight, offsets = operands(counts, n, k, dtype)
    rows = x.split(counts)
    alone = [OPERATORS.linear(part, w) for part, w in zip(rows, weight, strict=True)]
    assert torch.equal(OPERATORS.grouped_linear(x, weight, offsets), torch.cat(alone))
    alone = [OPERATORS.partial_linear(part, w) for part, w in zip(rows, weight, strict=True)]
    partial = OPERATORS.grouped_partial_linear(x, weight, offsets)
    assert partial.dtype == torch.float32 and torch.equal(partial, torch.cat(alone))


@few
@given(counts.filter(sum), st.integers(1, 70), st.integers(1, 70))
def test_gradients_are_close_to_float64_and_zero_for_idle_experts(counts, n, k):
    x, weight, offsets = operands(counts, n, k, torch.float32)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    pairs = zip(exact[0].split(counts), exact[1], strict=True)
    want = torch.cat([part @ w.t() for part, w in pairs])
    got = OPERATORS.grouped_linear(*leaves, offsets)
    torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-5)
    grad = torch.randn_like(got)
    ours = torch.autograd.grad(got, leaves, grad)
    for a, b in zip(ours, torch.autograd.grad(want, exact, grad.double()), strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-4, atol=1e-4)
    assert not ours[1][torch.tensor(counts) == 0].any()


def test_gradients_in_bfloat16_are_close():
    x, weight, offsets = operands([5, 0, 33], 24, 40, torch.bfloat16)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    got = OPERATORS.grouped_partial_linear(*leaves, offsets)
    grad_x, grad_weight = torch.autograd.grad(got, leaves, torch.ones_like(got))
    assert grad_x.dtype == grad_weight.dtype == torch.bfloat16
    want = x[5:].detach().float().sum(0).expand(24, -1)
    torch.testing.assert_close(grad_weight[2].float(), want, rtol=1e-2, atol=1e-2)
