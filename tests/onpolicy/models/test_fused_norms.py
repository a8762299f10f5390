"""Norms that are fused with their neighbours give what they give apart, where a model has them so."""

import pytest
import torch

from onpolicy.models import fused_norms, joint_linears
from onpolicy.models.align import AlignedLinear
from onpolicy.models.fused_norms import fuse_norms, is_usual_layer
from onpolicy.models.joint_linears import join_linears
from onpolicy.models.policy import PackedTokens, empty_policy
from onpolicy.ops.cpu import CpuOperators
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
    monkeypatch.setattr(fused_norms, "ROW_COUNTS", (1, 2, 7))
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
    monkeypatch.setattr(fused_norms, "ROW_COUNTS", (1, 3))
    monkeypatch.setattr(joint_linears, "ROW_COUNTS", (1, 3))
    model = policy(architecture, torch.bfloat16, TritonOperators())
    before = kernels_of_a_layer(model)
    fuse_norms(model.causal_lm, model.operators)
    join_linears(model.causal_lm, model.operators, lambda m: isinstance(m, AlignedLinear))
    after = kernels_of_a_layer(model)
    assert (after.total(), before.total()) == (most, apart), (after, before)
