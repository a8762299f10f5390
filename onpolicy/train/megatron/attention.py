"""Rotary embedding and attention over packed sequences, on the contract's operators.

Megatron's own rotary embedding moves to the current CUDA device, and its attention without Transformer
Engine supports neither packed sequences nor context parallelism. Ours rotates by Hugging Face's angles,
so that every kind of RoPE scaling works, and gathers keys and values where context-parallel ranks shard
a sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onpolicy.ops import Operators, ScoreRule
from onpolicy.ops.rotary import rotate
from onpolicy.train.megatron.batch import LocalTokens
from onpolicy.train.megatron.collectives import gather_rows
from onpolicy.train.megatron.config import AlignedConfig
from onpolicy.train.megatron.family import is_rotated


class AlignedAttention(nn.Module):
    """Megatron's core attention: from projected heads to weighted values."""

    def __init__(
        self,
        config: AlignedConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        pg_collection: Any,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
    ):
        super().__init__()
        self.config = config
        self.window = config.windows[layer_number - 1]
        self.rotates = is_rotated(config.hf_config, layer_number - 1)
        self.context_group: dist.ProcessGroup = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: LocalTokens,
        **_: Any,
    ) -> Tensor:
        """Attend over this rank's rows: [T, H, D], [T, H_kv, D], [T, H_kv, D] -> [T, H * D]."""
        operators, local = self.config.operators, packed_seq_params
        assert operators is not None and local.angles is not None
        q, k = query, key
        if self.rotates:
            q, k = rotated(operators, q, k, *local.angles)
        k, v = gather_rows(torch.cat((k, value), -1), self.context_group).chunk(2, -1)
        scores = ScoreRule(query.shape[-1] ** -0.5, self.window)
        parts = zip(q.chunk(len(local.layouts)), local.layouts, strict=True)
        return torch.cat([operators.attention(x, k, v, one, scores) for x, one in parts]).flatten(1)


def rotated(
    operators: Operators, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys: [T, H, D], [T, H_kv, D], angles [1, T, D'] twice -> the first two,
    rotated.

    Cases that the operator does not support use transformers' code, as in the rollout
    (`models/rotary.py`).
    """
    q, k = (x.transpose(0, 1)[None] for x in (query, key))
    if cos.shape[-1] == q.shape[-1] and cos.dtype == q.dtype:
        q, k = operators.rotary(q, k, cos, sin)
    else:
        q, k = (_rotated_part(x, cos, sin) for x in (q, k))
    return q[0].transpose(0, 1), k[0].transpose(0, 1)


def _rotated_part(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first D' elements of each head (GLM-4-MoE), by angles in float32 (OLMo-2): [1, H, T,
    D]."""
    size = cos.shape[-1]
    return torch.cat((rotate(x[..., :size], cos, sin).to(x.dtype), x[..., size:]), -1)
