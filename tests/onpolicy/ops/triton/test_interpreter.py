"""What tests/support/triton_interpreter.py puts right, and that it stays inside this process."""

import os

import torch
import triton
import triton.language as tl


@triton.jit
def _round_kernel(x, out, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    tl.store(out + offsets, tl.load(x + offsets).to(tl.bfloat16))


def interpreted(kernel):
    from triton.runtime.interpreter import InterpretedFunction

    return InterpretedFunction(kernel.fn)


def test_float32_is_rounded_to_bfloat16_as_pytorch_does():
    bits = torch.randint(-(1 << 31), 1 << 31, (4096,), dtype=torch.int64).to(torch.int32)
    x = bits.view(torch.float32)
    x[:4] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, torch.inf, 3.4e38])
    out = torch.empty(4096, dtype=torch.bfloat16)
    interpreted(_round_kernel)[(1,)](x, out, SIZE=4096)
    want = x.to(torch.bfloat16)
    assert torch.equal(out.isnan(), want.isnan())
    assert torch.equal(out.nan_to_num(), want.nan_to_num())


def test_servers_started_by_tests_do_not_inherit_the_interpreter():
    assert "TRITON_INTERPRET" not in os.environ
