"""Rotary embeddings by the operators, where they are the usual one; every other stays as it is."""

import sys
from importlib import import_module

import pytest
import torch
from kernels.layer.func import _create_func_module
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CohereConfig,
    GlmConfig,
    GPTNeoXConfig,
    OlmoConfig,
    Qwen3ForCausalLM,
)
from transformers.models.hunyuan_v1_moe.modeling_hunyuan_v1_moe import HunYuanMoEV1RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from onpolicy.models import rotary
from onpolicy.models.align import align_modules, replace_operators
from onpolicy.models.attention_function import ATTENTION_NAME
from onpolicy.models.policy import PackedTokens, PolicyModel
from onpolicy.models.published import read_config
from onpolicy.models.rotary_factors import choose_factors, follows_context
from onpolicy.ops.cpu import CpuOperators
from tests.support.published import published, write_config
from tests.support.tiny import ARCHITECTURES, SIZES

USUAL = sorted(ARCHITECTURES.keys() - {"glm4-moe"})
OTHERS = {
    "half of each head": (GlmConfig, {"head_dim": 24, "partial_rotary_factor": 0.5}),
    "a quarter of each head": (GPTNeoXConfig, {"intermediate_size": 208}),
    "interleaved": (CohereConfig, {"logit_scale": 1.0}),
    "angles in float32 in a model that is not": (OlmoConfig, {"dtype": "bfloat16"}),
    "groups of experts, half of each head": ARCHITECTURES["glm4-moe"],
}


class Counted(CpuOperators):
    calls = 0

    def rotary(self, *args):
        self.calls += 1
        return super().rotary(*args)


def test_a_function_that_is_wrapped_for_a_kernel_of_the_hub_is_still_the_usual_one():
    own = sys.modules[Qwen3ForCausalLM.__module__].apply_rotary_pos_emb
    assert rotary.is_usual_rotary(own) and rotary.is_usual_rotary(_create_func_module(own)())
    assert not rotary.is_usual_rotary(_create_func_module(lambda q, k, cos, sin: (q, k))())


def make_model(config_class, sizes):
    torch.manual_seed(0)
    config = config_class(**{**SIZES, **sizes})
    dtype = sizes.get("dtype", "float32")
    return AutoModelForCausalLM.from_config(
        config, attn_implementation=ATTENTION_NAME, dtype=getattr(torch, dtype)
    ).eval()


def log_probs(model, operators):
    tokens = PackedTokens.after_prompts([[5, 9, 3, 40, 7], [8, 2]], [1, 1], 1.0)
    with torch.no_grad():
        return PolicyModel(model, operators)(tokens)[0]


def without_rotary(monkeypatch, model, operators):
    """The same, aligned but for the rotary embedding."""
    with monkeypatch.context() as patch:
        patch.setattr(rotary, "is_usual_rotary", lambda function: False)
        align_modules(model, operators)
    return log_probs(model, operators)


@pytest.mark.parametrize("architecture", USUAL)
def test_every_layer_rotates_by_the_operator_to_the_same_bits(monkeypatch, architecture):
    own = without_rotary(monkeypatch, make_model(*ARCHITECTURES[architecture]), CpuOperators())
    operators, model = Counted(), make_model(*ARCHITECTURES[architecture])
    align_modules(model, operators)
    assert torch.equal(log_probs(model, operators), own)
    assert operators.calls == model.config.num_hidden_layers


@pytest.mark.parametrize("other", OTHERS)
def test_another_rotary_embedding_stays(monkeypatch, other):
    own = without_rotary(monkeypatch, make_model(*OTHERS[other]), CpuOperators())
    operators, model = Counted(), make_model(*OTHERS[other])
    align_modules(model, operators)
    assert torch.equal(log_probs(model, operators), own)
    assert operators.calls == 0


