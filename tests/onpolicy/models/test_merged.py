"""A base and its adapter in one checkpoint."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from onpolicy.cli.main import main
from tests.support.tiny import make_checkpoint

RANK, ALPHA = 2, 6


def write_adapter(directory, base, targets=("q_proj", "v_proj"), size=0.1):
    """An adapter of a checkpoint whose factors are random."""
    directory.mkdir()
    torch.manual_seed(0)
    tensors = {}
    for name, module in AutoModelForCausalLM.from_pretrained(base).named_modules():
        if name.rpartition(".")[2] in targets:
            key = f"base_model.model.{name}.lora"
            tensors[f"{key}_A.weight"] = torch.randn(RANK, module.in_features)
            tensors[f"{key}_B.weight"] = size * torch.randn(module.out_features, RANK)
    save_file(tensors, directory / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA}
    (directory / "adapter_config.json").write_text(json.dumps(told))
    return tensors


def merged(base, directory, *argv):
    given = ["--merge", str(directory / "adapter"), "--output", str(directory / "out"), *argv]
    return main(["export", "--hf-checkpoint", str(base), *given])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_sum_is_rounded_once_and_all_else_is_the_base(checkpoint, tmp_path, dtype):
    factors = write_adapter(tmp_path / "adapter", checkpoint)
    assert merged(checkpoint, tmp_path, "--dtype", dtype) == 0
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert found.dtype == getattr(torch, dtype)
    base, count = load_file(checkpoint / "model.safetensors"), 0
    for name, tensor in found.state_dict().items():
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{key}A.weight" in factors:
            update = ALPHA / RANK * (factors[f"{key}B.weight"] @ factors[f"{key}A.weight"])
            assert torch.equal(tensor, (base[name] + update).to(found.dtype))
            count += 1
        else:
            assert torch.equal(tensor, base[name].to(found.dtype))
    assert count == 4


def test_what_a_grid_rounds_away_is_said(checkpoint, tmp_path, capsys):
    """Updates a thousandth of the weights, less than half the spacing of most bfloat16 numbers."""
    write_adapter(tmp_path / "adapter", checkpoint, size=1e-5)
    shares = []
    for dtype in ("float32", "bfloat16"):
        (tmp_path / dtype).mkdir()
        (tmp_path / dtype / "adapter").symlink_to(tmp_path / "adapter")
        assert merged(checkpoint, tmp_path / dtype, "--dtype", dtype) == 0
        said = capsys.readouterr().out
        assert "4 linears merged" in said and said.endswith(f"in {dtype}\n")
        words = said.replace("%", "").split()
        shares.append((float(words[words.index("of") - 1]), float(words[words.index("is") + 1])))
    (changed, error), (changed_there, error_there) = shares
    assert changed > 99 and error < 1
    assert changed_there < 20 and error_there > 50


@pytest.mark.parametrize(
    ("number", "dtype", "says"),
    [
        (float("nan"), "bfloat16", "numbers of .*lora_B.weight are not finite"),
        (
            1e30,
            "float16",
            "--dtype=float16: numbers of model.layers.0.self_attn.q_proj.weight are not",
        ),
    ],
)
def test_an_adapter_that_makes_numbers_that_are_not_finite_is_refused(
    checkpoint, tmp_path, capsys, number, dtype, says
):
    factors = write_adapter(tmp_path / "adapter", checkpoint)
    next(x for name, x in factors.items() if name.endswith("lora_B.weight"))[0, 0] = number
    save_file(factors, tmp_path / "adapter" / "adapter_model.safetensors")
    assert merged(checkpoint, tmp_path, "--dtype", dtype) == 2
    assert re.search(says, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("what", ["dtype", "tied", "quantised", "other"])
def test_what_cannot_be_merged_is_refused(checkpoint, tmp_path, capsys, what):
    base = checkpoint
    if what in ("tied", "quantised"):
        base = make_checkpoint(tmp_path / "model", "qwen3-tied")
    made_of = make_checkpoint(tmp_path / "x", "llama") if what == "other" else base
    write_adapter(tmp_path / "adapter", made_of, ("lm_head",) if what == "tied" else ("q_proj",))
    if what == "quantised":
        file = base / "config.json"
        told = json.loads(file.read_text()) | {"quantization_config": {"quant_method": "fp8"}}
        file.write_text(json.dumps(told))
    given = [] if what == "dtype" else ["--dtype", "float32"]
    assert merged(base, tmp_path, *given) == 2
    rule = {
        "dtype": "--dtype is missing",
        "tied": "holds no weights of lm_head alone",
        "quantised": "quantization_config=fp8 in config.json: its weights are numbers",
        "other": "--merge=",
    }
    assert rule[what] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
