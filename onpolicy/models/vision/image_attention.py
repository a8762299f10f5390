"""Attention in which every token of an image sees all of it.

In a vision tower that is all attention. In Gemma-3's decoder the tokens of an image also see all that
came before the image, within the layer's window. Such a query is computed as a decoded token whose
keys are given by their rows, so it needs no other kernel than a decoder's, on any backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from onpolicy.ops import AttentionLayout, Operators, ScoreRule
from onpolicy.ops.shared_rows import SharedRows

VISION_ATTENTION = "onpolicy_vision"
"""The name of the attention function of vision towers."""


def whole_attention(operators: Operators, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Compute attention without a mask, one linear per head: [H, L, D] each -> [H, L, D].

    Scores and their softmax are float32; the weights are rounded to the dtype of `v`.
    """
    heads, length, _ = q.shape
    offsets = torch.arange(heads + 1, device=q.device) * length
    scores = operators.grouped_partial_linear(q.flatten(0, 1), k.contiguous(), offsets) * scale
    weights = operators.softmax(scores).to(v.dtype)
    out = operators.grouped_linear(weights, v.transpose(1, 2).contiguous(), offsets)
    return out.view(heads, length, -1)


def _vision_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None = None,
    **named: Any,
) -> tuple[Tensor, None]:
    """Call it from transformers' attention interface: [1, H, L, D] -> [1, L, H, D]."""
    operators: Any = module.operators
    out = whole_attention(operators, query[0], key[0], value[0], float(named["scaling"]))
    return out.transpose(0, 1)[None], None


AttentionInterface.register(VISION_ATTENTION, _vision_attention)


class ImageBlock(NamedTuple):
    """The tokens of an image in one pass of a decoder."""

    part: int
    """Number of the sequence in the pass."""

    row: int
    """Row of the pass of the image's first token."""

    start: int
    """Position of that token in its sequence."""

    end: int
    """Position after the image's last token."""


KeyRows = Callable[[int, int, int], Tensor]
"""(number of a sequence, first position, last + 1) -> int64 rows of the store of its keys."""


class BlockAttention:
    """The attention of all images of a pass, which layers with the same window share."""

    def __init__(self, blocks: Sequence[ImageBlock], key_rows: KeyRows):
        self._blocks, self._key_rows = blocks, key_rows
        self._layouts: dict[int | None, AttentionLayout] = {}
        rows = [torch.arange(b.row, b.row + b.end - b.start) for b in blocks]
        self._queries = torch.cat(rows)

    def correct(
        self, operators: Operators, out: Tensor, q: Tensor, k: Tensor, v: Tensor, scores: ScoreRule
    ) -> Tensor:
        """Return causal attention `out` [T, H, D_v] with the rows of images computed anew.

        q: [T, H, D]; k, v: the store, [rows, H_kv, D] and [rows, H_kv, D_v].
        """
        rows = self._queries.to(q.device)
        layout = self._layout(scores.window, q.device)
        seeing = ScoreRule(scores.scale, None, scores.softcap, scores.sinks)
        again = operators.attention(q[rows], k, v, layout, seeing)
        return out.index_copy(0, rows, again)

    def _layout(self, window: int | None, device: torch.device) -> AttentionLayout:
        """Return the layout of one query after another, each with all of its keys."""
        if window not in self._layouts:
            keys = [
                self._key_rows(b.part, max(0, at - window + 1) if window else 0, b.end)
                for b in self._blocks
                for at in range(b.start, b.end)
            ]
            shared = SharedRows.of([row for each in keys for row in each.tolist()])
            self._layouts[window] = AttentionLayout(
                query_lens=(1,) * len(keys),
                key_lens=tuple(map(len, keys)),
                key_rows=nn.utils.rnn.pad_sequence(keys, batch_first=True),
                shared_keys=shared,
            ).on(device)
        return self._layouts[window]
