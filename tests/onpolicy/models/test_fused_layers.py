"""Fused norms and joint linears give what they give apart, where a model has them so."""

import pytest
import torch

from onpolicy.errors import ContractError
from onpolicy.models import fused_layers
from onpolicy.models.align import AlignedLinear
from onpolicy.models.fused_layers import JointLinear, fuse_norms, is_usual_layer, join_linears
from onpolicy.models.policy import PackedTokens, empty_policy
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.row_parallel import WHOLE
from onpolicy.ops.triton import TritonOperators
from tests.support.kernel_launches import count_kernels
from tests.support.tiny import ALL_ARCHITECTURES, REFUSED, SIZES

FUSED = {"qwen3": 2, "qwen3-moe": 2, "llama": 1, "mixtral": 1, "smollm3": 1, "glm4-moe": 1}
"""Modules of a layer that have norms to fuse: the layer, and its attention where heads have norms."""

OTHERS = ("gemma2", "gemma3", "olmo2", "granite", "cohere", "phi", "llama4", "exaone4")
"""Their layers norm what comes out of a part, scale it, or have no norm before their MLP."""

EVERY = sorted({*ALL_ARCHITECTURES} - {*REFUSED})

TOKENS = [[5, 9, 17, 4, 3], [7, 7, 30, 2]]


def policy(architecture, dtype=torch.float32, operators=None):
    config_class, sizes = ALL_ARCHITECTURES[architecture]
    config = config_class(**{**SIZES, **sizes})
    made = empty_policy(config, operators or CpuOperators(1))
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(parameter.shape, generator=generator).mul_(0.2).to(dtype)
        for name, parameter in made.causal_lm.named_parameters()
    }
    made.causal_lm.load_state_dict(weights, strict=False, assign=True)
    made.causal_lm.tie_weights()
    return made


def log_probs(policy):
    with torch.no_grad():
        return policy(PackedTokens.after_prompts(TOKENS, [1, 1], 0.7)).log_probs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", FUSED)
def test_a_model_with_fused_norms_has_the_same_bits(architecture, dtype):
    model = policy(architecture, dtype)
    apart = log_probs(model)
    layers = model.causal_lm.config.num_hidden_layers
    assert fuse_norms(model.causal_lm, model.operators) == FUSED[architecture] * layers
    assert torch.equal(log_probs(model), apart) and apart.isfinite().all()


@pytest.mark.parametrize("architecture", EVERY)
def test_whatever_is_fused_in_any_architecture_changes_no_bit(architecture):
    model = policy(architecture)
    apart = log_probs(model)
    fused = fuse_norms(model.causal_lm, model.operators)
    assert torch.equal(log_probs(model), apart)
    if architecture in OTHERS:
        assert fused <= len(model.layers)  # of attention modules alone


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_triton_computes_fused_norms_to_the_same_bits(architecture, monkeypatch):
    monkeypatch.setattr(fused_layers, "ROW_COUNTS", (1, 2, 7))
    model = policy(architecture, torch.bfloat16, TritonOperators())
    apart = log_probs(model)
    assert fuse_norms(model.causal_lm, model.operators)
    assert torch.equal(log_probs(model), apart)


class SumsInFloat32(CpuOperators):
    """The violation: the sum is not rounded before its norm."""

    def add_rms_norm(self, x, residual, weight, eps, round_last=False):
        total = residual.float() + x.float()
        return total.to(x.dtype), self.rms_norm(total, weight, eps, round_last).to(x.dtype)


class TurnsBeforeTheNorm(CpuOperators):
    def norm_rotary(self, q, k, weights, cos, sin, eps, round_last=False):
        q, k = self.rotary(q, k, cos, sin)
        return self.rms_norm(q, weights[0], eps, round_last), self.rms_norm(
            k, weights[1], eps, round_last
        )


@pytest.mark.parametrize(("operators", "left"), [(SumsInFloat32, 1), (TurnsBeforeTheNorm, 1)])
def test_operators_with_other_bits_leave_norms_apart(operators, left, caplog):
    model = policy("qwen3", torch.bfloat16, operators(1))
    apart = log_probs(model)
    assert fuse_norms(model.causal_lm, model.operators) == left * len(model.layers)
    assert "stay apart" in caplog.text
    assert torch.equal(log_probs(model), apart)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer, x: x + layer.mlp(layer.post_attention_layernorm(x)) + 1,
        lambda layer, x: x + layer.mlp(layer.input_layernorm(x)),
    ],
    ids=["a further sum", "another norm"],
)
def test_a_layer_that_computes_anything_else_is_none(change):
    layer = policy("llama").layers[0]
    assert is_usual_layer(layer)

    class Other(type(layer)):
        def forward(self, hidden_states, **named):
            attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **named)
            return change(self, hidden_states + attended)

    layer.__class__ = Other
    assert not is_usual_layer(layer)


def test_a_layer_that_keeps_a_keyword_to_itself_is_none():
    layer = policy("llama").layers[0]
    own = type(layer).forward

    class Other(type(layer)):
        def forward(self, hidden_states, own=None, **named):
            return type(layer).__bases__[0].forward(self, hidden_states, **named)

    layer.__class__ = Other
    assert own is not None and not is_usual_layer(layer)


def kernels_of_a_layer(model):
    layer, counted = model.layers[0], []
    own = layer.forward

    def forward(*args, **named):
        results = []
        counted.append(count_kernels(lambda: results.append(own(*args, **named))))
        return results[0]

    had = vars(layer).pop("forward", None)
    layer.forward = forward
    log_probs(model)
    del layer.forward
    if had is not None:
        layer.forward = had
    for name in ("aten::cumsum", "aten::_to_copy"):  # of the layout, which an engine does not make
        del counted[0][name]
    return counted[0]


@pytest.mark.parametrize(("architecture", "most", "apart"), [("qwen3", 10, 17), ("llama", 11, 15)])
def test_a_dense_layer_launches_few_kernels(architecture, most, apart, monkeypatch):
    """And one more in an engine, which writes keys and values into its cache: 12 at most."""
    monkeypatch.setattr(fused_layers, "ROW_COUNTS", (1, 3))
    monkeypatch.setattr(fused_layers, "ROW_COUNTS", (1, 3))
    model = policy(architecture, torch.bfloat16, TritonOperators())
    before = kernels_of_a_layer(model)
    fuse_norms(model.causal_lm, model.operators)
    join_linears(model.causal_lm, model.operators, lambda m: isinstance(m, AlignedLinear))
    after = kernels_of_a_layer(model)
    assert (after.total(), before.total()) == (most, apart), (after, before)


JOINED = {
    "qwen3": 2, "qwen2": 2, "llama": 2, "qwen3-moe": 1, "mixtral": 1, "phi3": 0, "gpt-neox": 0,
}  # fmt: skip
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
    monkeypatch.setattr(fused_layers, "ROW_COUNTS", (1, 2, 17))
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
