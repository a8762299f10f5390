"""Adapters of the trainer beside the linears of SGLang's model, and their loading.

A tensor-parallel rank has the rows of B, or the columns of A, that belong to its part of the
weight. The last rows of an output projection may be padding.

Source: replace_linear_class, sglang/srt/models/transformers.py; AutoWeightsLoader._load_param,
sglang/srt/models/utils.py, which asks a parameter for its `weight_loader`.
"""

from __future__ import annotations

from typing import Any

import torch

from onpolicy.contract import NumericsContract
from onpolicy.models.lora.adapters import adapters, add_adapters
from onpolicy.ops import Operators
from sglang_patches.tensor_parallel import rank, shard


def put_in(model: Any, operators: Operators, contract: NumericsContract) -> None:
    """Add the contract's adapters, if it has any, beside the linears of a loaded model."""
    add_adapters(model, operators, contract.adapter)
    for adapter in adapters(model):
        for factor in adapter.parameters():
            factor.weight_loader = _load_part  # type: ignore[attr-defined]


def _load_part(factor: torch.Tensor, whole: torch.Tensor) -> None:
    part = shard(whole, factor, rank())
    factor.data[tuple(map(slice, part.shape))].copy_(part)
