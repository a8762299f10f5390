"""Linears: products in float32, and those of bfloat16 where oneDNN has them or they are widened."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.machine import Machine
from tests.support.invariance import require_row_invariance, require_same_bits

ONE_THREAD, THREE_THREADS = CpuOperators(1), CpuOperators(3)
NARROW = CpuOperators(1, torch.bfloat16), CpuOperators(3, torch.bfloat16)
BOTH = torch.float32, torch.bfloat16

sizes = st.integers(1, 700)
of_products = pytest.mark.parametrize(
    ("products", "kinds"),
    [
        pytest.param((ONE_THREAD, THREE_THREADS), BOTH, id="float32"),
        pytest.param(
            NARROW,
            (torch.bfloat16,),
            id="bfloat16",
            marks=pytest.mark.skipif(
                not Machine.here().bfloat16_products, reason="this CPU has no bfloat16 instructions"
            ),
        ),
    ],
)
"""Operators on one thread and on three, and the dtypes that they are asked for."""


def operands(rows, columns, inner, dtype, has_bias):
    generator = torch.Generator().manual_seed(rows * 7 + columns * 3 + inner)
    x = torch.randn(rows, inner, generator=generator).to(dtype)
    weight = (torch.randn(columns, inner, generator=generator) / inner**0.5).to(dtype)
    bias = torch.randn(columns, generator=generator).to(dtype) if has_bias else None
    return x, weight, bias


@of_products
@given(st.integers(2, 400), sizes, st.integers(1, 2500), st.booleans(), st.data())
def test_rows_do_not_depend_on_the_rest_of_the_batch(
    products, kinds, rows, columns, inner, has_bias, data
):
    x, weight, bias = operands(rows, columns, inner, data.draw(st.sampled_from(kinds)), has_bias)
    require_row_invariance(lambda i: products[0].linear(x[i], weight, bias), rows, data)


def require_column_invariance(linear, x, weight, bias, cut):
    """As tensor parallelism shares them out: any part of the columns, and at any place."""
    whole, columns = linear(x, weight, bias), len(weight)
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(cut)).tolist()
    for part in map(torch.tensor, (range(cut), range(cut, columns), order)):
        got = linear(x, weight[part], None if bias is None else bias[part])
        assert torch.equal(got, whole[:, part]), f"{len(part)} of {columns} columns"


@of_products
@given(st.integers(1, 300), st.integers(2, 700), st.integers(1, 2500), st.booleans(), st.data())
def test_columns_do_not_depend_on_the_others(products, kinds, rows, columns, inner, has_bias, data):
    x, weight, bias = operands(rows, columns, inner, data.draw(st.sampled_from(kinds)), has_bias)
    cut = data.draw(st.integers(1, columns - 1))
    require_column_invariance(products[0].linear, x, weight, bias, cut)


@pytest.mark.parametrize("rows", range(16, 257, 48))
@pytest.mark.parametrize("inner", [384, 1000, 2048, 4096])
def test_the_place_in_a_tile_does_not_change_bits(rows, inner):
    x, weight, _ = operands(rows, 256, inner, torch.float32, False)
    whole = ONE_THREAD.linear(x, weight)
    for shift in (1, 37, 128):
        assert torch.equal(ONE_THREAD.linear(x, weight.roll(shift, 0)), whole.roll(shift, 1))
    for columns in (1, 48, 191, 255):  # the rest of the tile is padding
        assert torch.equal(ONE_THREAD.linear(x, weight[:columns]), whole[:, :columns])


@of_products
@given(st.integers(1, 600), sizes, sizes, st.booleans(), st.data())
def test_threads_do_not_change_bits(products, kinds, rows, columns, inner, has_bias, data):
    x, weight, bias = operands(rows, columns, inner, data.draw(st.sampled_from(kinds)), has_bias)
    one, three = (ops.linear(x, weight, bias) for ops in products)
    assert torch.equal(one, three)


@pytest.mark.parametrize("offset", [1, 3, 8])
def test_position_of_the_weight_in_memory_does_not_change_bits(offset):
    x, weight, _ = operands(40, 96, 64, torch.float32, False)
    buffer = torch.empty(weight.numel() + offset)
    moved = buffer[offset:].view(weight.shape).copy_(weight)
    assert torch.equal(ONE_THREAD.linear(x, moved), ONE_THREAD.linear(x, weight))


@of_products
@given(st.integers(1, 100), sizes, sizes, st.booleans(), st.data())
def test_result_and_gradients_are_close_to_float64(
    products, kinds, rows, columns, inner, has_bias, data
):
    dtype = data.draw(st.sampled_from(kinds))
    given_ = operands(rows, columns, inner, dtype, has_bias)
    inputs = [t.requires_grad_() for t in given_ if t is not None]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    got, want = products[0].linear(*inputs), F.linear(*exact)
    grad = torch.randn(rows, columns).to(dtype)
    pairs = zip(
        (got, *torch.autograd.grad(got, inputs, grad)),
        (want, *torch.autograd.grad(want, exact, grad.double())),
        strict=True,
    )
    for ours, theirs in pairs:
        assert ours.dtype == dtype
        most = 1e-4 if dtype == torch.float32 else 1e-2 * (theirs.abs().max().item() + 1)
        torch.testing.assert_close(ours.double(), theirs, rtol=min(most, 1e-2), atol=most)


def input_gradient(operators, x, weight, grad):
    """The gradient of some rows of the input, by their numbers."""

    def of_rows(i):
        leaf = x[i].requires_grad_()
        return torch.autograd.grad(operators.linear(leaf, weight), leaf, grad[i])[0]

    return of_rows


def some_gradient(rows, columns):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))


@of_products
@given(st.integers(2, 300), st.integers(1, 1500), st.integers(1, 300), st.data())
def test_gradients_of_rows_do_not_depend_on_the_rest_of_the_batch(
    products, kinds, rows, columns, inner, data
):
    x, weight, _ = operands(rows, columns, inner, data.draw(st.sampled_from(kinds)), False)
    grad = some_gradient(rows, columns).to(x.dtype)
    require_row_invariance(input_gradient(products[0], x, weight, grad), rows, data)


@pytest.mark.parametrize("columns", [384, 1000, 2048, 4096])
def test_gradients_of_rows_do_not_depend_on_their_number(columns):
    """A gradient is a sum over the columns; some kernels split a long one for few rows."""
    x, weight, _ = operands(256, columns, 300, torch.float32, False)
    of_rows = input_gradient(ONE_THREAD, x, weight, some_gradient(256, columns))
    require_same_bits(of_rows, 256, [range(m) for m in range(16, 256, 16)])


@pytest.mark.parametrize("rows", [272, 512, 1024, 1040])
@pytest.mark.parametrize("inner", [192, 1000, 4096])
def test_rows_of_a_large_tile_have_the_bits_of_small_ones(rows, inner):
    """In both directions, and on threads that share them out in other ways."""
    x, weight, _ = operands(rows, 272, inner, torch.float32, False)
    few = [range(r, min(r + 208, rows)) for r in range(0, rows, 208)]
    require_same_bits(lambda i: ONE_THREAD.linear(x[i], weight), rows, few)
    grad = ONE_THREAD.linear(x, weight)
    on_one, on_three = (input_gradient(ops, x, weight, grad) for ops in (ONE_THREAD, THREE_THREADS))
    require_same_bits(on_one, rows, few)
    assert torch.equal(on_three(slice(None)), on_one(slice(None)))


def test_more_than_one_torch_thread_is_refused():
    x, weight, _ = operands(2, 3, 4, torch.float32, False)
    torch.set_num_threads(2)
    try:
        with pytest.raises(RuntimeError, match=r"get_num_threads\(\)=2.*--cpu-threads"):
            ONE_THREAD.linear(x, weight)
    finally:
        torch.set_num_threads(1)
