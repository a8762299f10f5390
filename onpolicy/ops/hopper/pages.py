"""An attention layout as FlashAttention-3's paged kernels want it, with pages of one key each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onpolicy.ops.layouts import AttentionLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """Where the queries and keys of S sequences are, on the device that computes."""

    table: Tensor
    """int32 [S, >= longest]: row of the key/value store that holds each key."""

    query_starts: Tensor
    """int32 [S + 1]: first query row of each sequence."""

    key_starts: Tensor
    """int32 [S + 1]: the same for keys, if they were laid end to end."""

    key_lens: Tensor
    """int32 [S]"""

    max_query_len: int
    max_key_len: int

    key_rows: Tensor
    """int64 [keys of all sequences]: row of the store that holds each key, in that order."""

    @staticmethod
    def of(layout: AttentionLayout) -> Pages:
        """The pages of `layout`, worked out once for all layers of a model."""
        if Pages not in layout.plans:
            layout.plans[Pages] = _pages(layout)
        pages: Pages = layout.plans[Pages]
        return pages


def _pages(layout: AttentionLayout) -> Pages:
    rows = layout.key_rows
    lens = torch.tensor(layout.key_lens)
    is_key = torch.arange(rows.shape[1]) < lens[:, None]
    return Pages(
        table=rows.to(torch.int32),
        query_starts=_starts(layout.query_lens).to(rows.device),
        key_starts=_starts(layout.key_lens).to(rows.device),
        key_lens=lens.to(rows.device, torch.int32),
        max_query_len=max(layout.query_lens),
        max_key_len=max(layout.key_lens),
        key_rows=rows[is_key.to(rows.device)],
    )


def _starts(lens: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0, dtype=torch.int32)
