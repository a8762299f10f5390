"""Magnitudes of adapted rows: their bits, and that they are those of DoRA."""

import pytest
import torch

from onpolicy.contract import AdapterShape
from onpolicy.models.adapters import add_adapters
from onpolicy.models.align import AlignedLinear
from onpolicy.models.magnitude import ROWS, row_norms
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.low_rank import Factors
from onpolicy.ops.row_parallel import WHOLE

OPERATORS = CpuOperators()
SHAPE = AdapterShape(rank=4, scale=0.3, targets=("up_proj",), dora=True)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def make_linear(dtype, bias=True):
    """Adapted, A drawn and B zeros, m the norms of its rows; and the same without."""
    torch.manual_seed(1)
    linear = torch.nn.Linear(48, 80, bias, dtype=dtype)
    model = torch.nn.ModuleDict({"up_proj": AlignedLinear(linear, OPERATORS, WHOLE)})
    add_adapters(model, OPERATORS, SHAPE)
    adapted = model["up_proj"]
    with torch.no_grad():
        adapted.lora.A.normal_()
        adapted.lora.magnitude.m.copy_(take_norms(adapted))
    return adapted, AlignedLinear(linear, OPERATORS, WHOLE)


def take_norms(adapted):
    with torch.no_grad():
        norms = row_norms(OPERATORS, adapted.weight, adapted.lora.factors)
        return adapted.lora.magnitude.norm.copy_(norms)


def draw(adapted):
    """Factors and magnitudes that change all that is computed."""
    with torch.no_grad():
        adapted.lora.B.normal_()
        take_norms(adapted)
        adapted.lora.magnitude.m.mul_(1 + torch.rand(80))
    return adapted


@DTYPES
@pytest.mark.parametrize("bias", [True, False])
def test_of_the_norms_of_the_base_the_base_keeps_its_bits(dtype, bias):
    """The factor is 1; the next number above it changes them."""
    adapted, base = make_linear(dtype, bias)
    x = torch.randn(64, 48, dtype=dtype)
    assert torch.equal(adapted.lora.magnitude(None), torch.ones(80))
    assert torch.equal(adapted(x), base(x))
    with torch.no_grad():
        norm = adapted.lora.magnitude.norm
        norm.copy_(norm.nextafter(torch.zeros(())))
    assert (adapted.lora.magnitude(None) > 1).all()
    assert torch.equal(adapted(x), base(x)) == (dtype == torch.bfloat16)  # which rounds it away


@DTYPES
def test_a_row_of_inputs_has_the_same_bits_whatever_is_beside_it(dtype):
    adapted = draw(make_linear(dtype)[0])
    x = torch.randn(37, 48, dtype=dtype)
    together = adapted(x)
    for i in (0, 17, 36):
        assert torch.equal(adapted(x[i : i + 1]), together[i : i + 1])


@DTYPES
def test_the_norm_of_a_row_has_the_same_bits_whatever_rows_a_rank_has(dtype):
    torch.manual_seed(2)
    rows = ROWS + 77
    weight, b = torch.randn(rows, 48).to(dtype), torch.randn(rows, 4).to(dtype)
    a = torch.randn(4, 48).to(dtype)
    norms = row_norms(OPERATORS, weight, Factors(a, b, 0.3))
    for part in (
        slice(0, 1),
        slice(5, 6),
        slice(ROWS - 3, ROWS + 9),
        slice(400, rows),
        slice(0, 0),
    ):
        own = row_norms(OPERATORS, weight[part], Factors(a, b[part], 0.3))
        assert torch.equal(own, norms[part])
    exact = (weight.double() + 0.3 * b.double() @ a.double()).norm(dim=1)
    assert torch.allclose(norms.double(), exact, rtol=1e-6)
    assert norms.dtype == torch.float32


@DTYPES
def test_a_row_of_zeros_stays_one_and_spoils_no_gradient(dtype):
    """Such as that of a token that is not used, or of none: m / ||W|| would be 0 / 0."""
    adapted, _ = make_linear(dtype)
    with torch.no_grad():
        adapted.weight[3] = 0
        adapted.lora.magnitude.m.copy_(take_norms(adapted))
    assert adapted.lora.magnitude.m[3] == 0
    out = adapted(torch.randn(6, 48, dtype=dtype))
    assert torch.equal(out[:, 3], adapted.bias[3].expand(6)) and out.isfinite().all()
    out.sum().backward()
    assert all(p.grad.isfinite().all() for p in adapted.lora.parameters())


def test_forward_and_gradients_are_those_of_the_formula_with_the_norm_held():
    """W' = m (W + s B A) / ||W + s B A||, the bias as it is."""
    adapted, _ = make_linear(torch.float32)
    lora = draw(adapted).lora
    x, grad = torch.randn(6, 48), torch.randn(6, 80)
    a, b, m = (p.detach().clone().requires_grad_() for p in (lora.A, lora.B, lora.magnitude.m))
    update = adapted.weight + SHAPE.scale * b @ a
    weight = m[:, None] * update / update.norm(dim=1, keepdim=True).detach()
    expected = torch.nn.functional.linear(x, weight, adapted.bias)
    out = adapted(x)
    assert torch.allclose(out, expected, atol=1e-5)
    out.backward(grad)
    expected.backward(grad)
    for ours, right in ((lora.A, a), (lora.B, b), (lora.magnitude.m, m)):
        assert torch.allclose(ours.grad, right.grad, atol=1e-3, rtol=1e-4)
    assert {n for n, p in adapted.named_parameters() if p.requires_grad} == {
        "lora.A", "lora.B", "lora.magnitude.m",
    }  # fmt: skip
