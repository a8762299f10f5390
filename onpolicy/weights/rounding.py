"""Weights in a small number format, as a deployment uses them, in the engine's own dtype.

A linear layer's weight is divided by a scale that its block shares, rounded, and multiplied again,
so that machines without such kernels can use it too. Embeddings, the output projection, routers,
norms, biases and adapters are not rounded, as in deployments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from onpolicy.contract import NumericsContract

if TYPE_CHECKING:  # it imports packages that GPU test machines may lack
    from onpolicy.weights.digest import WeightBucket

KEPT = ("embed", "wte", "wpe", "lm_head", "gate.weight", "router.", ".lora.")
FP8 = torch.float8_e4m3fn


def _to_fp8(scaled: Tensor) -> Tensor:
    largest = torch.finfo(FP8).max
    return scaled.clamp(-largest, largest).to(FP8).float()


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The representable numbers of a weight, in units of its block's scale."""

    largest: float
    """Value of a block's largest weight; integers are symmetric around 0."""

    nearest: Callable[[Tensor], Tensor] = torch.round
    """Function from float32 in units of the scale to the nearest number of the format, float32."""

    block: tuple[int, int] = (1, 0)
    """Output and input channels that share a scale; 0: all. The last block may be smaller."""


FORMATS = {
    "fp8_e4m3": WeightFormat(448, _to_fp8),
    "fp8_e4m3_block128": WeightFormat(448, _to_fp8, (128, 128)),
    "int8": WeightFormat(127),
    "int4": WeightFormat(7),
    "int4_group128": WeightFormat(7, block=(1, 128)),
    "int3": WeightFormat(3),
}
"""Formats of --rollout-weight-format, except bf16, which has no scale."""


def format_of_push(contract: NumericsContract, asked: str) -> str:
    """Return the format to which trained weights are rounded before a push. It is empty where stock
    SGLang on GPUs makes FP8 of the weights itself (`rollout/engine_args.py`)."""
    by_sglang = not contract.is_aligned and contract.device == "cuda" and asked == "fp8_e4m3"
    return "" if by_sglang else asked


def rounded(buckets: Iterable[WeightBucket], weight_format: str) -> Iterator[WeightBucket]:
    """Yield the buckets with rounded weights; an empty format changes nothing."""
    for bucket in buckets:
        yield [
            (name, round_weight(tensor, weight_format) if weight_format and is_rounded(name, tensor)
             else tensor)
            for name, tensor in bucket
        ]  # fmt: skip


def is_rounded(name: str, weight: Tensor) -> bool:
    """Return whether a format applies to this tensor: the weight of a linear, or of one expert."""
    return weight.dim() == 2 and not any(part in name for part in KEPT)


def round_weight(weight: Tensor, weight_format: str) -> Tensor:
    """Round [N, K] -> [N, K] in the same dtype. weight_format: bf16 or a key of FORMATS."""
    if weight_format == "bf16":
        return weight.bfloat16().to(weight.dtype)
    return dequantise(*quantise(weight, weight_format), weight_format, weight.dtype)


def quantise(weight: Tensor, weight_format: str) -> tuple[Tensor, Tensor]:
    """Quantise [N, K] to numbers of the format, float32 [N, K], and float32 scales. The scales are
    [blocks of N, blocks of K]."""
    asked = FORMATS[weight_format]
    blocks = in_blocks(weight.float(), asked.block)
    scale = blocks.abs().amax((1, 3), keepdim=True) / asked.largest
    scale = torch.where(scale == 0, 1, scale)  # non-finite values stay non-finite
    numbers = from_blocks(asked.nearest(blocks / scale), weight.shape)
    return numbers, scale[:, 0, :, 0]


def dequantise(numbers: Tensor, scale: Tensor, weight_format: str, dtype: torch.dtype) -> Tensor:
    """Multiply the results of `quantise` to [N, K], each product rounded once."""
    blocks = in_blocks(numbers, FORMATS[weight_format].block) * scale[:, None, :, None]
    return from_blocks(blocks, numbers.shape).to(dtype)


def straight_through(x: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `rounding` to x with a straight-through gradient (Bengio et al., arXiv:1308.3432)."""
    rounded: Tensor = _StraightThrough.apply(x, rounding)
    return rounded


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
        return rounding(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def in_blocks(whole: Tensor, block: tuple[int, int]) -> Tensor:
    """Split [N, K] into [blocks of N, rows, blocks of K, columns], padded with zeros."""
    rows, columns = (asked or size for asked, size in zip(block, whole.shape, strict=True))
    padded = F.pad(whole, (0, -whole.shape[1] % columns, 0, -whole.shape[0] % rows))
    return padded.view(-1, rows, padded.shape[1] // columns, columns)


def from_blocks(blocks: Tensor, shape: torch.Size) -> Tensor:
    return blocks.flatten(2, 3).flatten(0, 1)[: shape[0], : shape[1]].contiguous()
