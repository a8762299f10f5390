"""A base and its adapter as one checkpoint: W + s B A in the place of each adapted W, or what DoRA makes
of it.

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
from onpolicy.models.peft_adapter import MAGNITUDE, PeftAdapter, read_peft_adapter
from onpolicy.models.peft_experts import parameter_of
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
    """The sum of squares of the update, s B A."""

    missed: float = 0.0
    """The sum of squares of what has to be added to the written change for it to be the update."""

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
    updates, merged = _Updates(told, model, source), Merged()
    buffers = {name for name, _ in model.named_buffers()}
    buckets = _buckets(source, updates, getattr(torch, dtype), buffers, merged)
    export_checkpoint(buckets, directory, source, dtype)
    return merged


class _Updates:
    """What an adapter adds to the tensors of the base's files."""

    def __init__(self, adapter: PeftAdapter, model: PreTrainedModel, source: Path):
        self._model, self._scale = model, LoraConfig(**adapter.flags).scale
        self._factors = read_factors(adapter)
        pairs = {name.rpartition(".")[0] for name in self._factors if name.endswith(".A")}
        self._pairs = {parameter_of(pair): pair for pair in pairs}
        self._places = self._find_places(source)
        self._latest: dict[str, dict[str, Tensor]] = {}

    def of(self, name: str, base: Tensor) -> Tensor | None:
        """float32, of the shape of the `base`'s tensor of this name; None if nothing is added to it."""
        if name not in self._places:
            return None
        parameter, stored = self._places[name]
        if parameter not in self._latest:
            # A layer's experts have two, whose parts alternate in the files.
            while len(self._latest) > 1:
                del self._latest[next(iter(self._latest))]
            self._latest[parameter] = self._of_parameter(parameter)
        update = self._latest[parameter][stored]
        lengths = self._factors.get(f"{self._pairs[parameter]}.{MAGNITUDE}")
        if lengths is None:
            return update
        shape, total = self._model.get_parameter(parameter).shape, base.float() + update
        of_rows = lengths.float()[:, None].expand(shape).contiguous()
        of_rows = stored_tensors(self._model, parameter, of_rows)[stored]
        merged: Tensor = total * (of_rows / total.norm(dim=1, keepdim=True))
        return merged - base.float()

    def _find_places(self, source: Path) -> dict[str, tuple[str, str]]:
        """The adapted parameter and what transformers calls a part of it, by that part's name in the
        files."""
        files, places = stored_shapes(source, "--hf-checkpoint"), {}
        prefix = f"{self._model.base_model_prefix}."
        for name in sorted(self._pairs):
            parts = stored_tensors(self._model, name, self._model.get_parameter(name))
            for stored, part in parts.items():
                names = stored, stored.removeprefix(prefix)
                found = [x for x in names if x in files and files[x].shape == part.shape]
                if not found:
                    raise ConfigError(
                        f"--hf-checkpoint={source}: holds no weights of {name.removesuffix('.weight')} "
                        "alone, as where they are those of the embedding too, so nothing can be added "
                        "to them. Use the adapter unmerged."
                    )
                places[found[0]] = name, stored
        return places

    def _of_parameter(self, name: str) -> dict[str, Tensor]:
        """s B A, for each expert if there are several, as transformers stores it."""
        a, b = (self._factors[f"{self._pairs[name]}.{factor}"].float() for factor in "AB")
        update = self._scale * ((b.flatten(1, -2) if b.dim() > 3 else b) @ a)
        module = self._model.get_submodule(name.rpartition(".")[0])
        if getattr(module, "is_transposed", False):
            update = update.transpose(1, 2).contiguous()
        return stored_tensors(self._model, name, update)


def _buckets(
    source: Path, updates: _Updates, dtype: torch.dtype, buffers: set[str], merged: Merged
) -> Iterator[WeightBucket]:
    """One file at a time. Parameters are cast; buffers stay as they are."""
    for file in weight_files(source, "--hf-checkpoint"):
        bucket: WeightBucket = []
        for name, tensor in load_file(file).items():
            written = tensor if name in buffers else tensor.to(dtype)
            update = updates.of(name, tensor)
            if update is not None:
                base = tensor.float()
                written = (base + update).to(dtype)
                merged.add(base, update, written)
            bucket.append((name, written))
        yield bucket
