"""Products of bfloat16 as oneDNN has them: what `test_linear.py` asks of those in float32."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.machine import Machine
from tests.support.invariance import require_row_invariance
from tests.support.violations import next_up

pytestmark = pytest.mark.skipif(
    not Machine.here().bfloat16_products, reason="this CPU has no bfloat16 instructions"
)
ONE_THREAD, THREE_THREADS = (CpuOperators(threads, torch.bfloat16) for threads in (1, 3))
WIDENED = CpuOperators(1)

sizes = st.integers(1, 700)


def operands(rows, columns, inner, has_bias=False):
    generator = torch.Generator().manual_seed(rows * 7 + columns * 3 + inner)
    x = torch.randn(rows, inner, generator=generator)
    weight = torch.randn(columns, inner, generator=generator) / inner**0.5
    bias = torch.randn(columns, generator=generator) if has_bias else None
    return [None if t is None else t.bfloat16() for t in (x, weight, bias)]


@given(st.integers(2, 400), sizes, st.integers(1, 2500), st.booleans(), st.data())
def test_rows_do_not_depend_on_the_rest_of_the_batch(rows, columns, inner, has_bias, data):
    x, weight, bias = operands(rows, columns, inner, has_bias)
    require_row_invariance(lambda i: ONE_THREAD.linear(x[i], weight, bias), rows, data)


@given(st.integers(1, 300), st.integers(2, 700), st.integers(1, 2500), st.booleans(), st.data())
def test_columns_do_not_depend_on_the_others(rows, columns, inner, has_bias, data):
    x, weight, bias = operands(rows, columns, inner, has_bias)
    whole, cut = ONE_THREAD.linear(x, weight, bias), data.draw(st.integers(1, columns - 1))
    for part in (slice(0, cut), slice(cut, columns)):
        got = ONE_THREAD.linear(x, weight[part], None if bias is None else bias[part])
        assert torch.equal(got, whole[:, part])


@given(st.integers(1, 600), sizes, sizes, st.booleans())
def test_threads_do_not_change_bits(rows, columns, inner, has_bias):
    one, three = (
        ops.linear(*operands(rows, columns, inner, has_bias)) for ops in (ONE_THREAD, THREE_THREADS)
    )
    assert torch.equal(one, three)


@given(st.integers(2, 300), st.integers(1, 1500), st.integers(1, 300), st.data())
def test_gradients_of_rows_do_not_depend_on_the_rest_of_the_batch(rows, columns, inner, data):
    x, weight, _ = operands(rows, columns, inner)
    grad = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).bfloat16()

    def of_rows(i):
        leaf = x[i].requires_grad_()
        return torch.autograd.grad(ONE_THREAD.linear(leaf, weight), leaf, grad[i])[0]

    require_row_invariance(of_rows, rows, data)


@given(st.integers(1, 100), sizes, sizes, st.booleans())
def test_result_and_gradients_are_close_to_float64(rows, columns, inner, has_bias):
    inputs = [t.requires_grad_() for t in operands(rows, columns, inner, has_bias) if t is not None]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    got, want = ONE_THREAD.linear(*inputs), F.linear(*exact)
    grad = torch.randn(rows, columns).bfloat16()
    pairs = zip(
        (got, *torch.autograd.grad(got, inputs, grad)),
        (want, *torch.autograd.grad(want, exact, grad.double())),
        strict=True,
    )
    for ours, theirs in pairs:
        assert ours.dtype == torch.bfloat16
        scale = theirs.abs().max().item() + 1
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-2, atol=1e-2 * scale)


def test_what_is_not_rounded_or_not_bfloat16_is_multiplied_as_before():
    x, weight, _ = operands(40, 300, 200)
    parts = [ops.partial_linear(x, weight) for ops in (ONE_THREAD, WIDENED)]
    assert parts[0].dtype == torch.float32 and torch.equal(*parts)
    x, weight = x.float(), weight.float()
    assert torch.equal(ONE_THREAD.linear(x, weight), WIDENED.linear(x, weight))


class Widened(TorchDispatchMode):
    """Counts the float32 numbers that any operation makes."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
            self.count += result.numel()
        return result


@pytest.mark.parametrize("operators", [ONE_THREAD, WIDENED])
def test_no_operand_is_widened(operators):
    x, weight, _ = operands(40, 512, 200)
    inputs = x.requires_grad_(), weight.requires_grad_()
    with Widened() as widened:
        out = operators.linear(*inputs)
        torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert (widened.count == 0) == (operators is ONE_THREAD)


def test_a_row_that_depends_on_the_others_is_found():
    x, weight, _ = operands(64, 30, 40)

    def linear(x):
        out = ONE_THREAD.linear(x, weight)
        return next_up(out) if len(x) < 16 else out

    with pytest.raises(AssertionError):
        assert torch.equal(linear(x[:9]), linear(x)[:9])
