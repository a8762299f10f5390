"""Positions of three axes (M-RoPE): an image's tokens lie on a grid, and text goes on after its side.

Source: transformers/models/qwen3_vl/modeling_qwen3_vl.py, get_rope_index and
Qwen3VLTextRotaryEmbedding, whose pairs of angles take turns between time, height and width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

Grid = tuple[int, int, int]
"""Rows of an image in time, height and width."""


def axis_positions(first: int, count: int, images: Sequence[tuple[int, Grid]]) -> Tensor:
    """Return the positions of tokens `first` to `first + count` of a sequence: int64 [3, count].

    images: (index of the first token, grid) of each image before the last of these tokens, in order.
    """
    found, shift = torch.arange(first, first + count).expand(3, -1).clone(), 0
    for start, grid in images:
        end = start + prod(grid)
        saved = end - start - max(grid[1:])
        low, high = max(start, first), min(end, first + count)
        if low < high:
            axes = torch.meshgrid(*map(torch.arange, grid), indexing="ij")
            places = torch.stack(axes).flatten(1)[:, low - start : high - start]
            found[:, low - first : high - first] = start - shift + places
        found[:, max(end - first, 0) :] -= saved
        shift += saved
    return found


def rotate_by_axes(rotary: Any, sections: Sequence[int], given: Callable[[], Tensor]) -> None:
    """Have a rotary embedding take its positions, int64 [3, T], from `given` at each call."""

    def forward(x: Tensor, position_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        angles = given()[:, None, :, None].float() * rotary.inv_freq.float()
        turns = (angles.cos(), angles.sin())
        cos, sin = (_take_turns(each * rotary.attention_scaling, sections) for each in turns)
        return cos.to(x.dtype), sin.to(x.dtype)

    rotary.forward = torch.no_grad()(partial(forward))


def _take_turns(of_axes: Tensor, sections: Sequence[int]) -> Tensor:
    """Return each pair's number from its own axis, [3, 1, T, D / 2] -> [1, T, D], twice."""
    taken = of_axes[0].clone()
    for axis in (1, 2):
        pairs = slice(axis, sections[axis] * 3, 3)
        taken[..., pairs] = of_axes[axis, ..., pairs]
    return torch.cat((taken, taken), dim=-1)
