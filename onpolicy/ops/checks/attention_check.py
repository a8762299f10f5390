"""The self-check of attention: packed as in training, after a cached prefix, decoding, and on pages."""

from __future__ import annotations

import torch
from torch import Tensor

from onpolicy.ops.base import AttentionLayout, Operators, PagedLayout
from onpolicy.ops.checks.probe import probe, require_equal

LENS = (300, 1, 64, 65, 17)
QUERY_COUNTS = (1, 2, 5, *range(8, 129, 8))


def attention_inputs(
    heads: tuple[int, int, int], dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of packed sequences of LENS; heads: (H, H_kv, D)."""
    num_heads, kv_heads, dim = heads
    q = probe(sum(LENS), num_heads, dim, seed=8, device=device)
    k = probe(sum(LENS), kv_heads, dim, seed=9, device=device)
    v = probe(sum(LENS), kv_heads, dim, seed=10, device=device)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _heads(q: Tensor, k: Tensor) -> tuple[int, int, int]:
    return q.shape[1], *k.shape[1:]


def check_attention(operators: Operators, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The packed sequences, whose rows must not change when fewer queries share a call."""
    heads, scale, device = _heads(q, k), q.shape[-1] ** -0.5, q.device
    whole = AttentionLayout.packed(LENS, device)
    packed = operators.attention(q, k, v, whole, scale)
    # The last `count` tokens of the longest sequence as queries, the others as a cached prefix.
    for count in QUERY_COUNTS:
        layout = AttentionLayout(
            query_lens=(count,), key_lens=LENS[:1], key_rows=whole.key_rows[:1]
        )
        rows = slice(LENS[0] - count, LENS[0])
        alone = operators.attention(q[rows], k, v, layout, scale)
        require_equal("attention", heads, f"{count} queries alone", alone, packed[rows])
    # One decode step of all the sequences at once.
    ends = torch.tensor(LENS, device=device).cumsum(0)
    layout = AttentionLayout(query_lens=(1,) * len(LENS), key_lens=LENS, key_rows=whole.key_rows)
    decode = operators.attention(q[ends - 1], k, v, layout, scale)
    require_equal("attention", heads, "a decode step", decode, packed[ends - 1])
    return packed


def check_paged_attention(
    operators: Operators, q: Tensor, k: Tensor, v: Tensor, packed: Tensor
) -> Tensor:
    """A prefill from pages of one key, as engines have them; it and fewer queries against `packed`."""
    heads, scale, device = _heads(q, k), q.shape[-1] ** -0.5, q.device
    # Turned round, so that no key lies where it does in training.
    pages = len(k) - 1 - AttentionLayout.packed(LENS, device).key_rows
    stores = k.flip(0)[:, None], v.flip(0)[:, None]
    key_lens = torch.tensor(LENS, dtype=torch.int32, device=device)
    ends = key_lens.cumsum(0)

    def attend(counts: tuple[int, ...], case: str) -> Tensor:
        """The last queries of every sequence."""
        lens = torch.tensor(counts, dtype=torch.int32)
        starts = torch.cat([lens.new_zeros(1), lens.cumsum(0, dtype=torch.int32)])
        layout = PagedLayout(
            page_table=pages.to(torch.int32),
            page_size=1,
            key_lens=key_lens,
            query_starts=starts.to(device),
            max_query_len=max(counts),
        )
        spans = [torch.arange(end - n, end) for end, n in zip(ends.tolist(), counts, strict=True)]
        rows = torch.cat(spans).to(device)
        out = operators.paged_attention(q[rows], *stores, layout, scale)
        require_equal("paged_attention", heads, case, out, packed[rows])
        return out

    attend((1,) * len(LENS), "a decode step")
    attend(tuple(min(n, 40) for n in LENS), "the last queries of each sequence")
    return attend(LENS, "a prefill")
