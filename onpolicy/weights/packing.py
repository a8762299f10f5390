"""Rounded weights as codes of 4 or 8 bits and scales, and back, with not a bit lost.

What `rounding.py` made of a weight says by itself which numbers and scales it was made of: an engine
that was pushed a rounded weight can keep it in the memory that its format promises. Where several scales
give the same weight, any of them does.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from onpolicy.weights.rounding import (
    FORMATS,
    FP8,
    WeightFormat,
    dequantise,
    from_blocks,
    in_blocks,
)

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""E2M1's numbers in the order of their codes."""

SURE = 63
"""Integers up to this are told apart whatever bfloat16 made of them and of the largest."""

NUDGES = sorted(range(-128, 129), key=abs)
"""How far beside the likeliest a scale is looked for, in steps of NUDGE of it, where that was wrong."""

NUDGE = 2.0**-15

NOT_ROUNDED = "the weight is not one that was rounded to this format"

AT_A_TIME = 1 << 16
"""Weights that are packed or unpacked at a time, on a CPU, since they stay in a core's cache."""


class PackedWeight(NamedTuple):
    codes: Tensor
    """uint8 [N, K], or [N, ceil(K / 2)] with the lower code first: a number's place among the format's
    magnitudes, and above it the sign. That of 0 is kept, too. FP8 and FP4 are their own codes."""

    scale: Tensor
    """float32 [blocks of N, of K]"""


def magnitudes(weight_format: str) -> Tensor:
    """The numbers of a format that are not negative, ascending: float32."""
    match weight_format:
        case "fp8_e4m3" | "fp8_e4m3_block128":
            return torch.arange(127, dtype=torch.uint8).view(FP8).float()
        case "mxfp4" | "nvfp4":
            return torch.tensor(FP4)
        case _:
            return torch.arange(FORMATS[weight_format].largest + 1, dtype=torch.float32)


def bits_of(weight_format: str) -> int:
    """4 or 8: how many a code takes."""
    return 4 if len(magnitudes(weight_format)) <= 8 else 8


def packed_bytes(weight_format: str, count: int) -> int:
    """What so many weights take, with their scales unless these are of whole rows."""
    if not count:
        return 0
    high, wide = FORMATS[weight_format].block
    return count * bits_of(weight_format) // 8 + (4 * count // (high * wide) if wide else 0)


