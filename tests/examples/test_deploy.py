"""What a run deployed, written by compressed-tensors and read by transformers."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from onpolicy.models.rounded_inputs import round_inputs
from onpolicy.weights.rounding import FORMATS, is_rounded, round_weight
from tests.support.tiny import make_checkpoint

SCRIPT = Path(__file__).parents[2] / "examples" / "deploy" / "compress.py"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8}
    path = make_checkpoint(tmp_path_factory.mktemp("made") / "model", "qwen3", **sizes)
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture
def compress(monkeypatch):
    def run(*argv):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, argv)])
        runpy.run_path(str(SCRIPT), run_name="__main__")

    return run


def loaded(path):
    plain = CompressedTensorsConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, quantization_config=plain
    )


@pytest.mark.parametrize("weight_format", FORMATS)
def test_transformers_reads_the_bits_that_a_run_deployed(source, tmp_path, compress, weight_format):
    compress(source, weight_format, tmp_path / "out")
    found = loaded(tmp_path / "out").state_dict()
    stored = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).state_dict()
    for name, weight in stored.items():
        taken = is_rounded(name, weight)
        wanted = round_weight(weight, weight_format) if taken else weight
        assert torch.equal(found[name].bfloat16(), wanted), name
        assert torch.equal(wanted, weight) != taken
    bytes_of = [
        sum(f.stat().st_size for f in p.glob("*.safetensors")) for p in (tmp_path / "out", source)
    ]
    assert bytes_of[0] < 0.85 * bytes_of[1]


def test_transformers_rounds_the_inputs_that_a_run_rounds(source, tmp_path, compress):
    for name, inputs in (("both", ["fp8_e4m3"]), ("weights", [])):
        compress(source, "fp8_e4m3", tmp_path / name, *inputs)
    theirs, ours = (loaded(tmp_path / name) for name in ("both", "weights"))
    ids = torch.arange(40)[None] % 130
    with torch.no_grad():
        plain = ours(ids).logits
        round_inputs(ours, "fp8_e4m3", (torch.nn.Linear,))
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
        assert not torch.equal(ours(ids).logits, plain)


def test_a_mixture_is_refused(tmp_path, compress):
    with pytest.raises(SystemExit, match="has experts"):
        compress(make_checkpoint(tmp_path / "model", "qwen3-moe"), "int4", tmp_path / "out")
    assert not (tmp_path / "out").exists()
