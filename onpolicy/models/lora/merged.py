"""A base and its adapter as one model: W + s B A in the place of each adapted W.

Merged checkpoints are written this way, and so are pushes to engines without adapters. The sum is
rounded to a dtype, and where a weight is large beside its update, the update is rounded away. So
the caller chooses the dtype, and the loss by rounding is counted.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from onpolicy.config.groups import LoraConfig
from onpolicy.errors import ConfigError, WeightSyncError
from onpolicy.models.hf_config import load_config
from onpolicy.models.hf_export import export_checkpoint
from onpolicy.models.lora.adapters import is_adapters
from onpolicy.models.lora.peft_adapter import read_peft_adapter
from onpolicy.models.lora.peft_format import parameter_of, read_factors, require_adapter_fits
from onpolicy.models.stored import stored_tensors
from onpolicy.models.weight_files import CheckpointReader, matched_model
from onpolicy.weights.digest import WeightBucket


@dataclass(slots=True)
class Merged:
    """Statistics of the merged weights, counted as they are written."""

    linears: int = 0
    weights: int = 0

    changed: int = 0
    """Number of weights that differ from the base's weight in the written dtype."""

    asked: float = 0.0
    """The sum of squares of the update, s B A."""

    missed: float = 0.0
    """The sum of squares of the difference between the update and the written change."""

    def add(self, base: Tensor, update: Tensor, written: Tensor) -> None:
        """Count one linear; all tensors are [N, K], base and update in float32."""
        before, after = base.to(written.dtype).float(), written.float()
        self.linears, self.weights = self.linears + 1, self.weights + base.numel()
        self.changed += int((after != before).sum())
        self.asked += float(update.square().sum(dtype=torch.float64))
        self.missed += float((after - before - update).square().sum(dtype=torch.float64))

    @property
    def changed_share(self) -> float:
        """Return the share of the adapted weights that changed."""
        return self.changed / self.weights if self.weights else 0.0

    @property
    def rounding(self) -> float:
        """Return the rounding error as a share of the update (Frobenius norms)."""
        return float((self.missed / self.asked) ** 0.5) if self.asked else 0.0

    def __str__(self) -> str:
        return (
            f"{self.linears} linears merged: {self.changed_share:.2%} of their weights changed, and "
            f"rounding is {self.rounding:.2%} of the update (Frobenius norms)"
        )


def export_merged(source: Path, adapter: str, directory: Path, dtype: str) -> Merged:
    """Write the checkpoint of `source` with an adapter in its weights, all parameters in `dtype`.

    Raise ConfigError for an adapter of another model, for a base that does not store each adapted
    linear's weight separately, and for numbers that are not finite in `dtype`; then no files are
    left.
    """
    config = load_config(str(source), False)
    told = read_peft_adapter(adapter, "--merge")
    model = matched_model(str(source), config)
    require_adapter_fits(told, model, str(source), "--merge")
    updates, merged = Updates(model, read_factors(told), LoraConfig(**told.flags).scale), Merged()
    names = _names_in_files(source, model, updates)
    buffers = {name for name, _ in model.named_buffers()}
    buckets = _buckets(source, names, buffers, updates, getattr(torch, dtype), merged)
    try:
        export_checkpoint(buckets, directory, source, dtype)
    except ConfigError:
        shutil.rmtree(directory)
        raise
    return merged


def merge_push(
    trained: Iterable[WeightBucket],
    frozen: Iterable[WeightBucket],
    model: PreTrainedModel,
    scale: float,
    merged: Merged,
) -> Iterator[WeightBucket]:
    """Yield a model's weights with its adapters merged, in the dtype of the frozen weights.

    model: without weights or adapters, with the same names. `merged` counts the statistics.
    Raise WeightSyncError if an adapted weight is not among the frozen ones.
    """
    factors: dict[str, Tensor] = {}
    for bucket in trained:
        factors |= {name: tensor for name, tensor in bucket if is_adapters(name)}
        if others := [(name, tensor) for name, tensor in bucket if not is_adapters(name)]:
            yield others
    updates = Updates(model, factors, scale)
    left = set(updates.parts)
    for bucket in frozen:
        left.difference_update(name for name, _ in bucket)
        yield [(name, updates.added(name, x, x.dtype, merged)) for name, x in bucket]
    if left:
        raise WeightSyncError(
            f"weights={sorted(left)}: have adapters, and are not among the frozen weights that they "
            "would be merged into. Report this: no engine may go on without them."
        )