def test_no_other_model_of_the_process_is_changed():
    architecture = ARCHITECTURES["qwen3"]
    before, aligned = make_model(*architecture), make_model(*architecture)
    module = sys.modules[type(before).__module__]
    function, forward = module.apply_rotary_pos_emb, module.Qwen3Attention.forward
    operators = Counted()
    align_modules(aligned, operators)
    for model in (before, make_model(*architecture)):
        log_probs(model, CpuOperators())
        assert all("forward" not in vars(layer) for layer in model.modules())
    assert operators.calls == 0
    assert (module.apply_rotary_pos_emb, module.Qwen3Attention.forward) == (function, forward)


def test_a_second_call_changes_nothing_and_operators_can_be_replaced():
    model = make_model(*ARCHITECTURES["llama"])
    first, second = Counted(), Counted()
    align_modules(model, first)
    align_modules(model, first)
    log_probs(model, first)
    assert first.calls == 2
    replace_operators(model, second)
    log_probs(model, second)
    assert (first.calls, second.calls) == (2, 2)


def rotation_of(architecture):
    file = import_module(f"transformers.models.{architecture}.modeling_{architecture}")
    return file.apply_rotary_emb


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_complex_rotations_are_written_out_and_a_token_does_not_depend_on_the_others(dtype):
    apply_rotary_emb = rotation_of("deepseek_v2")
    assert rotary.is_complex_rotary(apply_rotary_emb, rotary.rotate_pairs)
    generator = torch.Generator().manual_seed(0)
    for size in (8, 20, 64):
        q, k = (torch.randn(1, h, 37, size, generator=generator).to(dtype) for h in (4, 1))
        angles = 50 * torch.randn(1, 37, size // 2, generator=generator)
        turns = torch.polar(torch.ones_like(angles), angles)
        whole = rotary.rotate_pairs(q, k, turns)
        for got, want in zip(whole, apply_rotary_emb(q, k, turns), strict=True):
            torch.testing.assert_close(got, want)
        for t in range(37):
            one = slice(t, t + 1)
            alone = rotary.rotate_pairs(q[:, :, one], k[:, :, one], turns[:, one])
            assert all(torch.equal(a, x[:, :, one]) for a, x in zip(alone, whole, strict=True))


def turned_back(xq, xk, freqs_cis):
    return rotary.rotate_pairs(xq, xk, freqs_cis.conj())


def over_another_axis(xq, xk, freqs_cis):
    return rotary.rotate_pairs(xq.transpose(1, 2), xk.transpose(1, 2), freqs_cis)


@pytest.mark.parametrize("function", [turned_back, over_another_axis, torch.mul, None])
def test_a_complex_rotation_is_recognised_by_what_it_computes(function):
    assert not rotary.is_complex_rotary(function, rotary.rotate_pairs)


def test_a_complex_rotation_of_heads_after_tokens_is_the_same():
    own, ours = rotation_of("llama4"), rotary.rotate_pairs_of_tokens
    assert rotary.is_complex_rotary(own, ours)
    assert not rotary.is_complex_rotary(own, rotary.rotate_pairs)
    q, k = (torch.randn(1, 37, h, 20, generator=torch.Generator().manual_seed(h)) for h in (4, 1))
    angles = 50 * torch.randn(1, 37, 10, generator=torch.Generator().manual_seed(0))
    turns = torch.polar(torch.ones_like(angles), angles)
    for got, want in zip(ours(q, k, turns), own(q, k, turns), strict=True):
        torch.testing.assert_close(got, want)


def turned_the_other_way(q, k, cos, sin):
    return rotary.rotate(q, cos, -sin), rotary.rotate(k, cos, -sin)


def in_float32(q, k, cos, sin):
    wide = (rotary.rotate(x.float(), cos.float(), sin.float()) for x in (q, k))
    return tuple(x.to(q.dtype) for x in wide)


def swapped(q, k, cos, sin):
    return rotary.rotate(k, cos, sin), rotary.rotate(q, cos, sin)


def of_other_things(q, k, v, sin):
    return rotary.rotate(q, v, sin), rotary.rotate(k, v, sin)


@pytest.mark.parametrize(
    "function", [turned_the_other_way, in_float32, swapped, of_other_things, torch.add, int, None]
)
def test_a_function_is_recognised_by_its_bits(function):
    assert not rotary.is_usual_rotary(function)


def test_the_usual_one_is_recognised_under_any_name():
    def anything(q, k, cos, sin):
        return rotary.rotate(q, cos, sin), rotary.rotate(k, cos, sin)

    assert rotary.is_usual_rotary(anything)


def test_a_call_with_the_axes_in_another_order_is_left_to_the_models_own_function():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    class Attention(torch.nn.Module):
        def forward(self, q, k, cos, sin):
            return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)

    globals()["apply_rotary_pos_emb"] = apply_rotary_pos_emb
    parent, operators = torch.nn.Sequential(Attention()), Counted()
    align_modules(parent, operators)
    q, k, angles = torch.rand(1, 5, 3, 8), torch.rand(1, 5, 1, 8), torch.rand(1, 5, 8)
    got = parent[0](q, k, angles, angles)
    assert operators.calls == 0
    want = apply_rotary_pos_emb(q, k, angles, angles, unsqueeze_dim=2)
    assert all(map(torch.equal, got, want))


