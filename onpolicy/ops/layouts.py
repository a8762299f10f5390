"""The inputs of attention besides tensors: where queries and keys lie, and how keys are scored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from onpolicy.ops.shared_rows import SharedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayout:
    """The rows of the queries and of the key/value store that belong to each sequence.

    The queries of a sequence are its last `query_lens[s]` tokens; earlier tokens are only keys (a
    cached prefix). Training packs whole sequences, so there both lengths are equal.
    """

    query_lens: tuple[int, ...]
    """Number of query rows of each sequence, in the order in which `q` holds them. Example: (7, 1)"""

    key_lens: tuple[int, ...]
    """Number of keys of each sequence, prefix included. Example: (7, 33)"""

    key_rows: Tensor
    """int64 [S, >= max(key_lens)]: row of the store that holds each key; padding is any valid row."""

    shared_keys: SharedRows | None = None
    """Rows of the keys of all sequences, one sequence after another, where several sequences may
    share a row of the store; its gradient is then a sum over them, in their order."""

    plans: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """Cache of an implementation's plans for this layout, for the model's other layers."""

    @staticmethod
    def packed(lens: tuple[int, ...], device: torch.device | str = "cpu") -> AttentionLayout:
        """Return the layout of whole sequences laid end to end, keys in the same rows as queries."""
        counts = torch.tensor(lens, dtype=torch.int64, device=device)
        starts = counts.cumsum(0) - counts
        rows = starts[:, None] + torch.arange(max(lens, default=0), device=device)
        return AttentionLayout(
            query_lens=lens, key_lens=lens, key_rows=rows.clamp_(max=sum(lens) - 1)
        )

    def on(self, device: torch.device | str) -> AttentionLayout:
        """Return the same layout on a device."""
        shared = self.shared_keys and self.shared_keys.on(device)
        return replace(self, key_rows=self.key_rows.to(device), shared_keys=shared, plans={})

    def by_pages(self) -> PagedLayout:
        """Return this layout with one key per int64 page, cached for all layers of a model."""
        if PagedLayout not in self.plans:
            device = self.key_rows.device
            self.plans[PagedLayout] = PagedLayout(
                page_table=self.key_rows,
                page_size=1,
                key_lens=torch.tensor(self.key_lens, dtype=torch.int32).to(device),
                query_starts=starts_of(self.query_lens).to(device),
                max_query_len=max(self.query_lens),
            )
        layout: PagedLayout = self.plans[PagedLayout]
        return layout


def starts_of(lens: tuple[int, ...]) -> Tensor:
    """Return int32 [S + 1]: the starts of sequences laid end to end, and the end of the last one."""
    return torch.tensor([0, *lens]).cumsum(0, dtype=torch.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedLayout:
    """The layout of a rollout engine: on the device that computes, with keys on pages.

    The host reads none of its tensors, so a CUDA graph can hold it. S: sequences.
    """

    page_table: Tensor
    """int32 [S, >= pages]: page of the store that holds each run of `page_size` keys; padding is any
    valid page."""

    page_size: int

    key_lens: Tensor
    """int32 [S]: keys of each sequence, including its queries' own."""

    query_starts: Tensor
    """int32 [S + 1]: first query row of each sequence; its queries are its last tokens."""

    max_query_len: int
    """Upper bound on the queries of a sequence; sets the grids of kernels."""

    schedule: Mapping[str, Any] = field(default_factory=dict)
    """Metadata that the engine computed for one backend's kernel, under that kernel's names. It may
    affect scheduling, never a bit."""

    plans: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """Cache of plans, as in `AttentionLayout`."""

    def by_rows(self) -> AttentionLayout:
        """Return this layout with one key per row, for all layers of a model; waits for the device."""
        if AttentionLayout not in self.plans:
            offsets = torch.arange(self.page_size, device=self.page_table.device)
            rows = self.page_table[..., None].long() * self.page_size + offsets
            self.plans[AttentionLayout] = AttentionLayout(
                query_lens=tuple(self.query_starts.diff().tolist()),
                key_lens=tuple(self.key_lens.tolist()),
                key_rows=rows.flatten(1),
            )
        layout: AttentionLayout = self.plans[AttentionLayout]
        return layout


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """The rule by which a layer of attention scores the keys that a query sees.

    The key at position j of a sequence has, for the query at position i, the score

        s_ij = softcap * tanh(scale * (q_i . k_j) / softcap)    (without a softcap: scale * (q_i . k_j))

    and i sees j where 0 <= i - j < window. Scores, their softmax and the sums over keys are
    float32. Sources: transformers' masking_utils.sliding_window_overlay; eager_attention_forward of
    transformers/models/gemma2/modeling_gemma2.py, which also caps before it masks.
    """

    scale: float

    window: int | None = None
    """Maximum number of keys that a query sees, including its own; None: all up to its own."""

    softcap: float | None = None
    """Bound on the scores' absolute value, greater than 0; None: no cap."""

    sinks: Tensor | None = field(default=None, compare=False)
    """[H] of any dtype, a further score per head, for a key whose value is 0: the weights are
    exp(s_ij) / (exp(sink) + sum_j exp(s_ij)). (As in
    transformers/models/gpt_oss/modeling_gpt_oss.py, which rounds scores to the model's dtype before
    the softmax; here they are float32.)"""
