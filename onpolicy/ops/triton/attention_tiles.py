"""What all kernels of attention share: where a tile's rows and keys are, and which keys a row sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from onpolicy.contract import ATTENTION_CHUNK
from onpolicy.ops.layouts import AttentionLayout
from onpolicy.ops.triton.device import next_power_of_2


@dataclass(frozen=True, slots=True)
class Sequences:
    """Where the queries and keys of B sequences are, on the device that computes."""

    page_table: Tensor
    """int32 or int64 [B, >= pages]: page of the store that holds each run of `page_size` keys."""

    page_size: int

    key_lens: Tensor
    """int32 [B]: keys of each sequence, those of its queries included."""

    query_starts: Tensor
    """int32 [B + 1]: first query row of each sequence; its queries are its last tokens."""

    max_query_len: int
    """Upper bound on the queries of a sequence; sets the grid, so a constant under a CUDA graph."""

    @staticmethod
    def of(layout: AttentionLayout) -> Sequences:
        """The layout's rows as pages of one key each, kept for the model's other layers."""
        if Sequences not in layout.plans:
            device = layout.key_rows.device
            starts = torch.tensor([0, *layout.query_lens]).cumsum(0, dtype=torch.int32)
            layout.plans[Sequences] = Sequences(
                page_table=layout.key_rows,
                page_size=1,
                key_lens=torch.tensor(layout.key_lens, dtype=torch.int32).to(device),
                query_starts=starts.to(device),
                max_query_len=max(layout.query_lens),
            )
        sequences: Sequences = layout.plans[Sequences]
        return sequences

    @property
    def chunk(self) -> int:
        """Keys that are summed apart."""
        return ATTENTION_CHUNK

    @property
    def max_chunks(self) -> int:
        """Upper bound on the chunks of a sequence's keys, from the width of the page table alone."""
        return -(-self.page_table.shape[1] * self.page_size // self.chunk)

    def arguments(self) -> tuple[Any, ...]:
        """What every attention kernel takes first."""
        return self.page_table, self.key_lens, self.query_starts, self.page_table.stride(0)

    def __len__(self) -> int:
        return len(self.key_lens)


@triton.jit
def row_positions(
    tile: tl.tensor,
    query_len: tl.tensor,
    key_len: tl.tensor,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Query token, head in its group, position, and whether it exists, of every row of a tile.

    Rows past the end repeat the last token: they see a key, so nothing in them is 0 / 0.
    """
    rows = tile * ROWS + tl.arange(0, ROWS)
    tokens = tl.minimum(rows // GROUP, query_len - 1)
    return tokens, rows % GROUP, key_len - query_len + tokens, rows < query_len * GROUP


@triton.jit
def key_rows(
    table: tl.tensor, keys: tl.tensor, is_key: tl.tensor, PAGE_SIZE: tl.constexpr
) -> tl.tensor:
    """Rows of the store that hold `keys` of the sequence whose row of the page table this is."""
    pages = tl.load(table + keys // PAGE_SIZE, mask=is_key, other=0)
    return pages.to(tl.int64) * PAGE_SIZE + keys % PAGE_SIZE


@triton.jit
def capped(scores: tl.tensor, SOFTCAP: tl.constexpr) -> tl.tensor:
    """SOFTCAP * tanh(scores / SOFTCAP) of scores that, like the result, are multiplied by log2(e)."""
    tanh = 1.0 - 2.0 / (tl.exp2(scores * (2.0 / SOFTCAP)) + 1.0)
    return tanh * (SOFTCAP * 1.4426950408889634)


@triton.jit
def is_visible(keys: tl.tensor, positions: tl.tensor, WINDOW: tl.constexpr) -> tl.tensor:
    """Which keys [KEYS] the queries at positions [ROWS] see, their own included; WINDOW 0: all."""
    visible = keys[None, :] <= positions[:, None]
    if WINDOW:
        visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
    return visible


@triton.jit
def first_block(position: tl.tensor, KEYS: tl.constexpr, WINDOW: tl.constexpr) -> tl.tensor:
    """The first key of the first block of which a query at `position` sees something."""
    if WINDOW:
        return tl.maximum(position - WINDOW + 1, 0) // KEYS * KEYS
    return position * 0


def unit_stride(x: Tensor) -> Tensor:
    """`x` with its last axis contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def dim_block(dim: int) -> int:
    """A head size as a power of two of at least 16, the least that `tl.dot` takes."""
    return max(16, next_power_of_2(dim))
