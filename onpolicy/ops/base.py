"""The interface of the aligned operators: what both engines must compute to the same bits.

An implementation promises *row invariance*: a row of the result depends on the same row of the
input alone, not on how many rows share the call, their order, their padding, how a sequence was
cut into chunks or found in a cache, or how many threads ran. That is what makes a token's
log-probability the same in a batch of decoding requests and in a packed training micro-batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onpolicy.ops.row_parallel import RowParallel


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayout:
    """Which rows of the queries and of the key/value store belong to which sequence.

    The queries of a sequence are its last `query_lens[s]` tokens; earlier tokens are only keys
    (a cached prefix). Training packs whole sequences, so there both lengths are equal.
    """

    query_lens: tuple[int, ...]
    """Number of query rows of each sequence, in the order in which `q` holds them. Example: (7, 1)"""

    key_lens: tuple[int, ...]
    """Number of keys of each sequence, prefix included. Example: (7, 33)"""

    key_rows: Tensor
    """int64 [S, >= max(key_lens)]: row of the store that holds each key; padding is any valid row."""

    plans: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What an implementation worked out for this layout, kept for the model's other layers."""

    @staticmethod
    def packed(lens: tuple[int, ...], device: torch.device | str = "cpu") -> AttentionLayout:
        """The layout of whole sequences laid end to end, keys in the same rows as queries."""
        starts = torch.tensor([0, *lens[:-1]], device=device).cumsum(0)
        rows = starts[:, None] + torch.arange(max(lens), device=device)
        return AttentionLayout(
            query_lens=lens, key_lens=lens, key_rows=rows.clamp_(max=sum(lens) - 1)
        )


class Operators(ABC):
    """The operators whose bits the two engines share. T: packed tokens, H: heads, D: head dim."""

    column_tile: int | None = None
    """Output columns that one GEMM computes, if `linear` always cuts them so; None if it does not."""

    @abstractmethod
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias`: [..., K], [N, K], [N] -> [..., N], in the dtype of `x`."""

    @abstractmethod
    def partial_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x @ weight.T`, not rounded: [..., K], [N, K] -> float32 [..., N].

        The part of a longer sum over K; see `row_parallel_linear`.
        """

    def row_parallel_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, row_parallel: RowParallel
    ) -> Tensor:
        """`linear`, summed over K in a way that does not depend on the tensor-parallel degree.

        x: [..., K / P], weight: [N, K / P] of P tensor-parallel ranks; bias [N] -> [..., N].
        """
        if row_parallel.blocks == 1:
            return self.linear(x, weight, bias)
        pairs = zip(row_parallel.split(x), row_parallel.split(weight), strict=True)
        total = row_parallel.sum([self.partial_linear(*pair) for pair in pairs])
        return (total if bias is None else total + bias.float()).to(x.dtype)

    @abstractmethod
    def grouped_linear(self, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        """One linear per expert: [S, K], [E, N, K], int64 [E + 1] -> [S, N] in the dtype of `x`.

        Rows `offsets[e]` to `offsets[e + 1]` of `x` belong to expert e; the rest is as in `linear`.
        """

    @abstractmethod
    def grouped_partial_linear(self, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        """`grouped_linear`, not rounded: [S, K], [E, N, K], int64 [E + 1] -> float32 [S, N]."""

    @abstractmethod
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scale: float
    ) -> Tensor:
        """Causal attention over the sequences of `layout`.

        q: [T, H, D]; k: [rows, H_kv, D] and v: [rows, H_kv, D_v], the key/value store.
        Returns [T, H, D_v] in the dtype of `q`; sums are taken in float32. Gradients flow to all
        three where the layout is packed (every key row used once).
        """

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`weight * (x / rms(x))`, the quotient rounded to x's dtype first: [..., D] -> [..., D]."""

    @abstractmethod
    def elementwise(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """`function(x)` of an activation function that maps every element by itself."""

    @abstractmethod
    def softmax(self, x: Tensor) -> Tensor:
        """Softmax over the last axis in float32, as routers use it: [..., E] -> float32 [..., E]."""

    @abstractmethod
    def log_softmax(self, logits: Tensor, temperature: Tensor) -> Tensor:
        """`log_softmax(float32(logits) / temperature)`: [M, V], float32 [M, 1] -> float32 [M, V]."""
