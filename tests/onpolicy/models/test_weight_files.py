"""Weights that fit their configuration are taken, whatever names they are stored under; no others."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.models.weight_files import INDEX, require_fit
from tests.support.tiny import ARCHITECTURES, make_checkpoint


def check(path):
    require_fit(str(path), load_config(str(path)))


def edit_weights(directory, change):
    file = directory / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


@pytest.fixture
def copy(checkpoint, tmp_path):
    return shutil.copytree(checkpoint, tmp_path / "model")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_transformers_saves_fits(architecture, tmp_path):
    check(make_checkpoint(tmp_path, architecture))


def test_shards_and_another_dtype_fit(copy):
    model = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.bfloat16)
    (copy / "model.safetensors").unlink()
    model.save_pretrained(copy, max_shard_size="200KB")
    assert len(json.loads((copy / INDEX).read_text())["weight_map"]) == 25
    check(copy)


def test_tied_weights_that_are_stored_twice_fit(tmp_path):
    path = make_checkpoint(tmp_path, "qwen3-tied")
    edit_weights(path, lambda w: {**w, "lm_head.weight": w["model.embed_tokens.weight"].clone()})
    check(path)


def test_names_without_the_prefix_of_the_base_model_fit(tmp_path):
    path = make_checkpoint(tmp_path, "qwen3-tied")
    edit_weights(path, lambda w: {name.removeprefix("model."): t for name, t in w.items()})
    check(path)


@pytest.mark.parametrize("architecture", ["qwen3-moe", "mixtral", "glm4-moe"])
def test_an_expert_too_few_is_found(architecture, tmp_path):
    path = make_checkpoint(tmp_path, architecture)

    def drop_last_expert(weights):
        experts = [name for name in weights if ".experts." in name]
        last = max(int(name.split(".experts.")[1].split(".")[0]) for name in experts)
        return {n: t for n, t in weights.items() if f".experts.{last}." not in n}

    edit_weights(path, drop_last_expert)
    with pytest.raises(ConfigError, match=r"other shapes than config.json says: .*experts"):
        check(path)


def test_one_wrong_size_among_many_is_named_with_both_shapes(copy):
    name = "model.layers.1.mlp.up_proj.weight"
    edit_weights(copy, lambda w: {**w, name: w[name][:-1].clone()})
    with pytest.raises(ConfigError, match=rf"{name} \[207, 96\] for \[208, 96\]\. "):
        check(copy)


def test_the_check_leaves_transformers_as_talkative_as_it_was(copy):
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    check(copy)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
