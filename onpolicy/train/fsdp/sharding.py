"""A Hugging Face checkpoint as an FSDP2-sharded model, and back."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as checkpoint_activations
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.models.policy import PolicyModel, empty_policy
from onpolicy.models.stored import stored_tensors
from onpolicy.ops import Operators
from onpolicy.train import distributed
from onpolicy.train.fsdp.loading import load_shards
from onpolicy.weights.digest import WeightBucket, WeightPart

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
    context: int | None = None,
) -> PolicyModel:
    """Load float32 master weights, each rank its shards; computation runs in `dtype`.

    Every rank reads its own shards of the checkpoint's files.
    """
    config = load_config(path, trust_remote_code, context=context)
    model = empty_policy(config, operators, trust_remote_code, row_parallel_blocks)
    buffers = dict(model.named_buffers())
    _shard(model, dtype, activation_checkpointing)
    model.to_empty(device=device)
    for name, buffer in buffers.items():
        _assign_buffer(model, name, buffer.to(device))
    load_shards(model, _PREFIX, path, config, trust_remote_code)
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


def _stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that belong to a checkpoint, such as a router's correction of its scores."""
    stored = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}


def gather_buckets(
    model: PolicyModel, dtype: torch.dtype, max_bytes: int, part: WeightPart
) -> Iterator[WeightBucket]:
    """Whole tensors of a part under the names a checkpoint has for them, `max_bytes` at a time.

    Parameters are cast to `dtype`, buffers are what they are. Collective: every rank has to take all
    of them. They are full on rank 0; the others keep nothing of what they help to gather.
    """
    bucket: WeightBucket = []
    size = 0
    for name, tensor in _checkpoint_tensors(model, dtype, part):
        if distributed.rank() != 0:
            continue
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def _checkpoint_tensors(
    model: PolicyModel, dtype: torch.dtype, part: WeightPart
) -> Iterator[tuple[str, Tensor]]:
    names: set[str] = set()
    for name, tensor in _whole_tensors(model, dtype, part):
        stored = stored_tensors(model.causal_lm, name.removeprefix(_PREFIX), tensor)
        if twice := sorted(names & stored.keys()):
            raise ConfigError(
                f"parameter={name}: transformers stores it together with another one as {twice[0]}, so "
                "it cannot be sent by itself. Choose another checkpoint."
            )
        names |= stored.keys()
        yield from stored.items()


def _whole_tensors(
    model: PolicyModel, dtype: torch.dtype, part: WeightPart
) -> Iterator[tuple[str, Tensor]]:
    """One at a time, gathered from all ranks; never the model's own memory."""
    for name, parameter in model.named_parameters():
        if part not in ("all", "trained" if parameter.requires_grad else "frozen"):
            continue
        cast = parameter.detach().to(dtype, copy=True)
        assert isinstance(cast, DTensor)
        yield name, cast.full_tensor()
    if part != "frozen":
        for name, buffer in _stored_buffers(model).items():
            yield name, buffer.clone()
