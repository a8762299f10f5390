"""A model without weights: its buffers are whole, and nothing else is touched."""

import pytest
from transformers.models.qwen3.modeling_qwen3 import Qwen3PreTrainedModel, Qwen3RotaryEmbedding

from onpolicy.models.empty import empty_causal_lm
from tests.support.tiny import ARCHITECTURES, SIZES


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
