"""The linear kernel in Triton's interpreter (tests/support/triton_interpreter.py)."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from onpolicy.ops.row_parallel import RowParallel, tree_sum
from onpolicy.ops.triton import TritonOperators, linear
from onpolicy.ops.triton.block_sums import add_blocks
from onpolicy.ops.triton.linear import tiled_linear, tiles

OPERATORS = TritonOperators()

few = settings(max_examples=10)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
rows, columns, inner = st.integers(2, 140), st.integers(1, 70), st.integers(1, 150)


def operands(m, n, k, dtype, has_bias=True):
    generator = torch.Generator().manual_seed(m * 1009 + n * 31 + k)
    x = torch.randn(m, k, generator=generator).to(dtype)
    weight = (torch.randn(n, k, generator=generator) / k**0.5).to(dtype)
    bias = torch.randn(n, generator=generator).to(dtype) if has_bias else None
    return x, weight, bias


@few
@given(rows, columns, inner, dtypes, st.data())
def test_rows_do_not_depend_on_the_rest_of_the_batch(m, n, k, dtype, data):
    x, weight, bias = operands(m, n, k, dtype)
    whole = OPERATORS.linear(x, weight, bias)
    first = data.draw(st.integers(0, m - 1))
    last = data.draw(st.integers(first + 1, m))
    assert torch.equal(OPERATORS.linear(x[first:last], weight, bias), whole[first:last])
    order = torch.tensor(data.draw(st.permutations(range(m))))
    assert torch.equal(OPERATORS.linear(x[order], weight, bias), whole[order])


@few
@given(rows, columns, inner, dtypes, st.sampled_from([80, 90]))
def test_every_tile_gives_the_same_bits(m, n, k, dtype, arch):
    x, weight, bias = operands(m, n, k, dtype)
    results = [tiled_linear(x, weight, bias, dtype, 1, tile) for tile in tiles(dtype, arch)]
    for result in results[1:]:
        assert torch.equal(result, results[0])


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9))
def test_every_tile_is_computed_once_and_neighbours_in_time_read_few_rows(height, width, group):
    count = height * width
    tiles = [linear.tile_of.fn(i, height, width, group) for i in range(count)]
    assert sorted(tiles) == [(i, j) for i in range(height) for j in range(width)]
    at_a_time = [tiles[i : i + group * width] for i in range(count)]
    assert max(len({row for row, _ in some}) for some in at_a_time) <= 2 * group


@few
@given(rows, st.integers(2, 70), inner, dtypes, st.data())
def test_columns_do_not_depend_on_how_ranks_share_them(m, n, k, dtype, data):
    x, weight, bias = operands(m, n, k, dtype)
    cut = data.draw(st.integers(1, n - 1))
    parts = [OPERATORS.linear(x, weight[s], bias[s]) for s in (slice(cut), slice(cut, n))]
    assert torch.equal(torch.cat(parts, 1), OPERATORS.linear(x, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operands_may_lie_in_memory_in_any_way(dtype):
    x, weight, _ = operands(20, 30, 40, dtype)
    want = OPERATORS.linear(x, weight)
    apart = torch.cat([x, x], 1)[:, :40]
    assert torch.equal(OPERATORS.linear(apart, weight), want)
    assert torch.equal(OPERATORS.linear(x.t().contiguous().t(), weight), want)
    assert torch.equal(OPERATORS.linear(x, weight.t().contiguous().t()), want)


@few
@given(rows, columns, inner)
def test_results_are_sums_in_float32_rounded_once(m, n, k):
    x, weight, bias = operands(m, n, k, torch.bfloat16)
    exact = F.linear(x.double(), weight.double(), bias.double())
    partial = OPERATORS.partial_linear(x, weight)
    assert partial.dtype == torch.float32
    torch.testing.assert_close(partial.double() + bias.double(), exact, rtol=1e-4, atol=1e-5)
    assert torch.equal(OPERATORS.linear(x, weight, bias), (partial + bias.float()).bfloat16())


def test_a_row_parallel_linear_of_one_block_is_the_linear():
    x, weight, bias = operands(9, 20, 64, torch.bfloat16)
    whole = OPERATORS.row_parallel_linear(x, weight, bias, RowParallel(blocks=1))
    assert torch.equal(whole, OPERATORS.linear(x, weight, bias))


def products_of_blocks(x, weight, blocks):
    pairs = zip(x.chunk(blocks, 1), weight.chunk(blocks, 1), strict=True)
    return [OPERATORS.partial_linear(*pair) for pair in pairs]


@few
@given(
    rows, columns, st.integers(1, 40), st.sampled_from([2, 4, 8, 16]), dtypes, st.booleans(),
    st.sampled_from([1, 80, 10**6]), st.sampled_from([80, 90]),
)  # fmt: skip
def test_however_thread_blocks_share_a_tree_it_is_that_of_ranks(
    m, n, k, blocks, dtype, has_bias, enough, arch
):
    x, weight, bias = operands(m, n, k * blocks, dtype, has_bias)
    want = tree_sum(products_of_blocks(x, weight, blocks))
    rounded = (want if bias is None else want + bias.float()).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "ENOUGH_TILES", enough)
        for tile in tiles(dtype, arch):
            got = tiled_linear(x, weight, None, torch.float32, blocks, tile)
            assert torch.equal(got, want)
            assert torch.equal(tiled_linear(x, weight, bias, dtype, blocks, tile), rounded)


@few
@given(st.integers(1, 3), st.integers(1, 700), st.sampled_from([1, 2, 8]), dtypes, st.booleans())
def test_sums_of_blocks_are_rounded_once_after_the_bias(m, n, blocks, dtype, has_bias):
    generator = torch.Generator().manual_seed(n)
    terms = torch.randn(blocks, m, n, generator=generator)
    bias = torch.randn(n, generator=generator).to(dtype) if has_bias else None
    total = tree_sum(terms.unbind())
    want = (total if bias is None else total + bias.float()).to(dtype)
    assert torch.equal(add_blocks(terms, bias, dtype), want)
    assert add_blocks(terms[:, :0], bias, dtype).shape == (0, n)


@few
@given(rows, columns, inner, st.booleans())
def test_gradients_are_close_to_float64(m, n, k, has_bias):
    leaves = [
        t.requires_grad_() for t in operands(m, n, k, torch.float32, has_bias) if t is not None
    ]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    grad = torch.randn(m, n)

    def in_blocks(x, weight, bias=None):
        return OPERATORS.row_parallel_linear(x, weight, bias, RowParallel(2 - k % 2))

    operators = OPERATORS.linear, OPERATORS.partial_linear, in_blocks
    for operator, reference in [(operator, F.linear) for operator in operators]:
        if has_bias and operator == OPERATORS.partial_linear:
            continue
        ours = torch.autograd.grad(operator(*leaves), leaves, grad)
        for got, want in zip(
            ours, torch.autograd.grad(reference(*exact), exact, grad.double()), strict=True
        ):
            torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-4)


def test_no_rows_and_leading_axes():
    x, weight, bias = operands(6, 5, 8, torch.float32)
    assert OPERATORS.linear(x[:0], weight, bias).shape == (0, 5)
    assert torch.equal(
        OPERATORS.linear(x.view(2, 3, 8), weight, bias),
        OPERATORS.linear(x, weight, bias).view(2, 3, 5),
    )
