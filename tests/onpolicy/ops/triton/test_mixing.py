"""A mixture of experts in few kernels, in Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from onpolicy.ops.mixture_of_experts import gated_halves, mix_experts
from onpolicy.ops.row_parallel import WHOLE
from onpolicy.ops.triton import TritonOperators, mixing
from tests.support.kernel_launches import count_kernels

OPERATORS = TritonOperators()


class ManyKernels(TritonOperators):
    """As more rows than MOST_ROWS are computed, and every row that has a gradient."""

    def mix_few(self, *_):
        return None


def layer(tokens, experts, k, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    scores = numbers(tokens, experts).float().softmax(-1)
    weights, chosen = scores.topk(k)
    return numbers(tokens, 24), chosen, weights, numbers(experts, 40, 24), numbers(experts, 24, 20)


def mix(operators, x, chosen, weights, gate_up, down):
    gate = gated_halves(operators, F.silu)
    with torch.no_grad():
        return mix_experts(operators, x, chosen, weights, gate_up, down, gate, WHOLE)


@settings(max_examples=8)
@given(
    st.integers(1, 9),
    st.integers(2, 70),
    st.integers(1, 2),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_few_kernels_have_the_bits_of_many(tokens, experts, k, dtype):
    given = layer(tokens, experts, k, dtype)
    got = mix(OPERATORS, *given)
    assert got.dtype == dtype and torch.equal(got, mix(ManyKernels(), *given))


@settings(max_examples=20)
@given(st.lists(st.integers(0, 66), min_size=1, max_size=150))
def test_rows_are_ordered_as_a_stable_sort_orders_them(experts):
    chosen = torch.tensor(experts)
    order, offsets = mixing.order_by_expert(chosen, 67)
    assert torch.equal(order, chosen.sort(stable=True)[1])
    assert offsets.tolist() == [sum(e < expert for e in experts) for expert in range(68)]


def test_more_rows_take_the_other_way(monkeypatch):
    given = layer(6, 5, 2, torch.bfloat16)
    want = mix(OPERATORS, *given)
    monkeypatch.setattr(mixing, "MOST_ROWS", 11)
    assert OPERATORS.mix_few(*given, gate=None) is None
    assert torch.equal(mix(OPERATORS, *given), want)


@pytest.mark.parametrize(("operators", "most"), [(OPERATORS, 5)])
def test_a_mixture_takes_five_kernels(operators, most):
    given = layer(8, 16, 4, torch.bfloat16)
    mix(operators, *given)
    counted = count_kernels(lambda: mix(operators, *given))
    assert sum(counted.values()) <= most, counted
    assert sum(count_kernels(lambda: mix(ManyKernels(), *given)).values()) > 2 * most
