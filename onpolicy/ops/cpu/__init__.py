"""The aligned operators on a CPU, for any x86 or Arm machine, float32 and bfloat16."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from onpolicy.ops.base import Operators, Piece
from onpolicy.ops.cpu.attention import attention_backward, attention_with_lse, blockwise_attention
from onpolicy.ops.cpu.delta_gradient import delta_gradient
from onpolicy.ops.cpu.delta_rule import delta_rule, work
from onpolicy.ops.cpu.gemms import COLUMNS, Gemms
from onpolicy.ops.cpu.layout import on_whole_tensors, whole, whole_vectors
from onpolicy.ops.cpu.linear import (
    AlignedLinear,
    grouped_weight_grad,
    linear_gradients,
    tiled_grouped_linear,
    tiled_linear,
)
from onpolicy.ops.cpu.rows import few_rows, few_rows_at_a_time, log_softmax, write_few_at_a_time
from onpolicy.ops.cpu.threads import PiecePool
from onpolicy.ops.differentiable_attention import attend
from onpolicy.ops.differentiable_delta import DeltaInputs, DeltaWays
from onpolicy.ops.layouts import AttentionLayout, ScoreRule
from onpolicy.ops.linears import GroupedLinear
from onpolicy.ops.machine import multiplies_with_amx


class CpuOperators(Operators):
    """Row-invariant operators on a CPU; results do not depend on `num_threads`.

    The gradients of a row of `x`, or of a sequence of q, k and v, are row-invariant too. A weight's
    gradient is a sum over rows, the same for the same rows in the same order. Creating the
    operators sets torch's own number of threads to 1 (see `PiecePool`). `multiplied` is the dtype
    in which bfloat16 products are computed; see `Gemms`.
    """

    column_tile = COLUMNS

    def __init__(self, num_threads: int = 1, multiplied: torch.dtype = torch.float32):
        self.pool = PiecePool(num_threads)
        self.gemms = Gemms(self.pool, multiplied, has_amx=multiplies_with_amx(os.environ))

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._linear(x, weight, bias, x.dtype)

    def partial_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.blockwise_linear(x, weight, 1)

    def blockwise_linear(self, x: Tensor, weight: Tensor, blocks: int) -> Tensor:
        return self._linear(x, weight, None, torch.float32, blocks)

    def linear_gradients(
        self, out: Tensor, x: Tensor, head: Sequence[Tensor], grad: Tensor, sums: Sequence[Tensor]
    ) -> Tensor:
        """Add each tile of the weight's gradient while it is in a core's cache."""
        (weight, *_), (of_weight, *of_bias) = head, sums
        x, weight, grad = whole(x), whole(weight), whole(grad)
        for total in of_bias:
            total += grad.sum(0)
        return linear_gradients(self.gemms, x, weight, grad, of_weight)

    def _linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype,
        blocks: int = 1,
    ) -> Tensor:
        x, weight, bias = whole(x), whole(weight), None if bias is None else whole(bias)
        if torch.is_grad_enabled():
            out: Tensor = AlignedLinear.apply(x, weight, bias, self.gemms, out_dtype, blocks)
            return out
        rows = x.view(-1, x.shape[-1])
        out = tiled_linear(self.gemms, rows, weight, bias, out_dtype, blocks)
        return out.view(*x.shape[:-1], weight.shape[0])

    @on_whole_tensors
    def grouped_linear(self, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        return self._grouped_linear(x, weight, offsets, x.dtype)

    @on_whole_tensors
    def grouped_partial_linear(self, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        return self._grouped_linear(x, weight, offsets, torch.float32)

    def _grouped_linear(
        self, x: Tensor, weight: Tensor, offsets: Tensor, out_dtype: torch.dtype
    ) -> Tensor:
        product = partial(tiled_grouped_linear, self.gemms)
        if torch.is_grad_enabled():
            gradient = partial(grouped_weight_grad, self.gemms)
            out: Tensor = GroupedLinear.apply(product, gradient, x, weight, offsets, out_dtype)
            return out
        return product(x, weight, offsets, out_dtype)

    @on_whole_tensors
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scores: ScoreRule
    ) -> Tensor:
        if not torch.is_grad_enabled():
            return blockwise_attention(self.pool, q, k, v, layout, scores)
        ways = partial(attention_with_lse, self.pool), partial(attention_backward, self.pool)
        return attend(*ways, q, k, v, layout, scores)

    causal_conv = on_whole_tensors(Operators.causal_conv)

    def _delta_ways(self, inputs: DeltaInputs) -> DeltaWays:
        how = self.pool.run, self.pool.threads_for(work(inputs))
        inputs = DeltaInputs(*map(whole, inputs))
        return partial(delta_rule, *how), partial(delta_gradient, *how), inputs

    @on_whole_tensors
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, round_last: bool = False) -> Tensor:
        # transformers' formula. On one thread a row's mean does not depend on the other rows.
        rows = x.float()
        rows = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps)
        return (weight * rows).to(x.dtype) if round_last else weight * rows.to(x.dtype)

    @on_whole_tensors
    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        rows = x.float()
        rows = rows - rows.mean(-1, keepdim=True)
        rows = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps)
        rows = rows if weight is None else weight.float() * rows
        return (rows if bias is None else rows + bias.float()).to(x.dtype)

    add_scaled = on_whole_tensors(Operators.add_scaled)

    @on_whole_tensors
    def elementwise(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return whole_vectors(function, x)

    @on_whole_tensors
    def softmax(self, x: Tensor) -> Tensor:
        return torch.softmax(x, dim=-1, dtype=torch.float32)

    @on_whole_tensors
    def log_softmax(self, logits: Tensor, temperature: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return torch.log_softmax(logits.float() / temperature, dim=-1)
        if len(logits) <= few_rows(logits.shape[1]):
            return log_softmax(logits, temperature)
        out = torch.empty_like(logits, dtype=torch.float32)
        few_rows_at_a_time(self.pool, log_softmax, logits, temperature, out)
        return out

    def gather_log_probs(
        self, logits: Tensor, temperature: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        chosen, entropy = logits.new_empty(2, len(logits), dtype=torch.float32)
        given = logits.contiguous(), temperature, targets
        write_few_at_a_time(self.pool, super().gather_log_probs, given, chosen, entropy)
        return chosen, entropy

    def grad_logits(
        self,
        logits: Tensor,
        temperature: Tensor,
        targets: Tensor,
        grad: Tensor,
        grad_entropy: Tensor | None = None,
    ) -> Tensor:
        given = [logits.contiguous(), temperature, targets, grad]
        given += [] if grad_entropy is None else [grad_entropy]
        out = torch.empty_like(given[0])
        write_few_at_a_time(self.pool, super().grad_logits, given, out)
        return out

    def run_pieces(self, pieces: Sequence[Piece], flops: float) -> None:
        self.pool.run(pieces, flops)

    def sample(self, log_probs: Tensor, uniform: Tensor) -> Tensor:
        out = torch.empty_like(uniform, dtype=torch.int64)
        write_few_at_a_time(self.pool, super().sample, (log_probs, uniform), out)
        return out


class OnednnOperators(CpuOperators):
    """`CpuOperators` that multiply bfloat16 as it is, by oneDNN."""

    def __init__(self, num_threads: int = 1):
        super().__init__(num_threads, torch.bfloat16)
