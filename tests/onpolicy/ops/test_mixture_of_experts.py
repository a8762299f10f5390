"""Experts: a token is computed as if it were alone, and its gradients are the formula's."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.mixture_of_experts import gated_halves, mix_experts
from onpolicy.ops.row_parallel import RowParallel, tree_sum
from onpolicy.ops.stock import StockOperators
from tests.support.invariance import require_row_invariance

OPERATORS = CpuOperators(1)
NUM_EXPERTS, INTERMEDIATE, HIDDEN, CHOSEN = 6, 72, 96, 2

dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def operands(tokens, dtype, num_experts=NUM_EXPERTS, has_bias=False):
    """(x, experts, weights, gate_up, down, and two biases): a router's choice without repetition."""
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape, scale=1.0):
        return (scale * torch.randn(shape, generator=generator)).to(dtype)

    logits = torch.randn(tokens, num_experts, generator=generator)
    weights, experts = logits.softmax(-1).topk(min(CHOSEN, num_experts))
    return (
        normal(tokens, HIDDEN),
        experts,
        weights.to(dtype),
        normal(num_experts, 2 * INTERMEDIATE, HIDDEN, scale=HIDDEN**-0.5),
        normal(num_experts, HIDDEN, INTERMEDIATE, scale=INTERMEDIATE**-0.5),
        *(
            (normal(num_experts, n, scale=0.1) for n in (2 * INTERMEDIATE, HIDDEN))
            if has_bias
            else ()
        ),
    )


def mix(x, experts, weights, gate_up, down, *biases, blocks=1, operators=OPERATORS):
    gate = gated_halves(operators, F.silu)
    names = dict(zip(("gate_up_bias", "down_bias"), biases, strict=False))
    matrices = (gate_up, down)
    return mix_experts(
        operators, x, experts, weights, *matrices, gate, RowParallel(blocks), **names
    )


def formula(x, experts, weights, gate_up, down, gate_up_bias=None, down_bias=None):
    """A token and an expert at a time, in the dtype of the operands."""
    out = []
    for t, chosen in enumerate(experts.tolist()):
        mixed = torch.zeros_like(x[t])
        for j, e in enumerate(chosen):
            first, second = (0, 0) if gate_up_bias is None else (gate_up_bias[e], down_bias[e])
            gate, up = (gate_up[e] @ x[t] + first).chunk(2)
            mixed = mixed + weights[t, j] * (down[e] @ (F.silu(gate) * up) + second)
        out.append(mixed)
    return torch.stack(out)


@given(st.integers(2, 300), dtypes, st.sampled_from([1, 2, 4]), st.booleans(), st.data())
def test_a_token_does_not_depend_on_the_rest_of_the_batch(tokens, dtype, blocks, has_bias, data):
    x, experts, weights, *matrices = operands(tokens, dtype, has_bias=has_bias)
    require_row_invariance(
        lambda i: mix(x[i], experts[i], weights[i], *matrices, blocks=blocks), tokens, data
    )


@given(st.integers(1, 50), dtypes, st.data())
def test_a_token_does_not_depend_on_the_experts_of_others(tokens, dtype, data):
    x, experts, weights, *matrices = operands(tokens, dtype)
    mine = data.draw(st.integers(0, tokens - 1))
    generator = torch.Generator().manual_seed(mine)
    others = torch.randint(NUM_EXPERTS, experts.shape, generator=generator)
    others[mine] = experts[mine]
    got, want = (mix(x, e, weights, *matrices)[mine] for e in (others, experts))
    assert torch.equal(got, want)


@pytest.mark.parametrize("ranks", [2, 4])
def test_parts_of_the_intermediate_axis_add_up_to_the_blocks_of_one_rank(ranks):
    x, experts, weights, gate_up, down = operands(50, torch.float32)
    gate, up = (part.chunk(ranks, dim=1) for part in gate_up.chunk(2, dim=1))
    partials = [
        mix(x, experts, weights, torch.cat(gate_up_part, dim=1), down_part)
        for *gate_up_part, down_part in zip(gate, up, down.chunk(ranks, dim=2), strict=True)
    ]
    whole = mix(x, experts, weights, gate_up, down, blocks=ranks)
    assert torch.equal(tree_sum(partials), whole)


@pytest.mark.parametrize("operators", [OPERATORS, StockOperators()], ids=["aligned", "stock"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_results_are_close_to_float64(operators, dtype, has_bias):
    inputs = operands(40, dtype, has_bias=has_bias)
    wide = [t.double() if t.is_floating_point() else t for t in inputs]
    got = mix(*inputs, operators=operators)
    assert got.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(got.double(), formula(*wide), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("k", "n"), [(96, 4), (4, 72), (36, 7), (5, 96), (16, 8)])
def test_stock_experts_may_be_of_any_size_as_adapters_of_a_small_rank_are(dtype, k, n):
    """The kernel that PyTorch has for them takes rows of whole 16 bytes alone."""
    torch.manual_seed(k)
    offsets = torch.tensor([0, 3, 3, 10])
    x, weight, grad = (torch.randn(size).to(dtype) for size in ((10, k), (3, n, k), (10, n)))
    ours = [t.clone().requires_grad_() for t in (x, weight)]
    wide = [t.double().requires_grad_() for t in (x, weight)]
    out = StockOperators().grouped_linear(*ours, offsets)
    out.backward(grad)
    parts = [wide[0][a:b] @ w.T for a, b, w in zip(offsets, offsets[1:], wide[1], strict=False)]
    torch.cat(parts).backward(grad.double())
    pairs = [(out, torch.cat(parts)), *((a.grad, b.grad) for a, b in zip(ours, wide, strict=True))]
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for got, want in pairs:
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * k**0.5)


@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gradients_are_those_of_the_formula(dtype, blocks, has_bias):
    x, experts, *rest = operands(30, dtype, has_bias=has_bias)
    ours = [t.clone().requires_grad_() for t in (x, *rest)]
    wide = [t.double().requires_grad_() for t in (x, *rest)]
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    mix(ours[0], experts, *ours[1:], blocks=blocks).backward(grad)
    formula(wide[0], experts, *wide[1:]).backward(grad.double())
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    for got, want in zip(ours, wide, strict=True):
        assert got.grad.dtype == dtype
        torch.testing.assert_close(got.grad.double(), want.grad, rtol=tolerance, atol=tolerance)


def test_gradients_are_the_same_every_time_and_on_any_number_of_threads():
    x, experts, weights, gate_up, down = operands(200, torch.float32)
    results = []
    for operators in (OPERATORS, OPERATORS, CpuOperators(3)):
        inputs = [t.clone().requires_grad_() for t in (x, weights, gate_up, down)]
        mix(inputs[0], experts, *inputs[1:], operators=operators).square().sum().backward()
        results.append([t.grad for t in inputs])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
