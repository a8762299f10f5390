"""The self-check of attention: packed, after a cached prefix, in decode, and on pages."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from onpolicy.contract import AttentionShape
from onpolicy.ops.base import Operators
from onpolicy.ops.checks.probe import probe, require_equal
from onpolicy.ops.layouts import AttentionLayout, PagedLayout, ScoreRule

QUERY_COUNTS = (1, 2, 5, *range(8, 129, 8))

LENS = (530, 1, 64, 65, 17)
"""Lengths of the packed sequences in the checks; one has several chunks of keys."""

WINDOW = 100
"""Largest window in the checks, shorter than the longest sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionInputs:
    """Whole sequences laid end to end, and the score rule of a layer of this kind."""

    kind: AttentionShape
    q: Tensor
    k: Tensor
    v: Tensor
    scores: ScoreRule
    sinks: Tensor | None

    @staticmethod
    def of(
        kind: AttentionShape,
        dtype: torch.dtype,
        device: str = "cpu",
        lens: tuple[int, ...] = LENS,
        seed: int = 8,
    ) -> AttentionInputs:
        """Create inputs of `lens` tokens."""
        sizes = (
            (kind.heads, kind.head_dim),
            (kind.kv_heads, kind.head_dim),
            (kind.kv_heads, kind.value_dim),
        )
        q, k, v = (
            probe(sum(lens), *size, seed=seed + i, device=device).to(dtype)
            for i, size in enumerate(sizes)
        )
        sinks = probe(kind.heads, seed=seed + 3, device=device).to(dtype) if kind.sinks else None
        window = kind.window and min(kind.window, WINDOW)
        scores = ScoreRule(kind.head_dim**-0.5, window, kind.softcap)
        return AttentionInputs(kind=kind, q=q, k=k, v=v, scores=scores, sinks=sinks)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (H, H_kv, D), and D_v if it differs from D."""
        kind = self.kind
        sizes = (kind.heads, kind.kv_heads, kind.head_dim)
        return sizes if kind.value_dim == kind.head_dim else (*sizes, kind.value_dim)

    def name(self, operator: str = "attention") -> str:
        """Return the operator's name with the options of its scores."""
        kind = self.kind
        special = [f"window {kind.window}"] if kind.window else []
        special += [f"softcap {kind.softcap}"] if kind.softcap else []
        special += ["sinks"] if kind.sinks else []
        return f"{operator} with {', '.join(special)}" if special else operator

    def attend(
        self, operators: Operators, layout: AttentionLayout, rows: slice | Tensor | None = None
    ) -> Tensor:
        """Compute the operator for all queries, or for the given rows."""
        q = self.q if rows is None else self.q[rows]
        return operators.attention(q, self.k, self.v, layout, self.scores, self.sinks)

    def of_rank(self, rank: int, ranks: int) -> AttentionInputs:
        """Return the heads of one tensor-parallel rank."""
        q, k, v = (x.chunk(ranks, dim=1)[rank] for x in (self.q, self.k, self.v))
        sinks = None if self.sinks is None else self.sinks.chunk(ranks)[rank]
        return replace(self, q=q, k=k, v=v, sinks=sinks)


def check_attention(operators: Operators, inputs: AttentionInputs) -> Tensor:
    """Attend over the packed sequences, and check that rows keep their bits in smaller calls."""
    name, shape, device = inputs.name(), inputs.shape, inputs.q.device
    whole = AttentionLayout.packed(LENS, device)
    packed = inputs.attend(operators, whole)
    # The last `count` tokens of the longest sequence as queries, the others as a cached prefix.
    for count in QUERY_COUNTS:
        layout = AttentionLayout(
            query_lens=(count,), key_lens=LENS[:1], key_rows=whole.key_rows[:1]
        )
        rows = slice(LENS[0] - count, LENS[0])
        alone = inputs.attend(operators, layout, rows)
        require_equal(name, shape, f"{count} queries alone", alone, packed[rows])
    # One decode step of all the sequences at once.
    ends = torch.tensor(LENS, device=device).cumsum(0)
    layout = AttentionLayout(query_lens=(1,) * len(LENS), key_lens=LENS, key_rows=whole.key_rows)
    decode = inputs.attend(operators, layout, ends - 1)
    require_equal(name, shape, "a decode step", decode, packed[ends - 1])
    return packed


def check_paged_attention(operators: Operators, inputs: AttentionInputs, packed: Tensor) -> Tensor:
    """Prefill from pages of one key; check this and smaller calls against `packed`."""
    q, k, v, device = inputs.q, inputs.k, inputs.v, inputs.q.device
    name, shape = inputs.name("paged_attention"), inputs.shape
    # Reversed, so that no key lies where it does in training.
    pages = len(k) - 1 - AttentionLayout.packed(LENS, device).key_rows
    stores = k.flip(0)[:, None], v.flip(0)[:, None]
    key_lens = torch.tensor(LENS, dtype=torch.int32, device=device)
    ends = key_lens.cumsum(0)

    def attend(counts: tuple[int, ...], case: str) -> Tensor:
        """Attend with the last queries of every sequence."""
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
        out = operators.paged_attention(q[rows], *stores, layout, inputs.scores, sinks=inputs.sinks)
        require_equal(name, shape, case, out, packed[rows])
        return out

    attend((1,) * len(LENS), "a decode step")
    attend(tuple(min(n, 40) for n in LENS), "the last queries of each sequence")
    return attend(LENS, "a prefill")
