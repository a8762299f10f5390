"""Weights that fit their configuration are taken, whatever names they are stored under; no others."""

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from onpolicy.errors import ConfigError
from onpolicy.models import weight_files
from onpolicy.models.hf_config import load_config
from onpolicy.models.weight_files import INDEX, CheckpointReader, require_fit
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


def test_the_check_leaves_transformers_as_talkative_as_it_was(copy):
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    check(copy)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tied"), "qwen3-tied")


@pytest.fixture
def tied(made, tmp_path):
    return shutil.copytree(made, tmp_path / "model")


def edit(directory, change, **config):
    """Change the weights, and what config.json says."""
    file = directory / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    said = directory / "config.json"
    said.write_text(json.dumps({**json.loads(said.read_text()), **config}))


def with_head(change):
    """An edit that stores a head beside the embedding that it is tied to."""
    return lambda w: {**w, HEAD: change(w[EMBEDDING].clone())}


def changed_in_row(row, value):
    def change(head):
        head[row, 0] = value
        return head

    return change


def transformers_computes_with_both(path):
    model = AutoModelForCausalLM.from_pretrained(path)
    return not torch.equal(model.lm_head.weight, model.get_input_embeddings().weight)


@pytest.mark.parametrize("row", [0, 100])
def test_a_head_of_other_numbers_beside_an_embedding_that_it_is_tied_to_is_refused(
    tied, row, monkeypatch
):
    monkeypatch.setattr(weight_files, "ROWS_AT_A_TIME", 7)
    edit(tied, with_head(changed_in_row(row, 9.0)))
    assert transformers_computes_with_both(tied)
    message = (
        rf"--hf-checkpoint=.*tie_word_embeddings=True in config.json, and {HEAD} is stored beside "
        rf"{EMBEDDING} with other numbers, the first in row {row}\..*tie_word_embeddings=false"
    )
    with pytest.raises(ConfigError, match=message):
        check(tied)


def test_the_head_is_taken_as_soon_as_config_json_says_that_it_is_one(tied):
    edit(tied, with_head(changed_in_row(3, 9.0)), tie_word_embeddings=False)
    check(tied)


def test_an_equal_head_is_taken(tied):
    edit(tied, with_head(lambda head: head))
    assert not transformers_computes_with_both(tied)
    check(tied)


@pytest.mark.parametrize(("dtype", "is_taken"), [("bfloat16", True), ("float32", False)])
def test_numbers_are_compared_in_the_models_dtype_as_transformers_does(tied, dtype, is_taken):
    def change(weights):
        head = weights[EMBEDDING].to(torch.bfloat16)
        return {**weights, EMBEDDING: head.float() * (1 + 2.0**-20), HEAD: head}

    edit(tied, change, dtype=dtype)
    assert transformers_computes_with_both(tied) == (not is_taken)
    if is_taken:
        check(tied)
    else:
        with pytest.raises(ConfigError, match="with other numbers"):
            check(tied)


def test_a_zero_of_the_other_sign_is_another_number(tied):
    edit(tied, lambda w: {**w, EMBEDDING: w[EMBEDDING].index_fill(0, torch.tensor([4]), 0.0)})
    edit(tied, with_head(changed_in_row(4, -0.0)))
    with pytest.raises(ConfigError, match="the first in row 4"):
        check(tied)


def test_a_head_of_another_shape_is_refused(tied):
    edit(tied, with_head(lambda head: torch.cat([head, head[:7]])))
    with pytest.raises(ConfigError, match=rf"{HEAD} is stored beside .* with another shape"):
        check(tied)


def test_a_head_beside_names_without_the_base_models_prefix_is_found(tied):
    edit(tied, with_head(changed_in_row(5, 9.0)))
    edit(tied, lambda w: {name.removeprefix("model."): x for name, x in w.items()})
    with pytest.raises(ConfigError, match=r"lm_head.weight is stored beside embed_tokens.weight"):
        check(tied)


def test_a_head_in_another_file_is_found(tied):
    weights = load_file(tied / "model.safetensors")
    (tied / "model.safetensors").unlink()
    head = changed_in_row(6, 9.0)(weights[EMBEDDING].clone())
    save_file(weights, tied / "model-1.safetensors")
    save_file({HEAD: head}, tied / "model-2.safetensors")
    files = dict.fromkeys(weights, "model-1.safetensors") | {HEAD: "model-2.safetensors"}
    (tied / INDEX).write_text(json.dumps({"weight_map": files}))
    with pytest.raises(ConfigError, match="the first in row 6"):
        check(tied)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool, torch.int64])
def test_integers_in_the_place_of_weights_are_refused(tied, dtype):
    name = "model.layers.0.mlp.up_proj.weight"
    edit(tied, lambda w: {**w, name: (w[name] * 100).to(dtype)})
    with pytest.raises(ConfigError, match=rf"{name} (I8|U8|BOOL|I64): weights must be numbers"):
        check(tied)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_weight_that_is_no_number_is_refused_where_it_is_read(tied, value, dtype):
    def change(weights):
        weights = {name: x.to(dtype) for name, x in weights.items()}
        weights["model.norm.weight"][3] = value
        return weights

    edit(tied, change)
    reader = CheckpointReader(tied)
    assert reader.read(EMBEDDING, ()).isfinite().all()
    assert reader.read("model.norm.weight", [slice(4, None)]).isfinite().all()
    with pytest.raises(ConfigError, match=r"model.norm.weight holds NaN or infinity \(1 of"):
        reader.read("model.norm.weight", ())


def test_finite_numbers_whose_sum_is_not_are_taken():
    block = torch.full((4,), torch.finfo(torch.float32).max)
    assert weight_files.require_finite(block, "x", "y") is block


def test_what_transformers_leaves_out_by_rule_is_said(tied, caplog, monkeypatch):
    from transformers import Qwen3ForCausalLM

    monkeypatch.setattr(Qwen3ForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"^mtp\."])
    edit(tied, lambda w: {**w, "mtp.fc.weight": torch.ones(2, 2, dtype=torch.int8)})
    with caplog.at_level(logging.INFO):
        check(tied)
    assert "1 tensors are not of the model that is trained, and are left out: mtp.fc" in caplog.text
