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
from onpolicy.models.hf_config import load_config
from onpolicy.models.policy import PolicyModel, empty_policy
from onpolicy.models.stored import stored_tensors
from onpolicy.ops import Operators
from onpolicy.train import distributed
from onpolicy.weights.digest import WeightBucket

_PREFIX = "causal_lm."


def load_sharded_policy(
    path: str,
    operators: Operators,
    dtype: torch.dtype,
    *,
    device: torch.device,
    activation_checkpointing: bool,
    trust_remote_code: bool,
    row_parallel_blocks: int,
) -> PolicyModel:
    """Load float32 master weights, each rank its shards; computation runs in `dtype`.

    Rank 0 reads the checkpoint with transformers and broadcasts one parameter at a time.
    """
    config = load_config(path, trust_remote_code)
    model = empty_policy(config, operators, trust_remote_code, row_parallel_blocks)
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
        for name, buffer in _stored_buffers(model).items():
            if source:
                buffer.copy_(weights[name.removeprefix(_PREFIX)])
            dist.broadcast(buffer, src=0)


def _stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that belong to a checkpoint, such as a router's correction of its scores."""
    stored = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}


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
    tensors: dict[str, Tensor] = loaded.state_dict()
    return tensors


def _require_all_weights(model: PolicyModel, weights: dict[str, Tensor], path: str) -> None:
    names = {name.removeprefix(_PREFIX) for name, _ in model.named_parameters()}
    if missing := sorted(names - weights.keys()):
        raise ConfigError(f"{path}: no weights for {missing[:10]}. The checkpoint is incomplete.")


def gather_buckets(
    model: PolicyModel, dtype: torch.dtype, max_bytes: int
) -> Iterator[WeightBucket]:
    """Whole tensors under the names a checkpoint has for them, `max_bytes` at a time.

    Parameters are cast to `dtype`, buffers are what they are.
    """
    bucket: WeightBucket = []
    size = 0
    for name, tensor in _checkpoint_tensors(model, dtype):
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def _checkpoint_tensors(model: PolicyModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    names: set[str] = set()
    for name, tensor in _whole_tensors(model, dtype):
        stored = stored_tensors(model.causal_lm, name.removeprefix(_PREFIX), tensor)
        if twice := sorted(names & stored.keys()):
            raise ConfigError(
                f"parameter={name}: transformers stores it together with another one as {twice[0]}, so "
                "it cannot be sent by itself. Choose another checkpoint."
            )
        names |= stored.keys()
        yield from stored.items()


def _whole_tensors(model: PolicyModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """One at a time, gathered from all ranks; never the model's own memory."""
    for name, parameter in model.named_parameters():
        cast = parameter.detach().to(dtype, copy=True)
        assert isinstance(cast, DTensor)
        yield name, cast.full_tensor()
    for name, buffer in _stored_buffers(model).items():
        yield name, buffer.clone()
