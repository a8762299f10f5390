"""Numbers to try a kind of attention with, in the checks at start-up."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from onpolicy.contract import AttentionShape
from onpolicy.ops.base import Operators
from onpolicy.ops.checks.probe import probe
from onpolicy.ops.layouts import AttentionLayout, ScoreRule

LENS = (530, 1, 64, 65, 17)
"""Tokens of the packed sequences that the checks attend over; one has several chunks of keys."""

WINDOW = 100
"""Keys that a query sees at most where the model's window is longer: less than the longest sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionInputs:
    """Whole sequences laid end to end, and how a layer of this kind attends over them."""

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
        """Inputs of `lens` tokens."""
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
        """(H, H_kv, D), and D_v if that is another."""
        kind = self.kind
        sizes = (kind.heads, kind.kv_heads, kind.head_dim)
        return sizes if kind.value_dim == kind.head_dim else (*sizes, kind.value_dim)

    def name(self, operator: str = "attention") -> str:
        """The operator and what is special about its scores."""
        kind = self.kind
        special = [f"window {kind.window}"] if kind.window else []
        special += [f"softcap {kind.softcap}"] if kind.softcap else []
        special += ["sinks"] if kind.sinks else []
        return f"{operator} with {', '.join(special)}" if special else operator

    def attend(
        self, operators: Operators, layout: AttentionLayout, rows: slice | Tensor | None = None
    ) -> Tensor:
        """The operator's result for all queries, or for those of some rows."""
        q = self.q if rows is None else self.q[rows]
        return operators.attention(q, self.k, self.v, layout, self.scores, self.sinks)

    def of_rank(self, rank: int, ranks: int) -> AttentionInputs:
        """The heads that one of some tensor-parallel ranks has."""
        q, k, v = (x.chunk(ranks, dim=1)[rank] for x in (self.q, self.k, self.v))
        sinks = None if self.sinks is None else self.sinks.chunk(ranks)[rank]
        return replace(self, q=q, k=k, v=v, sinks=sinks)
