"""Products of bfloat16 as oneDNN has them; their bits and accuracy are in `test_linear.py`."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.machine import Machine
from tests.onpolicy.ops.test_linear import operands as float32_operands

pytestmark = pytest.mark.skipif(
    not Machine.here().bfloat16_products, reason="this CPU has no bfloat16 instructions"
)
ONE_THREAD = CpuOperators(1, torch.bfloat16)
WIDENED = CpuOperators(1)


def operands(rows, columns, inner):
    return [x.bfloat16() for x in float32_operands(rows, columns, inner, torch.float32, False)[:2]]


def test_what_is_not_rounded_or_not_bfloat16_is_multiplied_as_before():
    x, weight = operands(40, 300, 200)
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
    x, weight = operands(40, 512, 200)
    inputs = x.requires_grad_(), weight.requires_grad_()
    with Widened() as widened:
        out = operators.linear(*inputs)
        torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert (widened.count == 0) == (operators is ONE_THREAD)
