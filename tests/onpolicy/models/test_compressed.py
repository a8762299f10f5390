"""A checkpoint of numbers and scales is read as the plain weights that were deployed."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from onpolicy.errors import ConfigError
from onpolicy.models.compressed import KEY, Compressed
from onpolicy.models.export import export_checkpoint
from onpolicy.models.facts import ModelFacts
from onpolicy.models.hf_config import load_config, require_alignable
from onpolicy.models.quantised import export_quantised
from onpolicy.models.weight_files import CheckpointReader, require_fit, stored_shapes
from onpolicy.weights.rounding import FORMATS, is_rounded, round_weight
from tests.support.tiny import make_checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8}
    path = make_checkpoint(tmp_path_factory.mktemp("made") / "model", "qwen3", **sizes)
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    return path


def exported(source, path, weight_format, **how):
    export_quantised(source, path, weight_format, **how)
    return path


def deployed(source, weight_format):
    stored = load_file(source / "model.safetensors")
    return {
        name: round_weight(x, weight_format) if is_rounded(name, x) else x
        for name, x in stored.items()
    }


def raw(path):
    files = sorted(path.glob("*.safetensors"))
    return [(name, x) for file in files for name, x in load_file(file).items()]


def edit_config(path, change):
    file = path / "config.json"
    told = json.loads(file.read_text())
    change(told["quantization_config"])
    file.write_text(json.dumps(told))


@pytest.mark.parametrize("weight_format", FORMATS)
def test_what_is_read_has_the_bits_that_were_deployed(source, tmp_path, weight_format):
    path, wanted = (
        exported(source, tmp_path / "out", weight_format),
        deployed(source, weight_format),
    )
    by_trainer = dict(CheckpointReader(path).tensors())
    by_engine = dict(Compressed.of(path).plain(reversed(raw(path))))  # in any order
    shapes = stored_shapes(path, "--hf-checkpoint")
    assert by_trainer.keys() == by_engine.keys() == shapes.keys() == wanted.keys()
    for name, weight in wanted.items():
        for found in (by_trainer[name], by_engine[name]):
            assert found.dtype == torch.bfloat16 and torch.equal(found, weight), name
        assert shapes[name].shape == weight.shape
    config = load_config(str(path))
    assert not hasattr(config, "quantization_config")
    require_fit(str(path), config)
    name = "model.layers.1.mlp.down_proj.weight"
    block = CheckpointReader(path).read(name, (slice(3, 9), slice(100, 140)))
    assert torch.equal(block, wanted[name][3:9, 100:140])


@pytest.mark.parametrize("weight_format", FORMATS)
def test_rounding_again_changes_no_bit(source, weight_format):
    for name, weight in deployed(source, weight_format).items():
        if is_rounded(name, weight):
            assert torch.equal(round_weight(weight, weight_format), weight), name


def test_rounding_a_small_block_of_nvfp4_again_may_change_it():
    """Where its scale, as E4M3, has one bit or two: beside a weight that is 1e5 times as large."""
    weight = torch.zeros(1, 32)
    weight[0, 0], weight[0, 16] = 1.0, 1.6 * 2.0**-9 / 448
    once = round_weight(weight, "nvfp4")
    assert not torch.equal(round_weight(once, "nvfp4"), once)


def test_a_scale_that_is_off_by_an_ulp_is_found(tmp_path):
    path = exported(make_checkpoint(tmp_path / "model", "qwen3"), tmp_path / "out", "int4")
    before, (file,) = dict(CheckpointReader(path).tensors()), path.glob("*.safetensors")
    name, tensors = "model.layers.0.mlp.up_proj.weight", load_file(file)
    scale = tensors[f"{name}_scale"]
    scale[5] = torch.nextafter(scale[5], torch.tensor(torch.inf))
    save_file(tensors, file)
    after = dict(CheckpointReader(path).tensors())
    assert [n for n in before if not torch.equal(before[n], after[n])] == [name]
    assert (before[name] != after[name]).any(1).nonzero().tolist() == [[5]]


def test_a_weight_without_its_scale_is_refused_by_name(source, tmp_path):
    path = exported(source, tmp_path / "out", "fp8_e4m3")
    (file,), name = path.glob("*.safetensors"), "model.layers.0.mlp.up_proj.weight"
    save_file({n: x for n, x in load_file(file).items() if n != f"{name}_scale"}, file)
    with pytest.raises(ConfigError, match=f"{name}_scale: is missing"):
        dict(Compressed.of(path).plain(raw(path)))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"symmetric": False}, "'num_bits': 4, 'type': 'int', 'strategy'"),
        ({"actorder": "group"}, "'actorder': 'group'"),
        ({"num_bits": 2}, "'num_bits': 2"),
    ],
)
def test_a_form_that_is_not_written_is_refused_by_name(source, tmp_path, change, named):
    path = exported(source, tmp_path / "out", "int4")
    edit_config(path, lambda told: told["config_groups"]["group_0"]["weights"].update(change))
    config = load_config(str(path))
    assert Compressed.of(path) is None
    with pytest.raises(ConfigError, match=named):
        require_alignable(ModelFacts(config), 64)


def test_rounded_inputs_are_refused_since_a_run_says_so_itself(source, tmp_path):
    path = exported(source, tmp_path / "out", "fp8_e4m3", rounds_inputs=True)
    with pytest.raises(
        ConfigError, match=r"input_activations: .*--rollout-activation-format rounds"
    ):
        require_alignable(ModelFacts(load_config(str(path))), 64)


@pytest.mark.parametrize("name", ["kv_cache_scheme", "sparsity_config", "transform_config"])
def test_what_is_done_beside_rounding_is_refused_by_name(source, tmp_path, name):
    path = exported(source, tmp_path / "out", "int4")
    edit_config(path, lambda told: told.update({name: {"a": 1}}))
    with pytest.raises(ConfigError, match=f"compressed-tensors with {name}="):
        require_alignable(ModelFacts(load_config(str(path))), 64)


def test_a_checkpoint_that_is_made_from_an_export_is_plain(source, tmp_path):
    path = exported(source, tmp_path / "out", "int4")
    export_checkpoint(CheckpointReader(path).buckets(), tmp_path / "plain", path, "bfloat16")
    assert KEY not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert Compressed.of(tmp_path / "plain") is None
    again, before = (dict(CheckpointReader(p).tensors()) for p in (tmp_path / "plain", path))
    assert all(torch.equal(again[name], before[name]) for name in before)
