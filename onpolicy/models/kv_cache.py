"""Keys and values as a cache with 8 bits a number keeps them: with a scale for each token and head.

They are rounded when they are written, and both engines attend to what is read back. The rollout's cache
holds the bytes, and the trainer rounds whole sequences by the same functions. A gradient passes
straight through.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PretrainedConfig

from onpolicy.contract import NumericsContract
from onpolicy.weights.rounding import dequantise, quantise, straight_through

NUMBERS = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}
"""What --rollout-kv-format names: formats of `onpolicy/weights/rounding.py`, and how they are stored."""

SCALE = torch.float32.itemsize


def packed_size(size: int) -> int:
    """The bytes of a head of so many numbers."""
    return size + SCALE


def token_bytes(hf_config: PretrainedConfig, contract: NumericsContract) -> int:
    """Bytes of a token's keys and values in all layers."""
    itemsize, kinds = getattr(torch, contract.dtype).itemsize, contract.shapes.attention
    head = packed_size if contract.kv_format else lambda numbers: itemsize * numbers
    per_layer = max(kind.kv_heads * (head(kind.head_dim) + head(kind.value_dim)) for kind in kinds)
    return int(hf_config.num_hidden_layers * per_layer)


def packed(x: Tensor, kv_format: str) -> Tensor:
    """[T, H, D] -> uint8 [T, H, D + 4]: each head's numbers, then its scale in float32."""
    numbers, scale = quantise(x.flatten(0, 1), kv_format)
    parts = numbers.to(NUMBERS[kv_format]), scale.contiguous()
    return torch.cat([part.view(torch.uint8) for part in parts], -1).view(*x.shape[:2], -1)


def unpacked(rows: Tensor, kv_format: str, dtype: torch.dtype) -> Tensor:
    """What `packed` gave -> [T, H, D], each product of number and scale rounded once."""
    heads = rows.flatten(0, 1)
    numbers = heads[:, :-SCALE].view(NUMBERS[kv_format]).float()
    scale = heads[:, -SCALE:].reshape(-1).clone().view(torch.float32)[:, None]
    return dequantise(numbers, scale, kv_format, dtype).view(*rows.shape[:2], -1)


def as_cached(x: Tensor, kv_format: str) -> Tensor:
    """Keys or values [T, H, D], as they are read from a cache; as they are without a format."""
    if not kv_format:
        return x
    return straight_through(x, lambda x: unpacked(packed(x, kv_format), kv_format, x.dtype))
