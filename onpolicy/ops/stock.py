"""The operators as PyTorch ships them: fast, and aligned with nothing.

They implement the same interface, so that a run without the true-on-policy contract, a benchmark or
a negative control differs from an aligned one only in the operators.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from onpolicy.ops.base import Operators
from onpolicy.ops.cpu.delta_gradient import delta_gradient
from onpolicy.ops.cpu.delta_rule import delta_rule
from onpolicy.ops.differentiable_delta import DeltaInputs, DeltaWays
from onpolicy.ops.layouts import AttentionLayout, ScoreRule
from onpolicy.ops.row_parallel import RowParallel

ROW_BYTES = 16
"""Number of bytes whose multiple each row of `grouped_mm` must have."""


class StockOperators(Operators):
    """PyTorch's own kernels.

    Attention is one scaled_dot_product_attention per sequence or, for scores that it does not
    support, transformers' eager attention. Creating them sets torch's own number of CPU threads.
    """

    def __init__(self, num_threads: int = 1):
        torch.set_num_threads(num_threads)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def partial_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight).float()

    def row_parallel_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, row_parallel: RowParallel
    ) -> Tensor:
        if row_parallel.ranks == 1:  # all of K is here, so blocks are not needed
            return self.linear(x, weight, bias)
        return super().row_parallel_linear(x, weight, bias, row_parallel)

    def grouped_linear(self, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        # grouped_mm, or its backward pass, rejects other rows; those of a low adapter rank are shorter.
        columns, step = weight.shape[1], ROW_BYTES // x.element_size()
        more_k, more_n = -x.shape[1] % step, -columns % step
        if more_k or more_n:
            x, weight = F.pad(x, (0, more_k)), F.pad(weight, (0, more_k, 0, more_n))
        out = F.grouped_mm(x, weight.transpose(1, 2), offs=offsets[1:].to(torch.int32))
        return out[:, :columns]

    def grouped_partial_linear(self, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        return self.grouped_linear(x, weight, offsets).float()

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scores: ScoreRule
    ) -> Tensor:
        outputs = []
        for queries, keys, rows in zip(
            q.split(layout.query_lens), layout.key_lens, layout.key_rows, strict=True
        ):
            mask = _visible(len(queries), keys, scores.window, q.device)
            parts = (queries, k[rows[:keys]], v[rows[:keys]])
            one_q, one_k, one_v = (x.transpose(0, 1)[None] for x in parts)
            if scores.softcap or scores.sinks is not None:
                out = _eager_attention(one_q, one_k, one_v, mask, scores)
            else:
                out = F.scaled_dot_product_attention(
                    one_q, one_k, one_v, attn_mask=mask, scale=scores.scale, enable_gqa=True
                )
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs)

    def _delta_ways(self, inputs: DeltaInputs) -> DeltaWays:
        how = self.run_pieces, 1
        return partial(delta_rule, *how), partial(delta_gradient, *how), inputs

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, round_last: bool = False) -> Tensor:
        if round_last:
            return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)
        return F.rms_norm(x, weight.shape, weight, eps)

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    def elementwise(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return function(x)

    def softmax(self, x: Tensor) -> Tensor:
        return torch.softmax(x, dim=-1, dtype=torch.float32)

    def log_softmax(self, logits: Tensor, temperature: Tensor) -> Tensor:
        return torch.log_softmax(logits.float() / temperature, dim=-1)


def _visible(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return which keys the last `queries` of `keys` tokens see: bool [queries, keys]."""
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return mask.triu(keys - queries - window + 1) if window else mask


def _eager_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scores: ScoreRule) -> Tensor:
    """Compute [1, H, T, D], [1, H_kv, keys, D], [1, H_kv, keys, D_v] -> [1, H, T, D_v].

    The formula is in `ScoreRule`.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    products = (q @ k.transpose(2, 3) * scores.scale).to(
        torch.promote_types(q.dtype, torch.float32)
    )
    if scores.softcap:
        products = torch.tanh(products / scores.softcap) * scores.softcap
    products = products.masked_fill(~mask, float("-inf"))
    if scores.sinks is not None:
        column = scores.sinks.to(products.dtype).view(1, -1, 1, 1).expand(*products.shape[:3], 1)
        products = torch.cat((products, column), dim=-1)
    weights = torch.softmax(products, dim=-1)[..., : mask.shape[-1]]
    return weights.to(v.dtype) @ v
