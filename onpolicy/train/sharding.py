"""A Hugging Face checkpoint as an FSDP2-sharded model, and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as checkpoint_activations
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM

from onpolicy.errors import ConfigError
from onpolicy.models.checkpoint import load_config
from onpolicy.models.policy import PolicyModel, empty_policy
from onpolicy.ops import Operators
from onpolicy.train import distributed
from onpolicy.weights import WeightBucket

_PREFIX = "causal_lm."


def load_sharded_policy(
    path: str,
    operators: Operators,
    dtype: torch.dtype,
    *,
    device: torch.device,
    activation_checkpointing: bool,
    trust_remote_code: bool,
) -> PolicyModel:
    """Load float32 master weights, each rank its shards; computation runs in `dtype`.

    Rank 0 reads the checkpoint with transformers and broadcasts one parameter at a time.
    """
    model = empty_policy(load_config(path, trust_remote_code), operators, trust_remote_code)
    buffers = dict(model.named_buffers())
    _shard(model, dtype, activation_checkpointing)
    model.to_empty(device=device)
    for name, buffer in buffers.items():
        _assign_buffer(model, name, buffer.to(device))
    _broadcast_weights(model, path, device, trust_remote_code)
    return model


def _shard(model: PolicyModel, dtype: torch.dtype, activation_checkpointing: bool) -> None:
    # Inputs are not cast: rotary angles must stay in float32 as they do in the rollout engine.
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    model.float()
    for layer in model.layers:
        if activation_checkpointing:
            checkpoint_activations(layer)
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def _assign_buffer(model: nn.Module, name: str, buffer: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner)._buffers[leaf] = buffer


def _broadcast_weights(
    model: PolicyModel, path: str, device: torch.device, trust_remote_code: bool
) -> None:
    source = distributed.rank() == 0
    weights = _read_checkpoint(path, trust_remote_code) if source else {}
    distributed.run_on_rank_zero(lambda: _require_all_weights(model, weights, path))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full = (
                weights[name.removeprefix(_PREFIX)].to(device, torch.float32).contiguous()
                if source
                else torch.empty(parameter.shape, dtype=torch.float32, device=device)
            )
            dist.broadcast(full, src=0)
            assert isinstance(parameter, DTensor)
            mesh, placements = parameter.device_mesh, parameter.placements
            parameter.copy_(distribute_tensor(full, mesh, placements, src_data_rank=None))


def _read_checkpoint(path: str, trust_remote_code: bool) -> dict[str, Tensor]:
    result: Any = AutoModelForCausalLM.from_pretrained(
        path,
        dtype="auto",
        trust_remote_code=trust_remote_code,
        use_safetensors=True,
        output_loading_info=True,
    )
    loaded, info = result
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(kind):
            raise ConfigError(
                f"{path}: {kind.replace('_', ' ')}: {sorted(map(str, info[kind]))[:10]}. The weights "
                "do not belong to the config.json beside them."
            )
    return dict(loaded.named_parameters())


def _require_all_weights(model: PolicyModel, weights: dict[str, Tensor], path: str) -> None:
    names = {name.removeprefix(_PREFIX) for name, _ in model.named_parameters()}
    if missing := sorted(names - weights.keys()):
        raise ConfigError(f"{path}: no weights for {missing[:10]}. The checkpoint is incomplete.")


def gather_buckets(
    model: PolicyModel, dtype: torch.dtype, max_bytes: int
) -> Iterator[WeightBucket]:
    """Whole parameters under their Hugging Face names, in `dtype`, `max_bytes` at a time."""
    bucket: WeightBucket = []
    size = 0
    for name, parameter in model.named_parameters():
        parameter_bytes = parameter.numel() * dtype.itemsize
        if bucket and size + parameter_bytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        cast = parameter.detach().to(dtype, copy=True)  # never the parameter itself
        assert isinstance(cast, DTensor)
        full = cast.full_tensor()
        bucket.append((name.removeprefix(_PREFIX), full))
        size += parameter_bytes
    if bucket:
        yield bucket
