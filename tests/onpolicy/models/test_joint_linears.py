"""Linears of one input as one product: the same bits, whoever calls them in which order."""

import pytest
import torch

from onpolicy.errors import ContractError
from onpolicy.models import joint_linears
from onpolicy.models.align import AlignedLinear
from onpolicy.models.joint_linears import JointLinear, join_linears
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.row_parallel import WHOLE
from onpolicy.ops.triton import TritonOperators
from tests.onpolicy.models.test_fused_norms import EVERY, log_probs, policy

JOINED = {
    "qwen3": 2,
    "qwen2": 2,
    "llama": 2,
    "qwen3-moe": 1,
    "mixtral": 1,
    "phi3": 0,
    "gpt-neox": 0,
}
"""Products of a layer; experts are none, and some models have one linear for q, k and v."""


def is_plain(module):
    return isinstance(module, AlignedLinear)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", JOINED)
def test_a_model_with_joint_linears_has_the_same_bits(architecture, dtype):
    model = policy(architecture, dtype)
    apart = log_probs(model)
    joint = join_linears(model.causal_lm, model.operators, is_plain)
    assert len(joint) == JOINED[architecture] * len(model.layers)
    assert torch.equal(log_probs(model), apart) and apart.isfinite().all()


@pytest.mark.parametrize("architecture", EVERY)
def test_joining_changes_no_bit_of_any_architecture(architecture):
    model = policy(architecture)
    apart = log_probs(model)
    join_linears(model.causal_lm, model.operators, is_plain)
    assert torch.equal(log_probs(model), apart)


def test_triton_computes_a_joint_product_to_the_same_bits(monkeypatch):
    monkeypatch.setattr(joint_linears, "ROW_COUNTS", (1, 2, 17))
    model = policy("qwen3", torch.bfloat16, TritonOperators())
    apart = log_probs(model)
    assert join_linears(model.causal_lm, model.operators, is_plain)
    assert torch.equal(log_probs(model), apart)


class WideProductsRoundTwice(CpuOperators):
    """The violation: a column depends on how many are beside it."""

    def linear(self, x, weight, bias=None):
        out = super().linear(x, weight, bias)
        return out if len(weight) < 300 else out.half().to(out.dtype)


def test_linears_whose_product_has_other_bits_stay_apart(caplog):
    model = policy("qwen3", operators=WideProductsRoundTwice(1))
    apart = log_probs(model)
    joint = join_linears(model.causal_lm, model.operators, is_plain)
    assert {sum(each.sizes) for each in joint} == set()  # 4 * 48 + 2 * 2 * 48, and 2 * 208 columns
    assert "stay apart" in caplog.text and torch.equal(log_probs(model), apart)


class WithBytes(CpuOperators):
    """Its products of bytes are the violation above, or are right."""

    def __init__(self, of_rounded):
        super().__init__(1)
        self._of_rounded = of_rounded

    @property
    def of_rounded(self):
        return self._of_rounded


@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.parametrize("width", [128, 120])
def test_joint_products_of_bytes_are_tried_too_where_they_may_be(is_right, width):
    """Only whole blocks of 128 are ever multiplied so."""
    operators = WithBytes(CpuOperators(1) if is_right else WideProductsRoundTwice(1))
    model = torch.nn.Module()
    for name in ("q_proj", "k_proj", "v_proj"):
        linear = torch.nn.Linear(128, width, bias=False)
        setattr(model, name, AlignedLinear(linear, operators, WHOLE))
    joint = join_linears(model, operators, is_plain)
    assert len(joint) == (is_right or width % 128 > 0)


def three():
    linears = [torch.nn.Linear(12, n) for n in (8, 4, 4)]
    return [AlignedLinear(linear, CpuOperators(1), WHOLE) for linear in linears]


def test_each_linear_answers_for_the_input_that_it_is_given():
    """In any order, twice, or with inputs of their own."""
    linears = three()
    x, y = torch.randn(2, 5, 12).unbind()
    with torch.no_grad():
        want = {
            (i, id(z)): CpuOperators(1).linear(z, m.weight, m.bias)
            for i, m in enumerate(linears)
            for z in (x, y)
        }
        JointLinear(linears, CpuOperators(1))
        for i, z in ((2, x), (0, x), (0, x), (1, y), (0, x), (2, y), (1, x), (1, y)):
            assert torch.equal(linears[i](z), want[i, id(z)])


def test_new_weights_are_read():
    linears = three()
    JointLinear(linears, CpuOperators(1)).require_joint()
    x = torch.randn(5, 12)
    with torch.no_grad():
        before = linears[1](x)
        linears[1].weight.copy_(2 * linears[1].weight)
        again = linears[1](x.clone())
    assert not torch.equal(before, again)
    assert torch.equal(again, CpuOperators(1).linear(x, linears[1].weight, linears[1].bias))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_weight_that_a_loader_puts_elsewhere_is_refused(name):
    linears = three()
    joint = JointLinear(linears, CpuOperators(1))
    parameter = getattr(linears[1], name)
    parameter.data = parameter.data.clone()
    with pytest.raises(ContractError, match="memory of its own"):
        joint.require_joint()
