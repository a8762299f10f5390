"""Packed sequences whose shared prefixes are computed once.

Tokens with the same prefix are one row of the model's forward pass: the prompt of a group, or the
common turns of an agent's branches. In attention, a sequence's own tokens are queries over the keys
of its whole path, as a rollout engine computes tokens after a cached prefix. The operators are
row-invariant, so every log-probability keeps its bits. Gradients of shared rows are summed in the
order of the sequences (`ops/shared_rows.py`): mathematically the same, with other bits.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.utils.rnn import pad_sequence

from onpolicy.models.policy import PackedTokens
from onpolicy.models.token_labels import token_labels
from onpolicy.ops import AttentionLayout
from onpolicy.ops.shared_rows import SharedRows


@dataclass(frozen=True, slots=True)
class _Paths:
    """Map from each of T tokens to its row, and from each row to a token."""

    rows: list[int]
    """[T]"""

    firsts: list[int]
    """First token of each row."""

    own: list[int]
    """Number of tokens of each sequence that no earlier sequence shares; they are its last ones."""

    @staticmethod
    def of(labels: Sequence[Hashable], lens: Sequence[int]) -> _Paths:
        """Map the tokens of sequences laid end to end to rows, by their labels (`token_labels`)."""
        paths = _Paths([], [], [])
        known: dict[tuple[int, Hashable], int] = {}
        # A trie of prefixes: a token's row follows from the row before it and the token's label.
        start = 0
        for length in lens:
            row, before = -1, len(paths.firsts)
            for token in range(start, start + length):
                row = known.setdefault((row, labels[token]), len(paths.firsts))
                if row == len(paths.firsts):
                    paths.firsts.append(token)
                paths.rows.append(row)
            paths.own.append(len(paths.firsts) - before)
            start += length
        return paths


def share_prefixes(batch: PackedTokens) -> PackedTokens:
    """Return the same requested tokens with shared prefixes merged, on the CPU: T' <= T rows.

    One row may be requested several times: a prompt's last token, by each of its responses.
    """
    lens = batch.layout.query_lens
    experts = batch.routed_experts
    labels = token_labels(batch.tokens.tolist(), None if experts is None else experts.numpy())
    paths = _Paths.of(labels, lens)
    if len(paths.firsts) == len(paths.rows):
        return batch
    asked = SharedRows.of([paths.rows[i] for i in batch.rows.tolist()])
    rows, firsts = torch.tensor(paths.rows), torch.tensor(paths.firsts)
    return replace(
        batch,
        tokens=batch.tokens[firsts],
        positions=batch.positions[firsts],
        layout=_layout(rows.split(list(lens)), paths.own),
        rows=asked.rows,
        shared_rows=asked,
        routed_experts=None if experts is None else experts[firsts],
    )


def _layout(paths: Sequence[torch.Tensor], own: Sequence[int]) -> AttentionLayout:
    """Build the layout from the rows of each sequence's tokens, of which the last `own` are queries.

    A sequence without tokens of its own has no queries and is left out.
    """
    asked = [(path, count) for path, count in zip(paths, own, strict=True) if count]
    return AttentionLayout(
        query_lens=tuple(count for _, count in asked),
        key_lens=tuple(len(path) for path, _ in asked),
        key_rows=pad_sequence([path for path, _ in asked], batch_first=True),
        shared_keys=SharedRows.of([row for path, _ in asked for row in path.tolist()]),
    )
