"""Reads a rank's shards of a checkpoint, and nothing else of it.

FSDP2 shares every parameter by its rows. A parameter may be made of several stored tensors (all
experts of a layer are two parameters), so each rank looks where a stored tensor stands in the
parameter, on the meta device, and reads those of its rows that are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PretrainedConfig, PreTrainedModel

from onpolicy.errors import ConfigError
from onpolicy.models.stored import stored_tensors
from onpolicy.models.weight_files import CheckpointReader, matched_model


def load_shards(
    model: nn.Module, prefix: str, path: str, config: PretrainedConfig, trust_remote_code: bool
) -> None:
    """Fill this rank's shards of `model`, whose parameters are DTensors under `prefix` and the names
    that transformers gives them, and the buffers that the checkpoint holds.

    Raises ConfigError if the checkpoint is not of this model.
    """
    matched = matched_model(path, config, trust_remote_code)
    reader = CheckpointReader(path)
    stored_names = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in stored_names}
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *buffers.items()):
            shard = _Shard.of(tensor)
            whole = torch.empty(tensor.shape, device="meta")
            for stored, place in stored_tensors(matched, name.removeprefix(prefix), whole).items():
                found = next((n for n in _names(matched, stored) if n in reader), None)
                if found is None:
                    raise ConfigError(
                        f"{path}: no weights for {stored}. The checkpoint is incomplete."
                    )
                shard.fill(place, partial(reader.read, found))


def _names(model: PreTrainedModel, name: str) -> Iterator[str]:
    """Under which names a checkpoint may hold a tensor: its own, another module's that shares it, the
    base model's."""
    yield name
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    yield from (other for other, source in tied.items() if source == name)
    yield name.removeprefix(f"{model.base_model_prefix}.")


@dataclass(frozen=True, slots=True)
class _Shard:
    """Some rows of a tensor, which this rank holds."""

    held: Tensor
    first: int
    stride: int
    """Elements of a row of the whole tensor."""

    @staticmethod
    def of(tensor: Tensor) -> _Shard:
        stride = tensor[0].numel() if tensor.dim() else 1
        if not isinstance(tensor, DTensor):
            return _Shard(tensor, 0, stride)
        _, offset = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        return _Shard(tensor.to_local(), offset[0] if offset else 0, stride)

    def fill(self, place: Tensor, read: Callable[[Sequence[slice]], Tensor]) -> None:
        """Read what a stored tensor, which stands at `place` in the whole one, has of these rows."""
        first = place.storage_offset() // self.stride
        sizes = enumerate(zip(place.shape, place.stride(), strict=True))
        axis = next((d for d, (size, step) in sizes if size > 1 and step == self.stride), None)
        count = 1 if axis is None else place.shape[axis]
        low, high = max(first, self.first), min(first + count, self.first + len(self.held))
        if low >= high:
            return
        index = [slice(None)] * place.dim()
        if axis is not None:
            index[axis] = slice(low - first, high - first)
        mine = place[tuple(index)]
        start = self.held.storage_offset() + mine.storage_offset() - self.first * self.stride
        self.held.as_strided(mine.shape, mine.stride(), start).copy_(read(index))
