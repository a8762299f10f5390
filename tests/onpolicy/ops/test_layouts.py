"""Where tensors lie in memory changes no bit: of results, and of gradients in any layout too."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onpolicy.ops import AttentionLayout, PagedLayout, ScoreRule
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.recurrence import RecurrentLayout
from tests.support.layouts import LAYOUTS, whole

OPERATORS = CpuOperators(1)

sizes = st.integers(1, 40) | st.sampled_from([96, 256, 300])


def expert_rows(x, experts):
    """Where each expert's rows begin: int64 [E + 1]."""
    return torch.linspace(0, len(x), experts + 1).long()


def split_in_three(tokens):
    cuts = sorted({0, tokens // 5, tokens // 2, tokens})
    return AttentionLayout.packed(tuple(b - a for a, b in itertools.pairwise(cuts)))


def recurrent(tokens):
    return RecurrentLayout.packed(split_in_three(tokens).query_lens)


def two_to_a_page(tokens):
    """One sequence, if it has a token, on the pages of a store from the last one on."""
    lens = torch.tensor([tokens] if tokens else [], dtype=torch.int64)
    return PagedLayout(
        page_table=torch.arange(tokens).flip(0).expand(len(lens), -1),
        page_size=2,
        key_lens=lens,
        query_starts=F.pad(lens.cumsum(0), (1, 0)),
        max_query_len=tokens,
    )


def temperature(x):
    return x.float().abs() + 0.5


def targets(logits):
    return torch.arange(len(logits)) % logits.shape[1]


def matrices(m, n, k):
    return (m, k), (n, k)


def heads(m, n, k):
    return (m, 4, k % 40 + 1), (m, 2, k % 40 + 1), (m, 2, n % 40 + 1)


def of_delta_rule(tokens, key, value):
    return *((tokens, 2, key),) * 2, (tokens, 4, value), (tokens, 4), (tokens, 4)


def angles(m, n, k):
    return *((2, h, m, 2 * k) for h in (3, 1)), *[(2, m, 2 * k)] * 2


def rows(m, n, k):
    return ((m, k),)


def rows_with_numbers(m, n, k):
    return (m, k), (m, 1)


# Operator: (its call, the shapes of its tensors for three sizes).
DIFFERENTIABLE = {
    "linear": (OPERATORS.linear, lambda m, n, k: (*matrices(m, n, k), (n,))),
    "partial_linear": (OPERATORS.partial_linear, matrices),
    "blockwise_linear": (
        lambda x, w: OPERATORS.blockwise_linear(x, w, 2),
        lambda m, n, k: matrices(m, n, 2 * k),
    ),
    "grouped_linear": (
        lambda x, w: OPERATORS.grouped_linear(x, w, expert_rows(x, 3)),
        lambda m, n, k: ((m, k), (3, n, k)),
    ),
    "grouped_partial_linear": (
        lambda x, w: OPERATORS.grouped_partial_linear(x, w, expert_rows(x, 3)),
        lambda m, n, k: ((m, k), (3, n, k)),
    ),
    "attention": (
        lambda q, k, v: OPERATORS.attention(q, k, v, split_in_three(len(q)), ScoreRule(0.3)),
        heads,
    ),
    "rms_norm": (lambda x, w: OPERATORS.rms_norm(x, w, 1e-6), lambda m, n, k: ((m, k), (k,))),
    "layer_norm": (
        lambda x, w: OPERATORS.layer_norm(x, w, -w, 1e-6),
        lambda m, n, k: ((m, k), (k,)),
    ),
    "elementwise": (lambda x: OPERATORS.elementwise(F.silu, x), rows),
    "gated": (lambda x, y: OPERATORS.gated(F.gelu, x, y), lambda m, n, k: ((m, k), (m, k))),
    "add_scaled": (
        lambda x, y: OPERATORS.add_scaled(x, y, 0.3),
        lambda m, n, k: ((m, k), (m, k)),
    ),
    "rotary": (lambda *x: torch.cat([y.flatten() for y in OPERATORS.rotary(*x)]), angles),
    "softmax": (OPERATORS.softmax, rows),
    "causal_conv": (
        lambda x, w: OPERATORS.causal_conv(x, w, None, recurrent(len(x))),
        lambda m, n, k: ((m, k), (k, n % 4 + 1)),
    ),
    "gated_delta": (
        lambda *x: OPERATORS.gated_delta(*x[:3], -x[3].float().abs(), x[4], recurrent(len(x[0]))),
        lambda m, n, k: of_delta_rule(min(m, 80), n % 40 + 1, k % 40 + 1),
    ),
    "topk": (lambda x: OPERATORS.topk(x, 1)[0], rows),
    "log_softmax": (lambda x, t: OPERATORS.log_softmax(x, temperature(t)), rows_with_numbers),
}
OTHERS = {
    "paged_attention": (
        lambda q, k, v: OPERATORS.paged_attention(q, k, v, two_to_a_page(len(q)), ScoreRule(0.3)),
        lambda m, n, k: tuple((m, 2, *s[1:]) if i else s for i, s in enumerate(heads(m, n, k))),
    ),
    "gather_log_probs": (
        lambda x, t: torch.cat(OPERATORS.gather_log_probs(x, temperature(t), targets(x))),
        rows_with_numbers,
    ),
    "grad_logits": (
        lambda x, t: OPERATORS.grad_logits(x, temperature(t), targets(x), t[:, 0].float()),
        rows_with_numbers,
    ),
    "sample": (
        lambda x, u: OPERATORS.sample(x.float(), u[:, 0].double().abs() % 1),
        rows_with_numbers,
    ),
}


def test_every_operator_is_here():
    public = {name for name in dir(CpuOperators) if not name.startswith("_")}
    of_others = {"row_parallel_linear", "linear_gradients"}  # one of the linears, and sums
    others = {"column_tile", "key_chunk", "logits_per_chunk", "rows_per_chunk"}
    others |= {"run_pieces", "uniform"}
    others |= {"add_rms_norm", "norm_rotary", "mix_few"}  # made of those
    others |= {"of_rounded", "hold"}  # see tests/onpolicy/ops/hopper/test_fp8.py
    assert public - of_others - others == {*DIFFERENTIABLE, *OTHERS}


def normal(shape, dtype):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def result_and_gradients(call, tensors, layout):
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = call(*leaves)
    grad = layout(normal(out.shape, out.dtype))
    return [out.detach(), *torch.autograd.grad(out, leaves, grad, allow_unused=True)]


def result(call, tensors, _):
    return [call(*tensors)]


def require_layouts_not_to_matter(compute, call, tensors):
    """Every tensor in every layout, the others whole; and the result's gradient too."""
    for i, layout in itertools.product(range(len(tensors) + 1), LAYOUTS):
        others = [layout(x) if i == j else x for j, x in enumerate(tensors)]
        of_grad = layout if i == len(tensors) else whole
        copies = [x.clone(memory_format=torch.contiguous_format) for x in others]
        want = compute(call, copies, lambda grad, layout=of_grad: layout(grad).contiguous())
        for got, theirs in zip(compute(call, others, of_grad), want, strict=True):
            assert got is theirs is None or torch.equal(got, theirs), f"{layout.__name__} {i}"


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@settings(max_examples=8)
@given(sizes, sizes, sizes, st.sampled_from([torch.float32, torch.bfloat16]))
@example(37, 300, 257, torch.float32)
def test_results_and_gradients_do_not_depend_on_the_layout(name, m, n, k, dtype):
    call, shapes = DIFFERENTIABLE[name]
    tensors = [normal(shape, dtype) for shape in shapes(m, n, k)]
    require_layouts_not_to_matter(result_and_gradients, call, tensors)


@pytest.mark.parametrize("name", OTHERS)
@settings(max_examples=8)
@given(sizes, sizes)
@example(37, 257)
def test_results_do_not_depend_on_the_layout(name, m, k):
    call, shapes = OTHERS[name]
    tensors = [normal(shape, torch.float32) for shape in shapes(m, 1, k)]
    require_layouts_not_to_matter(result, call, tensors)


@pytest.mark.parametrize("name", [*DIFFERENTIABLE, *OTHERS])
def test_no_rows_give_no_rows(name):
    call, shapes = (DIFFERENTIABLE | OTHERS)[name]
    if name == "attention":
        call = lambda *x: OPERATORS.attention(*x, AttentionLayout.packed(()), ScoreRule(0.3))  # noqa: E731
    tensors = [torch.randn(shape) for shape in shapes(0, 7, 9)]
    assert call(*tensors).numel() == 0
    if name in DIFFERENTIABLE:
        _, *grads = result_and_gradients(call, tensors, lambda grad: grad)
        assert not any(grad is not None and grad.any() for grad in grads)