class Updates:
    """The updates of a model's weights by an adapter, under the names that a checkpoint gives them."""

    def __init__(self, model: PreTrainedModel, factors: Mapping[str, Tensor], scale: float):
        """Take the factors, whole and named as in the model (`read_factors`); none means no update."""
        self._model, self._factors, self._scale = model, factors, scale
        pairs = {name.rpartition(".")[0] for name in factors if name.endswith((".A", ".B"))}
        self._pairs = {parameter_of(pair): pair for pair in sorted(pairs)}
        self.parts: dict[str, torch.Size] = {}
        """Shape of each adapted tensor, by its name."""
        self._parameters: dict[str, str] = {}
        for name in self._pairs:
            for stored, part in stored_tensors(model, name, model.get_parameter(name)).items():
                self.parts[stored], self._parameters[stored] = part.shape, name
        self._latest: dict[str, dict[str, Tensor]] = {}

    def added(self, name: str, base: Tensor, dtype: torch.dtype, merged: Merged) -> Tensor:
        """Return the tensor of this name plus its update, summed in float32 and rounded once."""
        if name not in self.parts:
            return base.to(dtype)
        before, update = base.float(), self.of(name)
        written = (before + update).to(dtype)
        merged.add(before, update, written)
        return written

    def of(self, name: str) -> Tensor:
        """Return s B A for the tensor of this name, one of `parts`, in float32 and of its shape."""
        parameter = self._parameters[name]
        if parameter not in self._latest:
            # Keep two: a layer's experts have two parameters, whose parts alternate in the files.
            while len(self._latest) > 1:
                del self._latest[next(iter(self._latest))]
            self._latest[parameter] = self._of_parameter(parameter)
        return self._latest[parameter][name]

    def _of_parameter(self, name: str) -> dict[str, Tensor]:
        """Return s B A, per expert if there are several, as transformers stores it."""
        a, b = (self._factors[f"{self._pairs[name]}.{factor}"].float() for factor in "AB")
        update = self._scale * ((b.flatten(1, -2) if b.dim() > 3 else b) @ a)
        module = self._model.get_submodule(name.rpartition(".")[0])
        is_transposed = getattr(module, "is_transposed", False)
        return stored_tensors(
            self._model, name, update.transpose(1, 2) if is_transposed else update
        )


def _names_in_files(source: Path, model: PreTrainedModel, updates: Updates) -> dict[str, str]:
    """Map the names of the adapted weights in the base's files to transformers' names.

    Raise ConfigError if the files do not store them separately.
    """
    files, names = CheckpointReader(source).shapes(), {}
    prefix = f"{model.base_model_prefix}."
    for stored, shape in updates.parts.items():
        both = stored, stored.removeprefix(prefix)
        found = [name for name in both if name in files and files[name].shape == shape]
        if not found:
            raise ConfigError(
                f"--hf-checkpoint={source}: holds no weights of {stored.removesuffix('.weight')} "
                "alone, as where they are those of the embedding too, so nothing can be added "
                "to them. Use the adapter unmerged."
            )
        names[found[0]] = stored
    return names


def _buckets(
    source: Path,
    names: Mapping[str, str],
    buffers: set[str],
    updates: Updates,
    dtype: torch.dtype,
    merged: Merged,
) -> Iterator[WeightBucket]:
    """Yield the checkpoint with parameters cast to `dtype` and buffers unchanged."""

    def written(name: str, tensor: Tensor) -> Tensor:
        if name in buffers:
            return tensor
        found = updates.added(names.get(name, name), tensor, dtype, merged)
        if not found.isfinite().all():
            raise ConfigError(
                f"--dtype={str(dtype).removeprefix('torch.')}: numbers of {name} are not finite in it. "
                "Give one with a wider range, as bfloat16, or a base whose own numbers are finite."
            )
        return found

    for bucket in CheckpointReader(source).buckets():
        yield [(name, written(name, tensor)) for name, tensor in bucket]
