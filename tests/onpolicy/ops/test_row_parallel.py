"""A row-parallel linear gives the same bits on one rank and on many, and close gradients."""

import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.errors import ContractError
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.row_parallel import RowParallel, tree_sum
from onpolicy.ops.stock import StockOperators
from tests.onpolicy.ops.test_linear import operands
from tests.support.forked_ranks import run_on_ranks
from tests.support.invariance import require_row_invariance

OPERATORS = CpuOperators(1)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# (rows, N, K): odd sizes, blocks of one element, and a K that MKL cuts.
SHAPES = ((1, 96, 8), (5, 48, 208), (33, 137, 96), (300, 96, 1504), (17, 300, 2304))


def result_and_gradients(x, weight, bias, row_parallel):
    """[M, N], and the gradients of x, weight and bias."""
    inputs = [t.clone().requires_grad_() for t in (x, weight, bias) if t is not None]
    out = OPERATORS.row_parallel_linear(*inputs, *[None] * (bias is None), row_parallel)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return out.detach(), torch.autograd.grad(out, inputs, grad)


def compare_with_one_rank(rank, ranks, rendezvous):
    """Every shape, dtype and number of blocks, on this rank's part of K and on all of it."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    for shape, dtype, blocks in itertools.product(SHAPES, DTYPES, (ranks, 8)):
        x, weight, bias = operands(*shape, dtype, has_bias=shape[0] % 2 == 1)
        part = [t.chunk(ranks, dim=-1)[rank] for t in (x, weight)]
        whole, whole_grads = result_and_gradients(x, weight, bias, RowParallel(blocks))
        here, grads = result_and_gradients(*part, bias, RowParallel(blocks, dist.group.WORLD))
        assert torch.equal(here, whole), (shape, dtype, blocks)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        for ours, all_of_it in zip(grads[:2], whole_grads, strict=False):
            mine = all_of_it.chunk(ranks, dim=-1)[rank]
            torch.testing.assert_close(ours, mine, rtol=tolerance, atol=tolerance)
    x, weight, exact = rounding_parts(ranks)
    part = [t.chunk(ranks, dim=-1)[rank] for t in (x, weight)]
    here = OPERATORS.row_parallel_linear(*part, None, RowParallel(ranks, dist.group.WORLD))
    assert here.item() == OPERATORS.linear(x, weight).item() == exact
    # The negative control: rounded parts in an all-reduce are another sum.
    all_reduced = OPERATORS.linear(*part)
    dist.all_reduce(all_reduced)
    assert all_reduced.item() == 1 != exact
    dist.destroy_process_group()


def rounding_parts(ranks):
    """bfloat16 operands whose product is 1 + 2^-7, and 1 if a rank's part of it is rounded."""
    weight = torch.zeros(1, 2 * ranks, dtype=torch.bfloat16)
    weight[0, :3] = torch.tensor([1, 2**-8, 2**-8])  # 1 + 2^-8 rounds to 1, the even neighbour
    return torch.ones_like(weight), weight, 1 + 2**-7


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_k_give_the_bits_of_one_rank(ranks, tmp_path):
    run_on_ranks(compare_with_one_rank, (ranks, tmp_path / "rendezvous"), ranks)


@given(st.integers(0, 5), st.integers(0, 5), st.integers(1, 40))
def test_a_rank_that_adds_up_its_own_blocks_holds_a_subtree(log_ranks, log_more, size):
    ranks, blocks = 2**log_ranks, 2 ** (log_ranks + log_more)
    terms = torch.randn(blocks, size, generator=torch.Generator().manual_seed(blocks)).unbind()
    each = blocks // ranks
    parts = [tree_sum(terms[rank * each : (rank + 1) * each]) for rank in range(ranks)]
    assert torch.equal(tree_sum(parts), tree_sum(terms))
    assert torch.equal(tree_sum(torch.stack(terms)), tree_sum(terms))


@given(st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.booleans())
def test_one_block_is_the_plain_linear(shape, dtype, has_bias):
    inputs = operands(*shape, dtype, has_bias)
    assert torch.equal(
        OPERATORS.row_parallel_linear(*inputs, RowParallel()), OPERATORS.linear(*inputs)
    )


@given(
    st.integers(2, 100), st.integers(1, 300), st.integers(1, 200), st.sampled_from([2, 4, 8]),
    st.sampled_from(DTYPES), st.data(),
)  # fmt: skip
def test_rows_do_not_depend_on_the_rest_of_the_batch(rows, columns, size, blocks, dtype, data):
    x, weight, bias = operands(rows, columns, size * blocks, dtype, True)
    row_parallel = RowParallel(blocks)
    require_row_invariance(
        lambda i: OPERATORS.row_parallel_linear(x[i], weight, bias, row_parallel), rows, data
    )


def test_stock_operators_sum_over_all_of_k_at_once():
    x, weight, bias = operands(64, 96, 208, torch.float32, True)
    stock = StockOperators()
    assert torch.equal(
        stock.row_parallel_linear(x, weight, bias, RowParallel(4)), stock.linear(x, weight, bias)
    )


@pytest.mark.parametrize("blocks", [0, 3, 6, -2])
def test_blocks_that_make_no_tree_are_refused(blocks):
    with pytest.raises(
        ContractError, match=f"row_parallel_blocks={blocks}: must be a power of two"
    ):
        RowParallel(blocks)


def test_a_k_that_blocks_do_not_divide_is_refused():
    x, weight, _ = operands(4, 5, 10, torch.float32, False)
    with pytest.raises(ContractError, match=r"row_parallel_blocks=4: .*an axis of 10"):
        OPERATORS.row_parallel_linear(x, weight, None, RowParallel(4))
