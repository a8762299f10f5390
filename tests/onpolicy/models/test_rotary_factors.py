import pytest
import torch
from transformers import AutoConfig
from transformers.models.hunyuan_v1_moe.modeling_hunyuan_v1_moe import HunYuanMoEV1RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from onpolicy.models.published import read_config
from onpolicy.models.rotary_factors import choose_factors, follows_context
from tests.support.published import published, write_config

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
