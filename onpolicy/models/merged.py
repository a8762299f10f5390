"""A base and its adapter as one checkpoint: W + s B A in the place of each adapted W.

What was trained is two factors; the sum lies on the grid of a dtype, and where a weight is large beside
its update, the update is rounded away. So the dtype is asked for, and what it costs is returned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from onpolicy.config.groups import LoraConfig
from onpolicy.errors import ConfigError
from onpolicy.models.export import export_checkpoint
from onpolicy.models.hf_config import load_config
from onpolicy.models.peft_adapter import PeftAdapter, read_peft_adapter
from onpolicy.models.peft_format import read_factors, require_adapter_fits
from onpolicy.models.stored import stored_tensors
from onpolicy.models.weight_files import matched_model, stored_shapes, weight_files
from onpolicy.weights.digest import WeightBucket


@dataclass(slots=True)
class Merged:
    """What became of the adapted weights, counted as they are written."""

    linears: int = 0
    weights: int = 0

    changed: int = 0
    """Weights that are not what the base's own are in the dtype that is written."""

    asked: float = 0.0
    """The sum of squares of s B A."""

    missed: float = 0.0
    """The sum of squares of what has to be added to the written change for it to be s B A."""

    def add(self, base: Tensor, update: Tensor, written: Tensor) -> None:
        """Count one linear; all [N, K], base and update in float32."""
        before, after = base.to(written.dtype).float(), written.float()
        self.linears, self.weights = self.linears + 1, self.weights + base.numel()
        self.changed += int((after != before).sum())
        self.asked += float(update.square().sum(dtype=torch.float64))
        self.missed += float((after - before - update).square().sum(dtype=torch.float64))

    def __str__(self) -> str:
        changed = self.changed / self.weights
        error = (self.missed / self.asked) ** 0.5 if self.asked else 0.0
        return (
            f"{self.linears} linears merged: {changed:.2%} of their weights changed, and rounding is "
            f"{error:.2%} of the update (Frobenius norms)"
        )


def export_merged(source: Path, adapter: str, directory: Path, dtype: str) -> Merged:
    """Write the checkpoint of `source` with an adapter in its weights, all parameters in `dtype`.

    Raises ConfigError for an adapter of another model, and for a base that has not the weights of each
    adapted linear by themselves.
    """
    config = load_config(str(source), False)
    if getattr(config, "quantization_config", None):
        raise ConfigError(
            f"--hf-checkpoint={source}: its weights are quantised, and an update cannot be added to "
            "them. Give the checkpoint that they were rounded from."
        )
    told = read_peft_adapter(adapter, "--merge")
    model = matched_model(str(source), config)
    require_adapter_fits(told, model, str(source), "--merge")
    places = _places(told, model, source)
    merged = Merged()
    buckets = _buckets(source, told, places, getattr(torch, dtype), _buffers(model), merged)
    export_checkpoint(buckets, directory, source, dtype)
    return merged


def _places(adapter: PeftAdapter, model: PreTrainedModel, source: Path) -> dict[str, str]:
    """The names of the adapted linears, by those of their weights in the files."""
    files, places = stored_shapes(source, "--hf-checkpoint"), {}
    for linear in adapter.linears:
        weight = model.get_parameter(f"{linear}.weight")
        names = [*stored_tensors(model, f"{linear}.weight", weight)]
        names += [names[0].removeprefix(f"{model.base_model_prefix}.")]
        found = [name for name in names if name in files and files[name].shape == weight.shape]
        if not found:
            raise ConfigError(
                f"--hf-checkpoint={source}: holds no weights of {linear} alone, as where they are those "
                "of the embedding too, so nothing can be added to them. Use the adapter unmerged."
            )
        places[found[0]] = linear
    return places


def _buffers(model: PreTrainedModel) -> set[str]:
    return {name for name, _ in model.named_buffers()}


def _buckets(
    source: Path,
    adapter: PeftAdapter,
    places: dict[str, str],
    dtype: torch.dtype,
    buffers: set[str],
    merged: Merged,
) -> Iterator[WeightBucket]:
    """One file at a time. Parameters are cast; buffers stay as they are."""
    factors, scale = read_factors(str(adapter.directory)), LoraConfig(**adapter.flags).scale
    for file in weight_files(source, "--hf-checkpoint"):
        bucket: WeightBucket = []
        for name, tensor in load_file(file).items():
            written = tensor if name in buffers else tensor.to(dtype)
            if linear := places.get(name):
                a, b = (factors[f"{linear}.lora.{factor}"].float() for factor in "AB")
                base, update = tensor.float(), scale * (b @ a)
                written = (base + update).to(dtype)
                merged.add(base, update, written)
            bucket.append((name, written))
        yield bucket
