"""The operators as PyTorch ships them: fast where it is fast, aligned with nothing.

They stand behind the same interface so that a run without the true-on-policy contract, a benchmark
or a negative control differs from an aligned one in the operators alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from onpolicy.ops.base import AttentionLayout, Operators
from onpolicy.ops.row_parallel import RowParallel


class StockOperators(Operators):
    """PyTorch's own kernels; attention is one scaled_dot_product_attention per sequence.

    Creating them sets torch's own number of CPU threads.
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
        if row_parallel.ranks == 1:  # all of K is here, and no block needs to be a sum of its own
            return self.linear(x, weight, bias)
        return super().row_parallel_linear(x, weight, bias, row_parallel)

    def grouped_linear(self, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        return F.grouped_mm(x, weight.transpose(1, 2), offs=offsets[1:].to(torch.int32))

    def grouped_partial_linear(self, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        return self.grouped_linear(x, weight, offsets).float()

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scale: float
    ) -> Tensor:
        outputs = []
        for queries, keys, rows in zip(
            q.split(layout.query_lens), layout.key_lens, layout.key_rows, strict=True
        ):
            mask = torch.ones(len(queries), keys, dtype=torch.bool, device=q.device)
            out = F.scaled_dot_product_attention(
                queries.transpose(0, 1)[None],
                k[rows[:keys]].transpose(0, 1)[None],
                v[rows[:keys]].transpose(0, 1)[None],
                attn_mask=mask.tril(keys - len(queries)),
                scale=scale,
                enable_gqa=True,
            )
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs)

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
