"""The weights of a tower in published files: their names, and refusals of what does not fit."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.models.size import ModelSize
from onpolicy.models.text_part import own_name, tower_name
from onpolicy.models.vision.tower import empty_tower
from onpolicy.models.weight_files import CheckpointReader, require_fit
from tests.support.seeing_policies import FAMILIES, seeing_policy
from tests.support.tiny_images import make_image_checkpoint


@pytest.fixture(params=FAMILIES)
def path(request, tmp_path):
    return make_image_checkpoint(tmp_path / "model", request.param)


def test_every_stored_tensor_is_of_the_text_part_or_of_the_tower(path):
    reader, tower = CheckpointReader(path), empty_tower(path)
    assert reader.tower.keys() == {f"model.tower.{name}" for name, _ in tower.named_parameters()}
    assert {*reader.others} == {*reader.tower.values()}
    assert all(own_name(stored) is None for stored in reader.tower.values())


@pytest.mark.parametrize(
    "stored",
    [
        "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight",
        "model.vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight",
        "vision_tower.encoder.layers.0.mlp.fc1.weight",
        "model.vision_tower.encoder.layers.0.mlp.fc1.weight",
    ],
)
def test_names_before_and_since_transformers_5_are_one(stored):
    assert tower_name(stored) == "model.tower.vision_tower.encoder.layers.0.mlp.fc1.weight"


def test_a_weight_under_its_names_before_and_since_transformers_5_is_refused(path):
    file, names = path / "model.safetensors", CheckpointReader(path).tower.values()
    stored = next(name for name in sorted(names) if "weight" in name)
    other = stored.removeprefix("model.") if stored.startswith("model.") else f"model.{stored}"
    tensors = load_file(file)
    save_file({**tensors, other: tensors[stored].clone()}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"are names of one weight.*Remove one"):
        CheckpointReader(path)


@pytest.mark.parametrize("change", ["missing", "other shape"])
def test_a_tower_that_does_not_fit_is_refused(path, change):
    config = load_config(str(path))
    require_fit(str(path), config, sees=True)
    file, name = path / "model.safetensors", next(iter(CheckpointReader(path).tower.values()))
    tensors = load_file(file)
    tensors[name] = tensors[name].flatten()[:3].clone()
    if change == "missing":
        del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    require_fit(str(path), config)
    with pytest.raises(ConfigError, match=r"tensors of the vision tower are missing, or others"):
        require_fit(str(path), config, sees=True)


def test_the_size_counts_the_tower(path):
    config = load_config(str(path))
    size, policy = ModelSize.of(config, tower_of=str(path)), seeing_policy(path, torch.bfloat16)
    assert size.parameters == size.trained == sum(p.numel() for p in policy.parameters())
