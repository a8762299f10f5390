import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.ops.cpu import CpuOperators
from tests.support.invariance import require_row_invariance, require_same_bits
from tests.support.violations import break_operator, next_up

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
    require_row_invariance(lambda i: ONE_THREAD.linear(x[i], weight, bias), rows, data)


def require_column_invariance(linear, x, weight, bias, cut):
    """As tensor parallelism shares them out: any part of the columns, and at any place."""
    whole, columns = linear(x, weight, bias), len(weight)
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(cut)).tolist()
    for part in map(torch.tensor, (range(cut), range(cut, columns), order)):
        got = linear(x, weight[part], None if bias is None else bias[part])
        assert torch.equal(got, whole[:, part]), f"{len(part)} of {columns} columns"


@given(
    st.integers(1, 300), st.integers(2, 700), st.integers(1, 2500), dtypes, st.booleans(), st.data()
)
def test_columns_do_not_depend_on_the_others(rows, columns, inner, dtype, has_bias, data):
    x, weight, bias = operands(rows, columns, inner, dtype, has_bias)
    cut = data.draw(st.integers(1, columns - 1))
    require_column_invariance(ONE_THREAD.linear, x, weight, bias, cut)


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


@given(st.integers(2, 300), st.integers(1, 1500), st.integers(1, 300), dtypes, st.data())
def test_gradients_of_rows_do_not_depend_on_the_rest_of_the_batch(
    rows, columns, inner, dtype, data
):
    x, weight, _ = operands(rows, columns, inner, dtype, False)
    grad = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).to(dtype)

    def of_rows(i):
        leaf = x[i].requires_grad_()
        return torch.autograd.grad(ONE_THREAD.linear(leaf, weight), leaf, grad[i])[0]

    require_row_invariance(of_rows, rows, data)


@pytest.mark.parametrize("columns", [384, 1000, 2048, 4096])
def test_gradients_of_rows_do_not_depend_on_their_number(columns):
    """A gradient is a sum over the columns; some kernels split a long one for few rows."""
    x, weight, _ = operands(256, columns, 300, torch.float32, False)
    grad = torch.randn(256, columns, generator=torch.Generator().manual_seed(1))

    def of_rows(i):
        leaf = x[i].requires_grad_()
        return torch.autograd.grad(ONE_THREAD.linear(leaf, weight), leaf, grad[i])[0]

    require_same_bits(of_rows, 256, [range(m) for m in range(16, 256, 16)])


@pytest.mark.parametrize("rows", [272, 512, 1024, 1040])
@pytest.mark.parametrize("inner", [192, 1000, 4096])
def test_rows_of_a_large_tile_have_the_bits_of_small_ones(rows, inner):
    """In both directions, and on threads that share them out in other ways."""
    x, weight, _ = operands(rows, 272, inner, torch.float32, False)
    few = [range(r, min(r + 208, rows)) for r in range(0, rows, 208)]
    require_same_bits(lambda i: ONE_THREAD.linear(x[i], weight), rows, few)
    grad = ONE_THREAD.linear(x, weight)

    def of_rows(i, operators=ONE_THREAD):
        part = x[i].requires_grad_()
        return torch.autograd.grad(operators.linear(part, weight), part, grad[i])[0]

    require_same_bits(of_rows, rows, few)
    assert torch.equal(of_rows(slice(None), THREE_THREADS), of_rows(slice(None)))


def test_rows_that_depend_on_their_number_are_found():
    x, weight, _ = operands(64, 30, 40, torch.float32, False)
    linear = break_operator(CpuOperators(), "linear").linear
    parts = [range(16, 64), range(9)]
    require_same_bits(lambda i: ONE_THREAD.linear(x[i], weight), 64, parts)
    with pytest.raises(AssertionError, match="9 of 64 rows"):
        require_same_bits(lambda i: linear(x[i], weight), 64, parts)


def test_columns_that_depend_on_their_number_are_found():
    def linear(x, weight, bias):
        out = ONE_THREAD.linear(x, weight, bias)
        return next_up(out) if len(weight) < 30 else out

    operands_ = operands(5, 100, 40, torch.float32, True)
    require_column_invariance(ONE_THREAD.linear, *operands_, cut=29)
    with pytest.raises(AssertionError, match="29 of 100 columns"):
        require_column_invariance(linear, *operands_, cut=29)


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
