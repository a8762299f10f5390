"""A checkpoint of rounded weights, as transformers reads it."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from onpolicy.cli.main import main
from onpolicy.models.rounded_inputs import round_inputs
from onpolicy.models.weight_files import CheckpointReader
from onpolicy.weights.rounding import is_rounded, round_weight
from tests.support.stock_loader import stock_parameters
from tests.support.tiny import make_checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Its weights are bfloat16, as those in a checkpoint's `hf` are."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8}
    path = make_checkpoint(tmp_path_factory.mktemp("made") / "model", "qwen3", **sizes)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model.save_pretrained(path)
    return path


def exported(source, target, *argv):
    return main(["export", "--hf-checkpoint", str(source), "--output", str(target), *argv])


def whole(path):
    apart = CompressedTensorsConfig(run_compressed=False)
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, quantization_config=apart
    )


def loaded(path):
    return {name: tensor.bfloat16() for name, tensor in whole(path).state_dict().items()}


@pytest.mark.parametrize(
    "weight_format",
    ["int3", "int4_group128", "int8", "fp8_e4m3", "fp8_e4m3_block128", "mxfp4", "nvfp4"],
)
def test_transformers_loads_the_bits_that_a_run_computes_with(source, tmp_path, weight_format):
    assert exported(source, tmp_path / "out", "--quantised", weight_format) == 0
    found, stored = loaded(tmp_path / "out"), load_file(source / "model.safetensors")
    for name, weight in stored.items():
        taken = is_rounded(name, weight)
        wanted = round_weight(weight, weight_format) if taken else weight
        assert torch.equal(found[name], wanted), name
        assert torch.equal(wanted, weight) != taken
    sizes = [
        sum(f.stat().st_size for f in p.glob("*.safetensors")) for p in (tmp_path / "out", source)
    ]
    assert sizes[0] < 0.85 * sizes[1]


def test_transformers_rounds_the_inputs_that_a_run_rounds(source, tmp_path):
    """compressed-tensors' own code gives the same logits, bit for bit, where products are the same."""
    weights = ["--quantised", "fp8_e4m3"]
    assert exported(source, tmp_path / "both", *weights, "--activations", "fp8_e4m3") == 0
    assert exported(source, tmp_path / "weights", *weights) == 0
    theirs, ours = (whole(tmp_path / name) for name in ("both", "weights"))
    ids = torch.arange(40)[None] % 130
    with torch.no_grad():
        plain = ours(ids).logits
        round_inputs(ours, "fp8_e4m3", (torch.nn.Linear,))
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
        assert not torch.equal(ours(ids).logits, plain)


FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def differing(held, path):
    """The parameters of SGLang's model that are not the checkpoint's tensors, put together."""
    stored = load_file(path / "model-00000.safetensors")
    wrong = []
    for name, tensor in held.items():
        fused = next((f for f in FUSED if f in name), None)
        parts = [name.replace(fused, part) for part in FUSED[fused]] if fused else [name]
        if name.endswith("weight_shape"):  # of the part that came last
            continue
        wanted = torch.cat([stored[part] for part in parts]).to(tensor.dtype)
        if not torch.equal(tensor[: len(wanted)].view(torch.uint8), wanted.view(torch.uint8)):
            wrong.append(name)
    return wrong


@pytest.mark.engine
@pytest.mark.runs
def test_sglang_by_itself_loads_numbers_and_scales_of_the_formats_that_it_has(source, tmp_path):
    """Without the plug-in; scales of integers in bfloat16. A flipped bit is found."""
    loads = ("int4", "int4_group128", "int8", "fp8_e4m3", "nvfp4")
    lacks = ("int3", "fp8_e4m3_block128", "mxfp4")
    for weight_format in loads + lacks:
        assert exported(source, tmp_path / weight_format, "--quantised", weight_format) == 0
    held = stock_parameters(*(tmp_path / name for name in loads + lacks))
    for weight_format, parameters in zip(loads, held[: len(loads)], strict=True):
        assert any(".weight_scale" in name for name in parameters), parameters
        assert differing(parameters, tmp_path / weight_format) == []
    assert all("not supported" in x or "No compressed-tensors" in x for x in held[len(loads) :])
    name = "model.layers.1.mlp.gate_up_proj.weight_packed"
    held[0][name][400, 3] ^= 1
    assert differing(held[0], tmp_path / "int4") == [name]


def test_experts_are_written_one_by_one_and_who_cannot_read_them_is_said(tmp_path, capsys):
    mixture = make_checkpoint(tmp_path / "mixture", "qwen3-moe")
    assert exported(mixture, tmp_path / "out", "--quantised", "int4") == 0
    assert "transformers cannot load experts in this form" in capsys.readouterr().out
    expert = "model.layers.0.mlp.experts.1.up_proj.weight"
    assert f"{expert}_packed" in load_file(tmp_path / "out" / "model-00000.safetensors")
    read = dict(CheckpointReader(tmp_path / "out").tensors())
    stored = load_file(mixture / "model.safetensors")
    assert read.keys() == stored.keys()
    for name, weight in stored.items():
        wanted = round_weight(weight, "int4") if is_rounded(name, weight) else weight
        assert torch.equal(read[name], wanted), name


def test_what_cannot_be_written_is_refused(source, checkpoint, tmp_path, capsys):
    assert exported(source, tmp_path / "out") == 2
    assert "--quantised, --merge: one of the two" in capsys.readouterr().err
    assert (
        exported(source, tmp_path / "out", "--quantised", "int4", "--activations", "fp8_e4m3") == 2
    )
    assert "--activations=fp8_e4m3: products" in capsys.readouterr().err
    assert exported(source, tmp_path, "--quantised", "int4") == 2
    assert "is there already" in capsys.readouterr().err
    assert exported(checkpoint, tmp_path / "out", "--quantised", "int4_group128") == 2
    assert "down_proj.weight has 96 output and 208 input channels" in capsys.readouterr().err
    assert exported(checkpoint, tmp_path / "out", "--quantised", "fp8_e4m3_block128") == 2
    assert "does not cut into such blocks" in capsys.readouterr().err
    mixture = make_checkpoint(tmp_path / "mixture", "gpt-oss")
    assert exported(mixture, tmp_path / "out", "--quantised", "int4") == 2
    assert "that hold experts one by one" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