ORIGINAL = 64
"""original_max_position_embeddings of the shrunk Phi-4-mini."""


@pytest.fixture
def config(tmp_path):
    def read(name):
        write_config(tmp_path, published(name))
        return read_config(str(tmp_path))

    return read


def angles(rotary, length):
    """cos of positions 0 to 9, in a batch whose longest sequence has `length` tokens."""
    positions = torch.arange(length)[None]
    return rotary(torch.zeros(1), positions)[0][0, :10]


@pytest.mark.parametrize(("context", "length"), [(ORIGINAL, 10), (ORIGINAL + 1, ORIGINAL + 1)])
def test_the_served_context_chooses_the_factors_that_transformers_takes_at_that_length(
    context, length, config
):
    usual = angles(Phi3RotaryEmbedding(config("phi-4-mini-instruct")), length)
    chosen = config("phi-4-mini-instruct")
    choose_factors(chosen, context)
    rotary = Phi3RotaryEmbedding(chosen)
    assert torch.equal(angles(rotary, 10), usual)
    assert torch.equal(angles(rotary, 200), usual)


def test_without_a_choice_a_longer_neighbour_changes_the_angles(config):
    rotary = Phi3RotaryEmbedding(config("phi-4-mini-instruct"))
    assert not torch.equal(angles(rotary, 10), angles(rotary, 200))


def test_the_choice_is_said_with_what_it_was_made_by(config):
    assert choose_factors(config("phi-4-mini-instruct"), 65) == [
        "long_factor (original_max_position_embeddings=64)"
    ]
    assert choose_factors(config("phi-4-mini-instruct"), 64)[0].startswith("short_factor")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("hunyuan-a13b-instruct", HunYuanMoEV1RotaryEmbedding),
        ("nous-llama-dynamic", LlamaRotaryEmbedding),
    ],
)
def test_dynamic_scaling_is_what_transformers_computes_within_the_context(name, kind, config):
    usual = angles(kind(config(name)), 256)
    chosen = config(name)
    choose_factors(chosen, 256)
    assert torch.equal(angles(kind(chosen), 256), usual)


def test_other_rotary_embeddings_are_left_alone(config):
    for name in ("llama-3.1-8b-instruct", "gemma-2-2b-it", "qwen3-8b-yarn", "pythia-1.4b"):
        before = config(name)
        after = AutoConfig.for_model(**before.to_dict())
        assert not follows_context(before) and choose_factors(after, 256) == []
        assert after.rope_parameters == before.rope_parameters
