import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.stock import StockOperators

ONE_THREAD, THREE_THREADS = CpuOperators(1), CpuOperators(3)

sizes = st.integers(1, 700)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


def operands(rows, columns, inner, dtype, has_bias):
    generator = torch.Generator().manual_seed(rows * 7 + columns * 3 + inner)
    x = torch.randn(rows, inner, generator=generator).to(dtype)
    weight = (torch.randn(columns, inner, generator=generator) / inner**0.5).to(dtype)
    bias = torch.randn(columns, generator=generator).to(dtype) if has_bias else None
    return x, weight, bias


@given(st.integers(2, 400), sizes, sizes, dtypes, st.booleans(), st.data())
def test_rows_do_not_depend_on_the_rest_of_the_batch(rows, columns, inner, dtype, has_bias, data):
    x, weight, bias = operands(rows, columns, inner, dtype, has_bias)
    whole = ONE_THREAD.linear(x, weight, bias)
    cut = data.draw(st.integers(1, rows - 1))
    parts = [ONE_THREAD.linear(part, weight, bias) for part in (x[:cut], x[cut:])]
    assert torch.equal(torch.cat(parts), whole)
    order = torch.tensor(data.draw(st.permutations(range(rows))))
    assert torch.equal(ONE_THREAD.linear(x[order], weight, bias), whole[order])


@given(
    st.integers(1, 300), st.integers(2, 700), st.integers(1, 2500), dtypes, st.booleans(), st.data()
)
def test_columns_do_not_depend_on_the_others(rows, columns, inner, dtype, has_bias, data):
    """As tensor parallelism shares them out: any part of the columns, and at any place."""
    x, weight, bias = operands(rows, columns, inner, dtype, has_bias)
    whole = ONE_THREAD.linear(x, weight, bias)

    def columns_of(chosen):
        return ONE_THREAD.linear(x, weight[chosen], None if bias is None else bias[chosen])

    cut = data.draw(st.integers(1, columns - 1))
    parts = [columns_of(slice(0, cut)), columns_of(slice(cut, columns))]
    assert torch.equal(torch.cat(parts, dim=1), whole)
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(cut))
    assert torch.equal(columns_of(order), whole[:, order])


@pytest.mark.parametrize("rows", range(16, 257, 48))
@pytest.mark.parametrize("inner", [384, 1000, 2048, 4096])
def test_the_place_in_a_tile_does_not_change_bits(rows, inner):
    x, weight, _ = operands(rows, 256, inner, torch.float32, False)
    whole = ONE_THREAD.linear(x, weight)
    for shift in (1, 37, 128):
        assert torch.equal(ONE_THREAD.linear(x, weight.roll(shift, 0)), whole.roll(shift, 1))
    for columns in (1, 48, 191, 255):  # the rest of the tile is padding
        assert torch.equal(ONE_THREAD.linear(x, weight[:columns]), whole[:, :columns])


@given(st.integers(1, 600), sizes, sizes, dtypes, st.booleans())
def test_threads_do_not_change_bits(rows, columns, inner, dtype, has_bias):
    x, weight, bias = operands(rows, columns, inner, dtype, has_bias)
    one, three = (ops.linear(x, weight, bias) for ops in (ONE_THREAD, THREE_THREADS))
    assert torch.equal(one, three)


def test_threads_do_not_change_bits_where_work_is_shared():
    x, weight, _ = operands(600, 1500, 300, torch.bfloat16, False)
    assert 2 * 600 * 1500 * 300 > 1e8  # above the threshold for sharing
    assert torch.equal(ONE_THREAD.linear(x, weight), THREE_THREADS.linear(x, weight))


@pytest.mark.parametrize("offset", [1, 3, 8])
def test_position_of_the_weight_in_memory_does_not_change_bits(offset):
    x, weight, _ = operands(40, 96, 64, torch.float32, False)
    buffer = torch.empty(weight.numel() + offset)
    moved = buffer[offset:].view(weight.shape).copy_(weight)
    assert torch.equal(ONE_THREAD.linear(x, moved), ONE_THREAD.linear(x, weight))


@given(st.integers(1, 100), sizes, sizes, dtypes, st.booleans())
def test_result_is_close_to_float64(rows, columns, inner, dtype, has_bias):
    x, weight, bias = operands(rows, columns, inner, dtype, has_bias)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    got = ONE_THREAD.linear(x, weight, bias)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact, **tolerance(dtype))


@given(st.integers(1, 100), st.integers(1, 200), st.integers(1, 200), st.booleans())
def test_gradients_are_close_to_autograd(rows, columns, inner, has_bias):
    operands_ = [
        t for t in operands(rows, columns, inner, torch.float32, has_bias) if t is not None
    ]
    inputs = [t.requires_grad_() for t in operands_]
    grad = torch.randn(rows, columns)
    got = torch.autograd.grad(ONE_THREAD.linear(*inputs), inputs, grad)
    want = torch.autograd.grad(F.linear(*inputs), inputs, grad)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@given(st.integers(2, 100), st.integers(1, 200), st.integers(1, 200), dtypes, st.data())
def test_input_gradient_rows_do_not_depend_on_the_rest_of_the_batch(
    rows, columns, inner, dtype, data
):
    x, weight, _ = operands(rows, columns, inner, dtype, False)
    grad = torch.randn(rows, columns).to(dtype)
    cut = data.draw(st.integers(1, rows - 1))

    def input_gradient(x, grad):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(ONE_THREAD.linear(x, weight), x, grad)[0]

    parts = [input_gradient(x[:cut], grad[:cut]), input_gradient(x[cut:], grad[cut:])]
    assert torch.equal(torch.cat(parts), input_gradient(x, grad))


def test_stock_linear_is_not_row_invariant():
    torch.set_num_threads(1)
    x, weight, _ = operands(64, 768, 256, torch.float32, False)
    stock = StockOperators()
    assert not torch.equal(stock.linear(x[:1], weight), stock.linear(x, weight)[:1])


def test_stock_linear_is_not_column_invariant():
    torch.set_num_threads(1)
    x, weight, _ = operands(64, 416, 1000, torch.float32, False)
    stock = StockOperators()
    parts = torch.cat([stock.linear(x, part) for part in weight.chunk(4)], dim=1)
    assert not torch.equal(parts, stock.linear(x, weight))


def test_more_than_one_torch_thread_is_refused():
    x, weight, _ = operands(2, 3, 4, torch.float32, False)
    torch.set_num_threads(2)
    try:
        with pytest.raises(RuntimeError, match=r"get_num_threads\(\)=2.*--cpu-threads"):
            ONE_THREAD.linear(x, weight)
    finally:
        torch.set_num_threads(1)


def tolerance(dtype):
    return {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
