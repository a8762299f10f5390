"""RMS norm, activations, softmax, log-softmax: each row, or element, by itself."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from transformers.activations import ACT2FN

from onpolicy.ops.cpu import CpuOperators
from tests.support.invariance import require_row_invariance, require_same_bits
from tests.support.violations import next_up

OPERATORS = CpuOperators(1)

dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
rows = st.integers(2, 70)
columns = st.integers(1, 1100)
ACTIVATIONS = (
    "silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "quick_gelu", "sigmoid", "relu2", "mish",
)  # fmt: skip


def values(rows, columns, dtype):
    generator = torch.Generator().manual_seed(rows * 1009 + columns)
    return (4 * torch.randn(rows, columns, generator=generator)).to(dtype)


ROWWISE = {
    "rms_norm": lambda x: OPERATORS.rms_norm(
        x, torch.linspace(0.5, 2, x.shape[-1]).to(x.dtype), 1e-6
    ),
    "rms_norm rounded last": lambda x: OPERATORS.rms_norm(
        x, torch.linspace(0.5, 2, x.shape[-1]), 1e-6, round_last=True
    ),
    "layer_norm": lambda x: OPERATORS.layer_norm(
        x, *torch.linspace(0.5, 2, 2 * x.shape[-1]).to(x.dtype).chunk(2), 1e-5
    ),
    "softmax": OPERATORS.softmax,
    "log_softmax": lambda x: OPERATORS.log_softmax(x, torch.full((len(x), 1), 0.7)),
    **{name: lambda x, f=ACT2FN[name]: OPERATORS.elementwise(f, x) for name in ACTIVATIONS},
}


@pytest.mark.parametrize("name", ROWWISE)
@given(rows, columns, dtypes, st.data())
def test_rows_do_not_depend_on_the_rest_of_the_batch(name, rows, columns, dtype, data):
    x = values(rows, columns, dtype)
    require_row_invariance(lambda i: ROWWISE[name](x[i]), rows, data)


@pytest.mark.parametrize("name", ROWWISE)
@given(rows, columns, dtypes, st.data())
def test_gradients_of_rows_do_not_depend_on_the_rest_of_the_batch(name, rows, columns, dtype, data):
    x = values(rows, columns, dtype)

    def of_rows(i):
        leaf = x[i].requires_grad_()
        out = ROWWISE[name](leaf)
        return torch.autograd.grad(out, leaf, x[i].cos().to(out.dtype))[0]

    require_row_invariance(of_rows, rows, data)


@given(rows, columns, dtypes)
def test_results_are_the_stock_functions(rows, columns, dtype):
    x = values(rows, columns, dtype)
    weight = torch.linspace(0.5, 2, columns).to(dtype)
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-2}
    )
    torch.testing.assert_close(
        OPERATORS.rms_norm(x, weight, 1e-6), F.rms_norm(x, (columns,), weight, 1e-6), **tolerance
    )
    torch.testing.assert_close(
        OPERATORS.rms_norm(x, weight, 1e-6, round_last=True),
        OPERATORS.rms_norm(x.float(), weight.float(), 1e-6).to(dtype),
        rtol=0,
        atol=0,
    )
    torch.testing.assert_close(
        OPERATORS.layer_norm(x, weight, weight, 1e-5),
        F.layer_norm(x, (columns,), weight, weight, 1e-5),
        **tolerance,
    )
    torch.testing.assert_close(OPERATORS.elementwise(F.silu, x), F.silu(x), **tolerance)
    torch.testing.assert_close(OPERATORS.softmax(x), torch.softmax(x.float(), -1))
    temperature = torch.full((rows, 1), 0.7)
    assert torch.equal(
        OPERATORS.log_softmax(x, temperature), torch.log_softmax(x.float() / temperature, -1)
    )


@pytest.mark.parametrize("name", ROWWISE)
def test_gradients_flow(name):
    x = values(5, 33, torch.float32).requires_grad_()
    ROWWISE[name](x).square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all() and x.grad.abs().sum() > 0


def scalar_tail(x):
    """As PyTorch's kernels may: code for 8 elements at a time, and other code for what is left."""
    whole = x.numel() - x.numel() % 8
    return torch.cat([x.view(-1)[:whole], next_up(x.view(-1)[whole:])]).view(x.shape)


def test_no_element_falls_to_the_code_for_the_rest_of_a_vector():
    x = values(30, 37, torch.float32)
    parts = [range(7), range(16, 30)]
    require_same_bits(lambda i: OPERATORS.elementwise(scalar_tail, x[i]), 30, parts)
    with pytest.raises(AssertionError, match="7 of 30 rows"):
        require_same_bits(lambda i: scalar_tail(x[i]), 30, parts)
