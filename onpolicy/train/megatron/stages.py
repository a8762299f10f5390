"""What the last pipeline stage knows, told to the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from onpolicy.train.megatron.config import AlignedConfig

T = TypeVar("T")


def count() -> int:
    """Stages of the pipeline."""
    stages: int = parallel_state.get_pipeline_model_parallel_world_size()
    return stages


def config_of(model: nn.Module) -> AlignedConfig:
    """The configuration that all modules of a stage share."""
    config: AlignedConfig = get_model_config(model)
    return config


def share_vectors(
    vectors: Sequence[Tensor], sizes: Sequence[int], device: torch.device
) -> list[Tensor]:
    """The last stage's float32 vectors of the given sizes, on every stage."""
    if count() == 1:
        return list(vectors)
    is_last = parallel_state.is_pipeline_last_stage()
    flat = torch.cat(list(vectors)) if is_last else torch.empty(sum(sizes), device=device)
    dist.broadcast(flat, _last(), group=parallel_state.get_pipeline_model_parallel_group())
    return list(flat.split(list(sizes)))


def share_object(value: T) -> T:
    """The last stage's value, on every stage."""
    if count() == 1:
        return value
    values = [value]
    group = parallel_state.get_pipeline_model_parallel_group()
    dist.broadcast_object_list(values, _last(), group=group)
    return values[0]


def _last() -> int:
    rank: int = parallel_state.get_pipeline_model_parallel_last_rank()
    return rank
