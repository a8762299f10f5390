"""Checkpoints as their publishers ship them, without a server: they are read by transformers' own class,
their weights fit, and the trainer's packed pass agrees with a decode loop to the last bit."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from onpolicy.errors import ConfigError
from onpolicy.models.align import replace_operators
from onpolicy.models.facts import ModelFacts
from onpolicy.models.hf_config import load_config, parse_config, require_alignable
from onpolicy.models.policy import PackedTokens, empty_policy
from onpolicy.models.tokenizer import load_tokenizer
from onpolicy.models.weight_files import require_fit
from onpolicy.ops.cpu import CpuOperators
from tests.support.decode_loop import decode_log_probs
from tests.support.published import (
    DEQUANTIZED,
    FILES,
    REFUSED,
    make_published,
    published,
    write_config,
)

CONTEXT = 256
LENS = (83, 20, 2)
SUPPORTED = [name for name in FILES if name not in REFUSED]


def both(path, config):
    """The trainer's log-probabilities of the checkpoint, and the decode loop's."""
    policy = empty_policy(config, CpuOperators(1))
    weights = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32)
    policy.causal_lm.load_state_dict(weights.state_dict(), strict=False, assign=True)
    policy.causal_lm.tie_weights()
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(2, 137, (n,), generator=generator).tolist() for n in LENS]
    with torch.no_grad():
        packed = policy(PackedTokens.after_prompts(sequences, [1] * len(LENS), 1.0))[0]
    replace_operators(policy, policy.operators)
    return packed, torch.cat(decode_log_probs(policy, policy.operators, sequences, temperature=1.0))


@pytest.mark.parametrize("name", [*SUPPORTED, *DEQUANTIZED])
def test_a_published_checkpoint_is_read_and_trains_as_it_decodes(name, tmp_path):
    path = str(make_published(tmp_path, name, dequantized=name in DEQUANTIZED))
    config = load_config(path, context=CONTEXT)
    assert type(config).__module__.startswith("transformers.models.")
    require_fit(path, config)
    require_alignable(ModelFacts(load_config(path)), CONTEXT)
    assert len(load_tokenizer(path)) < config.vocab_size
    packed, decoded = both(path, config)
    assert packed.isfinite().all() and torch.equal(packed, decoded)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused_by_name(name, tmp_path):
    write_config(tmp_path, published(name))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=REFUSED[name]):
        check(tmp_path)


def check(path):
    require_alignable(ModelFacts(parse_config(str(path))), CONTEXT)


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("name", ["phi-3.5-mini-instruct", "moonlight-16b-a3b-instruct"])
def test_code_of_a_checkpoint_whose_architecture_transformers_has_is_never_run(
    name, trust, tmp_path
):
    config = load_config(str(make_published(tmp_path, name)), trust)
    assert list(tmp_path.glob("modeling_*.py")) and not hasattr(config, "auto_map")
    AutoModelForCausalLM.from_config(config, trust_remote_code=True)


def test_rotations_are_of_kinds_of_layers_alone(tmp_path):
    config = load_config(str(make_published(tmp_path, "gemma-3-1b-it-cut")))
    assert config.rope_parameters == {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000}
    }


def test_experts_per_token_of_every_layer_are_one_number_if_layers_agree(tmp_path):
    config = load_config(str(make_published(tmp_path, "hunyuan-a13b-instruct")))
    assert published("hunyuan-a13b-instruct")["moe_topk"] == [2, 2]
    assert config.num_experts_per_tok == config.moe_topk == 2


def test_layers_that_choose_other_numbers_of_experts_are_refused(tmp_path):
    write_config(tmp_path, {**published("hunyuan-a13b-instruct"), "moe_topk": [2, 3]})
    with pytest.raises(ConfigError, match=r"num_experts_per_tok=\[2, 3\].* in every layer"):
        parse_config(str(tmp_path))


def test_buffers_are_not_rounded_to_the_dtype_that_is_published(tmp_path):
    config = load_config(str(make_published(tmp_path, "gemma-2b-it")))
    embedding = ModelFacts(config).model.get_input_embeddings()
    assert config.dtype == torch.bfloat16 and embedding.embed_scale.dtype == torch.float32