def pack(weight: Tensor, weight_format: str) -> PackedWeight:
    """[N, K], in its dtype what `round_weight` gave, or a part of that in whole blocks.

    Raises ValueError if it is anything else.
    """
    asked, weight = FORMATS[weight_format], weight.contiguous()
    blocks = in_blocks(weight, asked.block).transpose(1, 2)
    (down, across, *size), rows = blocks.shape, blocks.flatten(0, 1).flatten(1)
    known = magnitudes(weight_format).tolist()
    found = [
        _numbers_and_scales(part, asked, known)
        for part in rows.split(max(1, AT_A_TIME // rows.shape[1]))
    ]
    numbers, scale = map(torch.cat, zip(*found, strict=True))
    whole = numbers.view(down, across, *size).transpose(1, 2)
    codes = encode(from_blocks(whole, weight.shape), weight_format)
    packed = PackedWeight(codes, scale.view(down, across))
    unpack(packed, weight_format, again := torch.empty_like(weight))
    if not torch.equal(again.view(torch.uint8), weight.view(torch.uint8)):
        raise ValueError(NOT_ROUNDED)
    return packed


def unpack(packed: PackedWeight, weight_format: str, out: Tensor) -> None:
    """Write into `out` [N, K] what was packed, in its dtype."""
    high, _ = FORMATS[weight_format].block
    step = max(1, AT_A_TIME // (high * out.shape[1])) if out.device.type == "cpu" else len(out)
    for first in range(0, len(packed.scale), step):
        rows = slice(first * high, (first + step) * high)
        numbers = decode(packed.codes[rows], weight_format)[:, : out.shape[1]]
        scale = packed.scale[first : first + step]
        out[rows].copy_(dequantise(numbers, scale, weight_format, out.dtype))


def encode(numbers: Tensor, weight_format: str) -> Tensor:
    """Numbers of a format, float32 [N, K] -> their codes, as in `PackedWeight`."""
    bits, sizes = bits_of(weight_format), numbers.abs()
    if weight_format.startswith("fp8"):
        return numbers.to(FP8).view(torch.uint8)
    if weight_format.endswith("fp4"):
        sizes = torch.bucketize(sizes, torch.tensor(FP4, device=numbers.device), out_int32=True)
    codes = sizes.to(torch.uint8) | numbers.signbit().to(torch.uint8) << (bits - 1)
    if bits == 8:
        return codes
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, ::2] | codes[:, 1::2] << 4


def decode(codes: Tensor, weight_format: str) -> Tensor:
    """Codes -> numbers, float32 [N, K], or one more where K is odd."""
    return _table(weight_format, codes.device)[codes.int()].flatten(1)


@cache
def _table(weight_format: str, device: torch.device) -> Tensor:
    """What each byte stands for: float32 [256, codes in a byte]."""
    known, bits = magnitudes(weight_format), bits_of(weight_format)
    half = torch.zeros(1 << (bits - 1))
    half[: len(known)] = known
    numbers = torch.cat([half, -half])
    if bits == 8:
        return numbers[:, None].to(device)
    low, high = torch.meshgrid(numbers, numbers, indexing="xy")
    return torch.stack([low, high], -1).flatten(0, 1).to(device)


def _numbers_and_scales(
    rows: Tensor, asked: WeightFormat, known: list[float]
) -> tuple[Tensor, Tensor]:
    """Blocks of rounded weights [B, n] -> numbers, float32 [B, n], and scales, float32 [B].

    A block's largest weight is most often the format's largest number, but not where tensor-parallel
    ranks share a block, nor always in NVFP4.
    """
    tops = [top for top in reversed(known) if top > 0]
    numbers, scale, exact = _attempt(rows, asked, tops[0], 0)
    for nudge, top in itertools.product(NUDGES, tops):
        left = (~exact).nonzero()[:, 0]
        if not len(left):
            return numbers, scale
        if nudge and len(left) == len(rows):
            break
        numbers[left], scale[left], exact[left] = _attempt(rows[left], asked, top, nudge)
    raise ValueError(NOT_ROUNDED)


def _attempt(
    rows: Tensor, asked: WeightFormat, top: float, nudge: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers and scales, if the largest of each row is `top`; and bool [B]: whether they are right.

    A weight was rounded from what lies half way to its neighbours, so each tells between which bounds
    the scale is: first those that are surely known by the largest alone, then all.
    """
    sizes = rows.abs()
    wide = torch.float64 if rows.dtype == torch.float32 else torch.float32
    words = torch.int32 if rows.dtype == torch.float32 else torch.int16
    low, high = (
        ((sizes.view(words) + step).view(rows.dtype).to(wide) + sizes.to(wide)) / 2
        for step in (-1, 1)
    )
    largest = sizes.amax(1, keepdim=True).to(wide)
    scale = torch.where(largest == 0, 1, largest / top).float()
    for most in sorted({min(SURE, asked.largest), asked.largest}):
        numbers = asked.nearest(rows.float() / (scale * (1 + nudge * NUDGE)))
        counts = numbers.abs().to(wide)
        counts.masked_fill_(counts > most, 0)
        least = (low / counts).masked_fill_(counts == 0, 0).amax(1, keepdim=True)
        scale = torch.where(least == 0, scale, (least + (high / counts).amin(1, keepdim=True)) / 2)
        scale = scale.float()
    scale = (scale.view(torch.int32) + nudge).view(torch.float32)
    made = (numbers * scale).to(rows.dtype)
    exact = (made.view(words) == rows.view(words)) & (numbers.abs() <= asked.largest)
    return numbers, scale[:, 0], exact.all(1)
