"""Checkpoints as their publishers ship them, without a server: they are read by transformers' own class,
their weights fit, and the trainer's packed pass agrees with a decode loop to the last bit."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from onpolicy.errors import ConfigError
from onpolicy.models.align import replace_operators
from onpolicy.models.facts import ModelFacts
from onpolicy.models.hf_config import load_config, parse_config, require_alignable
from onpolicy.models.policy import PackedTokens, empty_policy
from onpolicy.models.tokenizer import load_tokenizer
from onpolicy.models.weight_files import INDEX, CheckpointReader, require_fit
from onpolicy.ops.cpu import CpuOperators
from onpolicy.weights.rounding import is_rounded, round_weight
from tests.support.decode_loop import decode_log_probs
from tests.support.published import (
    DEQUANTIZED,
    FILES,
    REFUSED,
    make_padded_tokenizer,
    make_published,
    published,
    write_config,
)
from tests.support.tiny import make_checkpoint

CONTEXT = 256
LENS = (83, 20, 2)
SUPPORTED = [name for name in FILES if name not in REFUSED]


def both(path, config):
    """The trainer's log-probabilities of the checkpoint, and the decode loop's."""
    policy = empty_policy(config, CpuOperators(1))
    weights = type(policy.causal_lm).from_pretrained(
        None, config=config, state_dict=dict(CheckpointReader(path).tensors()), dtype=torch.float32
    )
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


PAGE = Path(__file__).parents[3] / "docs" / "published.md"
TEXT, FP8, MXFP4, COMPRESSED = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)


@pytest.fixture
def trainable(tmp_path):
    """Run lines of the page on the checkpoint tmp_path / "source"; the model that they write."""

    def run(lines):
        source, target = str(tmp_path / "source"), str(tmp_path / "target")
        exec(lines, {"source": source, "target": target})
        config = load_config(target)
        require_fit(target, config)
        require_alignable(ModelFacts(config), config.max_position_embeddings)
        return AutoModelForCausalLM.from_pretrained(target)

    return run


@pytest.mark.parametrize(
    ("name", "ends"), [("gemma-3-4b-it", [1, 3]), ("llama-4-scout", [1, 3, 4])]
)
def test_the_language_model_of_several_is_written_alone(name, ends, tmp_path, trainable):
    source = tmp_path / "source"
    source.mkdir()
    write_config(source, published(name))
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(source))
    model.save_pretrained(source)
    make_padded_tokenizer().save_pretrained(source)
    write_config(source, published(name))
    text = trainable(TEXT)
    assert text.config.eos_token_id == ends
    tokens = torch.arange(2, 40)[None]
    model = AutoModelForImageTextToText.from_pretrained(source).eval()
    assert torch.equal(text.eval()(tokens).logits, model(tokens).logits)


def test_numbers_in_fp8_are_written_as_what_they_stand_for(tmp_path, trainable):
    source = make_published(tmp_path / "source", "deepseek-v3", dequantized=True)
    write_config(source, published("deepseek-v3"))
    meant = rewrite(source, to_fp8)
    require_equal(trainable(FP8), meant, ("q_a_proj", "lm_head"))


def test_numbers_in_mxfp4_are_written_as_what_they_stand_for(tmp_path, trainable):
    sizes = {"intermediate_size": 64}
    source = make_published(tmp_path / "source", "gpt-oss-20b", dequantized=True, **sizes)
    write_config(source, {**published("gpt-oss-20b"), **sizes})
    meant = rewrite(source, to_mxfp4)
    require_equal(trainable(MXFP4), meant, ("gate_up_proj", "down_proj", "q_proj"))


@pytest.mark.parametrize("weight_format", ["int4", "fp8_e4m3_block128"])
def test_numbers_of_compressed_tensors_are_refused_until_they_are_plain(
    tmp_path, trainable, monkeypatch, weight_format
):
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8}
    made = make_checkpoint(tmp_path / "made", "qwen3", **sizes)
    AutoModelForCausalLM.from_pretrained(made, dtype=torch.bfloat16).save_pretrained(made)
    source, script = str(tmp_path / "source"), PAGE.parents[1] / "examples/deploy/compress.py"
    monkeypatch.setattr(sys, "argv", [str(script), str(made), weight_format, source])
    runpy.run_path(str(script))
    config = load_config(source)
    with pytest.raises(ConfigError, match=r"compressed-tensors in config.json.*docs/published.md"):
        require_fit(source, config)
    with pytest.raises(ConfigError, match=r"compressed-tensors: only weights.*docs/published.md"):
        require_alignable(ModelFacts(config), 64)
    meant = {
        name: round_weight(x, weight_format) if is_rounded(name, x) else x
        for name, x in load_file(made / "model.safetensors").items()
    }
    require_equal(trainable(COMPRESSED), meant, ("q_proj", "down_proj", "lm_head"))


def require_equal(model, meant, kinds):
    written = model.state_dict()
    compared = meant.keys() & written.keys()
    assert all(any(kind in name for name in compared) for kind in kinds)
    assert [n for n in compared if not torch.equal(written[n], meant[n])] == []


def rewrite(source, change):
    """Change every tensor of a checkpoint's files into others; what they stand for, by its name."""
    meant, places = {}, {}
    for file in source.glob("*.safetensors"):
        tensors = {}
        for name, tensor in load_file(file).items():
            stored, meant[name] = change(name, tensor)
            tensors |= stored
        save_file(tensors, file, {"format": "pt"})
        places |= dict.fromkeys(tensors, file.name)
    (source / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return meant


FOUR_BITS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""The numbers of the four-bit format, then the same with a minus sign."""


def to_mxfp4(name, tensor):
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: tensor.bfloat16()}, tensor.bfloat16()
    experts, inner, outer = tensor.shape
    pairs = torch.randint(0, 256, (experts, outer, inner // 32, 16), dtype=torch.uint8)
    exponents = torch.randint(120, 126, pairs.shape[:-1], dtype=torch.uint8)
    numbers = torch.cat([FOUR_BITS, -FOUR_BITS])[torch.stack([pairs & 15, pairs >> 4], -1).long()]
    numbers = numbers.flatten(-2) * 2.0 ** (exponents.float() - 127)[..., None]
    stored = {f"{name}_blocks": pairs, f"{name}_scales": exponents}
    return stored, numbers.flatten(-2).transpose(1, 2).bfloat16()


def to_fp8(name, tensor):
    if "proj" not in name:
        return {name: tensor}, tensor.bfloat16()
    rows, columns = tensor.shape
    scales = torch.rand(-(-rows // 128), -(-columns // 128)) + 0.5
    numbers = tensor.to(torch.float8_e4m3fn)
    whole = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return {name: numbers, f"{name}_scale_inv": scales}, (numbers.float() * whole).bfloat16()
