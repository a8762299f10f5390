"""Every element of every tensor has one place under every layout; other checkpoints are refused."""

import itertools

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from onpolicy.errors import ConfigError
from onpolicy.models.weight_files import CheckpointReader
from onpolicy.training.megatron.parts import is_expert
from onpolicy.training.megatron.rank_layout import MegatronLayout
from onpolicy.training.megatron.weight_map import WeightMap

DENSE = ["qwen3", "qwen3-tied", "qwen2", "llama", "smollm3", "olmo2"]
SPARSE = ["qwen3-moe", "mixtral", "qwen2-moe", "glm4-moe"]

LAYOUTS = [
    MegatronLayout(),
    MegatronLayout(tensor_model_parallel_size=2),
    MegatronLayout(pipeline_model_parallel_size=2),
    MegatronLayout(expert_model_parallel_size=3),
    MegatronLayout(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, expert_model_parallel_size=2
    ),
]


@pytest.fixture(params=[*DENSE, *SPARSE])
def path(request, model_of):
    return model_of(request.param)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_ranks_together_hold_every_element_once(path, layout):
    weight_map = WeightMap(AutoConfig.from_pretrained(path), layout)
    stored = load_file(path / "model.safetensors")
    assert weight_map.shapes() == {name: tuple(t.shape) for name, t in stored.items()}
    held = {name: torch.zeros(shape) for name, shape in weight_map.shapes().items()}
    places = itertools.product(
        range(layout.pipeline_model_parallel_size),
        range(layout.tensor_model_parallel_size),
        range(layout.expert_model_parallel_size),
    )
    seen = set()
    for stage, tp_rank, ep_rank in places:
        for parameter in weight_map.parameters(stage):
            parts = list(
                weight_map.parts(parameter, tp_rank, ep_rank if is_expert(parameter) else 0)
            )
            assert len({str(part.target) for part in parts}) == len(parts)
            for part in parts:
                if (part.name, str(part.source)) not in seen:  # copies, as of norms
                    seen.add((part.name, str(part.source)))
                    held[part.name][part.source] += 1
    assert all((count == 1).all() for count in held.values())


def changed(path, directory, change):
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors")
    shapes = WeightMap(AutoConfig.from_pretrained(path), MegatronLayout()).shapes()
    return CheckpointReader(directory), shapes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.norm.weight"), r"needs tensors it lacks: model\.norm\.weight"),
        (lambda w: w.update(extra=torch.ones(1)), r"tensors the model does not know: extra\."),
        (
            lambda w: w.update({"model.norm.weight": torch.ones(5)}),
            r"other shapes than the model's: model\.norm\.weight \[5\] for \[96\]",
        ),
    ],
)
def test_a_checkpoint_with_other_tensors_is_refused_by_their_names(path, tmp_path, change, message):
    reader, shapes = changed(path, tmp_path, change)
    with pytest.raises(ConfigError, match=message):
        reader.require(shapes)
