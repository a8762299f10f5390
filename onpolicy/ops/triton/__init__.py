"""The aligned operators in Triton, for GPUs from Ampere (8.0) to Hopper (9.0).

Every kernel sums a row in one order, whatever else is in the call; its module says why. Nothing
here waits for the device, and no grid depends on a tensor's contents, so that CUDA graphs can hold
every operator. Element-wise functions are PyTorch's, whose GPU kernels run the same code for an
element wherever it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from onpolicy.ops.cpu.delta_gradient import delta_gradient
from onpolicy.ops.differentiable_attention import attend
from onpolicy.ops.differentiable_delta import DeltaInputs, DeltaWays
from onpolicy.ops.layouts import AttentionLayout, PagedLayout, ScoreRule
from onpolicy.ops.linears import GroupedLinear, Linears
from onpolicy.ops.logit_chunks import GPU_LOGITS
from onpolicy.ops.recurrence import RecurrentLayout
from onpolicy.ops.triton import attention as attentions
from onpolicy.ops.triton import experts, fused_norms, log_probs, mixing, sampling
from onpolicy.ops.triton.attention import packed_attention
from onpolicy.ops.triton.attention_backward import attention_backward
from onpolicy.ops.triton.causal_conv import causal_conv
from onpolicy.ops.triton.delta_rule import DeviceLayout, blockwise_delta_rule
from onpolicy.ops.triton.elementwise import TritonRotary, TritonSiluAndMul, is_silu
from onpolicy.ops.triton.experts import grouped_weight_grad, tiled_grouped_linear
from onpolicy.ops.triton.linear import product_in_float32, tiled_linear
from onpolicy.ops.triton.norm import TritonNorm


class TritonOperators(Linears):
    """Row-invariant operators on a GPU, for float32, bfloat16 and float16."""

    logits_per_chunk = GPU_LOGITS

    def _product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype, blocks: int
    ) -> Tensor:
        return tiled_linear(x, weight, bias, out_dtype, blocks)

    def linear_gradients(
        self, out: Tensor, x: Tensor, head: Sequence[Tensor], grad: Tensor, sums: Sequence[Tensor]
    ) -> Tensor:
        """Add the head's gradients in float32, for the sum over calls."""
        weight, *_ = head
        grad = grad.to(x.dtype)
        of_weight, *of_bias = sums
        of_weight += product_in_float32(grad.t(), x)
        for total in of_bias:
            total += grad.sum(0, dtype=torch.float32)
        return grad @ weight

    def grouped_linear(self, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        return _grouped_linear(x, weight, offsets, x.dtype)

    def grouped_partial_linear(self, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        return _grouped_linear(x, weight, offsets, torch.float32)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scores: ScoreRule
    ) -> Tensor:
        return attend(packed_attention, attention_backward, q, k, v, layout, scores)

    def paged_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: PagedLayout,
        scores: ScoreRule,
        out: Tensor | None = None,
    ) -> Tensor:
        stores = k.flatten(0, 1), v.flatten(0, 1)
        result, _ = attentions.blockwise_attention(q, *stores, layout, scores)
        return result if out is None else out.copy_(result)

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layout: RecurrentLayout,
        states: Tensor | None = None,
    ) -> Tensor:
        if states is None and torch.is_grad_enabled():
            return super().causal_conv(x, weight, bias, layout)  # the same bits
        return causal_conv(x, weight, bias, DeviceLayout.of(layout, x.device), states)

    def _delta_ways(self, inputs: DeltaInputs) -> DeltaWays:
        return blockwise_delta_rule, partial(delta_gradient, self.run_pieces, 1), inputs

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, round_last: bool = False) -> Tensor:
        out: Tensor = TritonNorm.apply(x, weight, None, eps, round_last)
        return out

    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        weight = x.new_ones(x.shape[-1]) if weight is None else weight
        bias = torch.zeros_like(weight) if bias is None else bias
        out: Tensor = TritonNorm.apply(x, weight, bias, eps, True)
        return out

    def elementwise(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return function(x)

    def gated(self, activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
        if is_silu(activation):
            out: Tensor = TritonSiluAndMul.apply(gate, up)
            return out
        return super().gated(activation, gate, up)

    add_rms_norm = staticmethod(fused_norms.add_rms_norm)
    gather_log_probs = staticmethod(log_probs.gather_log_probs)
    grad_logits = staticmethod(log_probs.grad_logits)
    log_softmax = staticmethod(log_probs.TritonLogSoftmax.apply)
    mix_few = staticmethod(mixing.mix_few)
    norm_rotary = staticmethod(fused_norms.norm_rotary)
    rotary = staticmethod(TritonRotary.apply)
    sample = staticmethod(sampling.sample)
    softmax = staticmethod(log_probs.TritonSoftmax.apply)
    topk = staticmethod(experts.topk)
    uniform = staticmethod(sampling.uniform)


def _grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor, out_dtype: torch.dtype) -> Tensor:
    if torch.is_grad_enabled():
        ways = tiled_grouped_linear, grouped_weight_grad
        out: Tensor = GroupedLinear.apply(*ways, x, weight, offsets, out_dtype)
        return out
    return tiled_grouped_linear(x, weight, offsets, out_dtype)
