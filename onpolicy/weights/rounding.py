"""Weights as a rollout in a small number format holds them, in the engine's own dtype.

A linear layer's weight is divided by one scale per output channel, rounded, and multiplied again:
what an FP8 or integer deployment computes with, on machines without such kernels. Embeddings, the
output projection, routers, norms and biases stay as they are, as deployments have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from onpolicy.weights.digest import WeightBucket

KEPT = ("embed", "lm_head", "gate.weight", "router.weight")
FP8 = torch.float8_e4m3fn
LARGEST = {"fp8_e4m3": torch.finfo(FP8).max, "int8": 127.0, "int4": 7.0, "int3": 3.0}
"""What a row's largest weight becomes; integers are symmetric around 0."""


def rounded(buckets: Iterable[WeightBucket], weight_format: str) -> Iterator[WeightBucket]:
    """The buckets with rounded weights. weight_format: bf16 or a key of LARGEST; empty: as they are."""
    for bucket in buckets:
        yield [(name, _round(name, tensor, weight_format)) for name, tensor in bucket]


def _round(name: str, weight: Tensor, weight_format: str) -> Tensor:
    if not weight_format or weight.dim() != 2 or any(part in name for part in KEPT):
        return weight
    if weight_format == "bf16":
        return weight.bfloat16().to(weight.dtype)
    return round_per_channel(weight, weight_format)


def round_per_channel(weight: Tensor, weight_format: str) -> Tensor:
    """[N, K] -> [N, K] in the same dtype, each row rounded with a scale of its own."""
    values, largest = weight.float(), LARGEST[weight_format]
    scale = values.abs().amax(1, keepdim=True) / largest
    scale = torch.where(scale > 0, scale, 1)
    scaled = values / scale
    is_integer = weight_format.startswith("int")
    steps = scaled.round() if is_integer else scaled.clamp(-largest, largest).to(FP8)
    return (steps.float() * scale).to(weight.dtype)
