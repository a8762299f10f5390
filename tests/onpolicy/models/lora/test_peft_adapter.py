"""What an adapter in PEFT's format says, and what is refused of one."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig
from onpolicy.errors import ConfigError
from onpolicy.models.facts import ModelFacts
from onpolicy.models.hf_config import load_config
from onpolicy.models.lora.peft_adapter import read_peft_adapter
from onpolicy.models.lora.peft_format import read_factors, require_adapter_fits

TOLD = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "megatron_core": "megatron.core"}


def name_of(layer, linear, factor):
    return f"base_model.model.model.layers.{layer}.self_attn.{linear}.lora_{factor}.weight"


@pytest.fixture
def write(tmp_path):
    """An adapter of q_proj and v_proj of the tiny checkpoint; what is given changes it."""

    def write_one(drop=(), add=None, **told):
        sizes = {"A": (2, 96), "B": (192, 2)}, {"A": (2, 96), "B": (96, 2)}
        tensors = {
            name_of(layer, linear, factor): torch.zeros(shape)
            for layer in (0, 1)
            for linear, shapes in zip(("q_proj", "v_proj"), sizes, strict=True)
            for factor, shape in shapes.items()
        } | (add or {})
        for name in drop:
            del tensors[name]
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        (tmp_path / "adapter_config.json").write_text(json.dumps({**TOLD, **told}))
        return str(tmp_path)

    return write_one


def test_it_says_rank_alpha_and_targets(write):
    lora = parse(TrainConfig, ["--lora-adapter", write()], "onpolicy train").lora
    assert (lora.lora_rank, lora.lora_alpha, lora.lora_rslora) == (2, 6.0, False)
    assert lora.lora_target_modules == "q_proj,v_proj"
    rooted = parse(TrainConfig, ["--lora-adapter", write(use_rslora=True)], "onpolicy train").lora
    assert rooted.scale == 6 / 2**0.5


@pytest.mark.parametrize(
    ("argv", "rule"),
    [
        (["--lora-rank", "8"], "--lora-rank=8: the adapter of --lora-adapter=.* has 2. Leave"),
        (["--lora-alpha", "32"], "--lora-alpha=32.0: .* has 6.0"),
        (["--lora-rslora"], "--lora-rslora=True: .* has False"),
        (["--lora-target-modules", "all-linear"], "--lora-target-modules=.* has q_proj,v_proj"),
    ],
)
def test_flags_that_contradict_it_are_refused(write, argv, rule):
    with pytest.raises(ConfigError, match=rule):
        parse(TrainConfig, ["--lora-adapter", write(), *argv], "onpolicy train")


@pytest.mark.parametrize(
    ("told", "rule"),
    [
        ({"bias": "all"}, "bias='all' is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is not supported"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern="),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern="),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True"),
        ({"of_a_later_version": 3}, "of_a_later_version=3"),
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"r": 0}, "r=0: should be greater than or equal to 1"),
        ({"r": "2"}, "r='2': should be a valid integer"),
    ],
)
def test_an_adapter_that_computes_something_else_is_refused(write, told, rule):
    with pytest.raises(ConfigError, match=f"--lora-adapter=.*: adapter_config.json: {rule}"):
        read_peft_adapter(write(**told), "--lora-adapter")


def test_fields_that_decide_no_result_are_taken(write):
    directory = write(lora_dropout=0.1, init_lora_weights="gaussian", bias="none", use_dora=False)
    assert read_peft_adapter(directory, "--lora-adapter").rank == 2


@pytest.mark.parametrize("what", ["other tensor", "torn", "none", "no directory"])
def test_files_that_are_no_adapter_are_refused(write, tmp_path, what):
    bias = {"base_model.model.model.layers.0.self_attn.q_proj.bias": torch.zeros(2)}
    directory = write(add=bias if what == "other tensor" else None)
    file = tmp_path / "adapter_model.safetensors"
    if what == "torn":
        file.write_bytes(file.read_bytes()[:-8])
    elif what == "none":
        save_file({}, file)
    elif what == "no directory":
        directory += "/nowhere"
    rule = {
        "other tensor": "holds .*bias, which is no factor of a linear",
        "torn": "is no complete safetensors file",
        "none": "holds no adapter",
        "no directory": "adapter_config.json: cannot be read",
    }
    with pytest.raises(ConfigError, match=f"--lora-adapter={directory}: .*{rule[what]}"):
        read_peft_adapter(directory, "--lora-adapter")


@pytest.mark.parametrize(
    ("named", "right"),
    [
        (
            "base_model.model.model.layers.0.a.lora_A.default.weight",
            "model.layers.0.a.lora_A.weight",
        ),
        ("model.layers.0.a.lora_B.weight", "model.layers.0.a.lora_B.weight"),
    ],
)
def test_factors_under_other_names_are_to_be_renamed(write, named, right):
    rule = f"holds {named}, and in a file of PEFT's that factor is base_model.model.{right}. Rename all"
    with pytest.raises(ConfigError, match=re.escape(rule)):
        read_peft_adapter(write(add={named: torch.zeros(2)}), "--lora-adapter")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_factors_that_are_not_finite_are_refused(write, bad):
    broken = torch.zeros(2, 96)
    broken[1, 5] = bad
    adapter = read_peft_adapter(write(add={name_of(1, "v_proj", "A"): broken}), "--lora-adapter")
    with pytest.raises(
        ConfigError, match=r"1 of 192 numbers of .*layers.1.*v_proj.lora_A.weight are"
    ):
        read_factors(adapter)


@pytest.fixture(scope="module")
def model(checkpoint):
    return ModelFacts(load_config(str(checkpoint))).model


@pytest.fixture
def fits(model, checkpoint):
    def check(directory):
        adapter = read_peft_adapter(directory, "--lora-adapter")
        require_adapter_fits(adapter, model, str(checkpoint), "--lora-adapter")

    return check


def test_one_of_this_model_fits(write, fits, checkpoint, tmp_path):
    fits(write())
    for base in (str(checkpoint), f"{checkpoint}/", f"owner/{checkpoint.name}"):
        fits(write(base_model_name_or_path=base))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"drop": [name_of(1, "v_proj", "A")]}, r"layers.1.*v_proj.lora.A is none there"),
        ({"add": {name_of(0, "q_proj", "A"): torch.zeros(2, 64)}}, r"is \[2, 64\] there, .* \[2, 96\]"),
        ({"add": {name_of(2, "q_proj", "A"): torch.zeros(2, 96)}}, "layers.2.*needs none"),
        ({"use_dora": True}, "use_dora=True is DoRA, .* merge it into its base by PEFT"),
        ({"add": {name_of(0, "q_proj", "A").replace("A.weight", "magnitude_vector"): torch.zeros(192)}},
         "q_proj.lora_magnitude_vector, a magnitude of DoRA, .* without use_dora"),
        ({"add": {"base_model.model.a.lora_magnitude_vector.default.weight": torch.zeros(2)}},
         "holds .*default.weight, a magnitude of DoRA"),
        ({"base_model_name_or_path": "owner/Other-7B"}, "is an adapter of owner/Other-7B"),
        ({"base_model_name_or_path": "/tmp"}, "is an adapter of /tmp, and --hf-checkpoint"),
    ],
)  # fmt: skip
def test_one_of_another_model_is_refused(write, fits, change, rule):
    with pytest.raises(ConfigError, match=f"--lora-adapter=.*: .*{rule}"):
        fits(write(**change))
