"""The backends' attention over pages, as a rollout engine's attention backend calls it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onpolicy.ops import PagedLayout, ScoreRule


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Queries and keys of B sequences: what FlashAttention-3's `flash_attn_with_kvcache` takes."""

    page_table: Tensor
    """int32 [B, pages]"""

    cache_seqlens: Tensor
    """int32 [B]: keys of each sequence, those of its queries included"""

    cu_seqlens_q: Tensor
    """int32 [B + 1]: first query row of each sequence"""

    max_seqlen_q: int

    page_size: int

    @staticmethod
    def of(page_table, page_size, query_lens, key_lens):
        """Queries are the last tokens of each sequence; `page_table` has the batch's rows."""
        starts = torch.tensor([0, *query_lens]).cumsum(0)
        return PagedBatch(
            page_table=page_table.to(torch.int32),
            cache_seqlens=torch.tensor(key_lens, dtype=torch.int32).to(page_table.device),
            cu_seqlens_q=starts.to(page_table.device, torch.int32),
            max_seqlen_q=max(query_lens),
            page_size=page_size,
        )

    def layout(self):
        """The same, as the operators take it."""
        return PagedLayout(
            page_table=self.page_table,
            page_size=self.page_size,
            key_lens=self.cache_seqlens,
            query_starts=self.cu_seqlens_q,
            max_query_len=self.max_seqlen_q,
        )


def paged_attention_of(backend):
    """The function that the engine's attention backend calls under a contract of `backend`: causal
    attention of q [T, H, D] over stores [rows, H_kv, D] -> out [T, H, D], lse float32 [T, H] or None."""
    return {"cpu": _on_cpu, "triton": _by_triton, "hopper": _by_flash_attention_3}[backend]


def _by_triton(q, k, v, batch, scale):
    from onpolicy.ops.triton.attention import blockwise_attention

    return blockwise_attention(q, k, v, batch.layout(), ScoreRule(scale))


def _by_flash_attention_3(q, k, v, batch, scale):
    from onpolicy.ops.hopper import flash_attention

    stores = _pages(k, batch), _pages(v, batch)
    out, lse = flash_attention.attend(q, *stores, batch.layout(), ScoreRule(scale))
    return out, lse.t()


def flash_attention_3(q, k, v, batch, scale, num_splits):
    """SGLang's FlashAttention-3; `num_splits=0` leaves it to the kernel, as stock engines do."""
    from onpolicy.ops.hopper import flash_attention

    out, lse, *_ = flash_attention.loaded().flash_attn_with_kvcache(
        q=q,
        k_cache=_pages(k, batch),
        v_cache=_pages(v, batch),
        page_table=batch.page_table,
        cache_seqlens=batch.cache_seqlens,
        cu_seqlens_q=batch.cu_seqlens_q,
        max_seqlen_q=batch.max_seqlen_q,
        softmax_scale=scale,
        causal=True,
        num_splits=num_splits,
        return_softmax_lse=True,
    )
    return out, lse.t()


def _pages(store, batch):
    return store.view(-1, batch.page_size, *store.shape[1:])


def over_rows(operators):
    """Any operators' attention over pages as rows, for what knows no pages and gives no lse."""

    def attend(q, k, v, batch, scale):
        return operators.attention(q, k, v, batch.layout().by_rows(), ScoreRule(scale)), None

    return attend


def _on_cpu(q, k, v, batch, scale):
    """The CPU operators' attention, for rehearsals."""
    from onpolicy.ops.cpu.attention import blockwise_attention
    from onpolicy.ops.cpu.threads import PiecePool

    lse = q.new_empty(*q.shape[:2], 1, dtype=torch.float32)
    out = blockwise_attention(
        PiecePool(1), q.contiguous(), k, v, batch.layout().by_rows(), ScoreRule(scale), lse
    )
    return out, lse[..., 0]
