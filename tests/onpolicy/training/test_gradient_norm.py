"""The norm of a gradient on ranks that hold other parts of it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.ops.stock import StockOperators
from onpolicy.training import gradient_norm
from onpolicy.training.gradient_norm import global_norm
from tests.support.ranks import on_ranks

WIDE = torch.randn(2000, generator=torch.Generator().manual_seed(0)).mul(3).exp()
"""Of several orders of magnitude, so that the order of a sum decides its last bits."""


def norm_of(shards):
    """As rank 0 of as many ranks finds it."""
    norms = on_ranks(len(shards), lambda rank: global_norm(shards[rank], StockOperators()))
    assert [*map(repr, norms)] == [repr(norms[0])] * len(norms)
    return norms[0]


@given(
    st.lists(st.integers(0, len(WIDE)), max_size=5).map(sorted),
    st.integers(1, 4),
    st.sampled_from([1 << 22, 7]),
)
def test_it_does_not_depend_on_how_the_gradient_is_cut(cuts, ranks, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gradient_norm.BLOCKS, "cpu", block)
        parts = WIDE.tensor_split(cuts)
        cut = norm_of([list(parts[rank::ranks]) for rank in range(ranks)])
    assert cut == norm_of([[WIDE.view(40, 50)]])


def test_a_sum_in_float32_depends_on_it():
    """So the test above would notice. Each 1 is lost beside 2 ** 24, and 64 together are not."""
    gradient = torch.tensor([2.0**12, *[1.0] * 64])
    first, *others = gradient.square()
    nothing = torch.tensor(0.0)
    assert sum(others, first) != sum(others, nothing) + first
    assert norm_of([[gradient]]) == math.sqrt(2.0**24 + 64)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=20))
def test_it_is_the_norm(values):
    gradient = torch.tensor(values)
    largest = max(map(abs, values), default=0.0)
    scaled = [x / largest for x in values] if largest else []
    expected = largest * math.sqrt(math.fsum(x * x for x in scaled))
    assert norm_of([[gradient]]) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_on_one_rank_is_not_finite_on_all(value):
    ranks = [[torch.ones(3)], [torch.tensor([1.0, value]), torch.tensor([math.inf])], []]
    assert not math.isfinite(norm_of(ranks))


def test_there_may_be_nothing():
    assert norm_of([[], [torch.empty(0, 4)], [torch.zeros(2)]]) == 0
