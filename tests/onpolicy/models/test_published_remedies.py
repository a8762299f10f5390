"""The lines of docs/published.md, run: what they write can be trained, and is what was stored."""

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
from onpolicy.models.facts import ModelFacts
from onpolicy.models.hf_config import load_config, require_alignable
from onpolicy.models.weight_files import INDEX, require_fit
from onpolicy.weights.rounding import is_rounded, round_weight
from tests.support.published import (
    make_padded_tokenizer,
    make_published,
    published,
    write_config,
)
from tests.support.tiny import make_checkpoint

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
