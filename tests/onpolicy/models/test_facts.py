"""What is learnt about a model from its configuration alone, built without weights."""

import dataclasses

import pytest
from transformers import BloomConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3PreTrainedModel, Qwen3RotaryEmbedding

from onpolicy.errors import ContractError
from onpolicy.models import norms
from onpolicy.models.empty import empty_causal_lm
from onpolicy.models.facts import ModelFacts
from onpolicy.models.size import operator_shapes
from onpolicy.ops.checks.rowwise_check import check_rowwise
from onpolicy.ops.cpu import CpuOperators
from tests.support.tiny import ALL_ARCHITECTURES, ARCHITECTURES, SIZES
from tests.support.tiny_contract import CONTRACT
from tests.support.violations import few, next_up


def facts_of(architecture):
    config_class, sizes = ALL_ARCHITECTURES[architecture]
    name = config_class.__name__.replace("Config", "ForCausalLM")
    return ModelFacts(config_class(**{**SIZES, **sizes}, architectures=[name]))


def test_norms_are_themselves_again_after_the_model_was_run():
    facts = facts_of("qwen3")
    assert len(facts.attention) == facts.config.num_hidden_layers
    assert norms.norm_kinds(facts.model) == facts.norms
    assert all("forward" not in vars(norm) for norm in facts.norms)


def test_a_model_that_calls_no_attention_function_has_the_usual_attention():
    facts = ModelFacts(BloomConfig(vocab_size=100, hidden_size=32, n_layer=2, n_head=2))
    assert facts.attention == []
    (usual,) = operator_shapes(facts).attention
    assert (usual.heads, usual.kv_heads, usual.head_dim, usual.value_dim) == (2, 2, 16, 16)


class BrokenAt(CpuOperators):
    """Its RMS norm of one size alone is not row-invariant."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def rms_norm(self, x, weight, eps, round_last=False):
        out = super().rms_norm(x, weight, eps, round_last)
        return next_up(out) if x.shape[-1] == self.size and few(len(x)) else out


def test_an_operator_that_breaks_at_the_size_of_a_norm_without_weight_alone_is_found():
    """Llama-4's norm of queries and keys says no size: it is called with heads of 16."""
    facts = facts_of("llama4")
    assert {norms.norm_size(norm) for norm in facts.norms} == {96, None}
    assert facts.norm_sizes(centered=False) == (16, 96)
    contract = dataclasses.replace(CONTRACT, shapes=operator_shapes(facts))
    list(check_rowwise(CpuOperators(), contract))
    list(check_rowwise(BrokenAt(24), contract))  # no norm of the model has this size
    with pytest.raises(ContractError, match=r"operator=rms_norm, shape=\(16,\).*not row-invariant"):
        list(check_rowwise(BrokenAt(16), contract))


@pytest.fixture
def config():
    config_class, sizes = ARCHITECTURES["qwen3"]
    return config_class(**{**SIZES, **sizes})


def test_buffers_are_initialised_by_the_models_own_code(config, monkeypatch):
    def fill(self, module):
        if isinstance(module, Qwen3RotaryEmbedding):
            module.inv_freq.fill_(7.0)

    monkeypatch.setattr(Qwen3PreTrainedModel, "_init_weights", fill)
    model = empty_causal_lm(config, False)
    assert set(model.base_model.rotary_emb.inv_freq.tolist()) == {7.0}
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_the_configuration_stays_as_it_is(config):
    before = config.to_dict(), config._attn_implementation
    model = empty_causal_lm(config, False, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    assert (config.to_dict(), config._attn_implementation) == before
