"""The interface of the aligned operators, which both engines compute to the same bits.

An implementation promises *row invariance*: a row of the result depends only on the same row of the
input. It does not depend on how many rows share the call, their order, their padding, how a
sequence was cut into chunks or found in a cache, or how many threads ran. So a token's
log-probability is the same in a batch of decoding requests and in a packed training micro-batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from onpolicy.contract import ATTENTION_CHUNK
from onpolicy.errors import ContractError
from onpolicy.ops.differentiable_delta import DeltaInputs, DeltaWays, gated_delta
from onpolicy.ops.layouts import AttentionLayout, PagedLayout, ScoreRule
from onpolicy.ops.logit_chunks import CPU_LOGITS, rows_of_logits
from onpolicy.ops.recurrence import RecurrentLayout, causal_conv
from onpolicy.ops.row_parallel import RowParallel, tree_sum
from onpolicy.ops.uniform_numbers import uniform_numbers

Piece = Callable[[], None]
"""Work that does not depend on any other piece."""


class Operators(ABC):
    """The operators whose bits the two engines share. T: packed tokens, H: heads, D: head dim."""

    column_tile: int | None = None
    """Number of output columns of one GEMM, if `linear` always tiles them; None if it does not."""

    key_chunk: int = ATTENTION_CHUNK
    """Number of keys that attention sums as one chunk."""

    logits_per_chunk: int = CPU_LOGITS
    """Number of logits per chunk; see `rows_per_chunk`."""

    @property
    def of_rounded(self) -> Operators:
        """Return the operators for rounded inputs and weights (`models/rounded_inputs.py`)."""
        return self

    def hold(self, weights: Iterable[Tensor]) -> None:
        """Precompute what `linear` derives from these weights; call it again when they changed."""

    @abstractmethod
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute `x @ weight.T + bias`: [..., K], [N, K], [N] -> [..., N], in the dtype of `x`."""

    @abstractmethod
    def partial_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute `x @ weight.T` without rounding: [..., K], [N, K] -> float32 [..., N].

        It is one part of a longer sum over K; see `row_parallel_linear`.
        """

    def linear_gradients(
        self, out: Tensor, x: Tensor, head: Sequence[Tensor], grad: Tensor, sums: Sequence[Tensor]
    ) -> Tensor:
        """Return the gradient of x in `out = linear(x, *head)`; add the head's gradients to `sums`.

        x: [M, K]; head: weight [N, K] and optionally bias [N]; grad: [M, N]; sums: float32, with
        the head's shapes -> as x. Addends may have been rounded to the head's dtype.
        """
        of_x, *of_head = torch.autograd.grad(out, (x, *head), grad)
        for total, part in zip(sums, of_head, strict=True):
            total += part
        return of_x

    @classmethod
    def rows_per_chunk(cls, vocab_size: int) -> int:
        """Return how many tokens' logits training holds at a time; it changes no bit."""
        return rows_of_logits(cls.logits_per_chunk, vocab_size)

    def blockwise_linear(self, x: Tensor, weight: Tensor, blocks: int) -> Tensor:
        """Compute `partial_linear` of equal blocks of K, a power of two, added along a binary tree."""
        pairs = zip(x.chunk(blocks, -1), weight.chunk(blocks, -1), strict=True)
        return tree_sum([self.partial_linear(*pair) for pair in pairs])

    def row_parallel_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, row_parallel: RowParallel
    ) -> Tensor:
        """Compute `linear`, summed over K in an order independent of the tensor-parallel degree.

        x: [..., K / P], weight: [N, K / P] of P tensor-parallel ranks; bias [N] -> [..., N].
        """
        if row_parallel.blocks == 1:
            return self.linear(x, weight, bias)
        blocks = row_parallel.blocks_of(x.shape[-1])
        total = row_parallel.sum([self.blockwise_linear(x, weight, blocks)])
        return (total if bias is None else total + bias.float()).to(x.dtype)

    def add_scaled(self, out: Tensor, added: Tensor, scale: float) -> Tensor:
        """Return `out + scale * added`, [..., N], summed in float32 and rounded to the dtype of out."""
        return (out.float() + added.float() * scale).to(out.dtype)

    @abstractmethod
    def grouped_linear(self, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        """Compute one linear per expert: [S, K], [E, N, K], int64 [E + 1] -> [S, N], as x's dtype.

        Rows `offsets[e]` to `offsets[e + 1]` of `x` belong to expert e; otherwise it is `linear`.
        """

    @abstractmethod
    def grouped_partial_linear(self, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        """Compute `grouped_linear` unrounded: [S, K], [E, N, K], int64 [E + 1] -> float32 [S, N]."""

    def mix_few(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate: Callable[[Tensor], Tensor],
    ) -> Tensor | None:
        """Compute `ops.experts.mix_experts` in fewer kernels; return None if this is not supported.

        x: [T, H]; experts: int64 [T, k]; weights: [T, k]; gate_up: [E, 2 I, H]; down: [E, H, I],
        both whole; gate: [T k, 2 I] -> [T k, I]. The result is [T, H]; no autograd.
        """
        return None

    @abstractmethod
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scores: ScoreRule
    ) -> Tensor:
        """Compute causal attention over the sequences of `layout`.

        q: [T, H, D]; k: [rows, H_kv, D] and v: [rows, H_kv, D_v], the key/value store; D_v may
        differ from D.
        Return [T, H, D_v] in the dtype of `q`; sums are float32. Gradients flow to q, k, v and the
        sinks where no key row is used twice, as in packed sequences, or with `layout.shared_keys`.
        """

    def paged_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: PagedLayout,
        scores: ScoreRule,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute `attention` over a rollout engine's pages, to the same bits; no autograd.

        q: [T, H, D]; k: [pages, page size, H_kv, D] and v: [pages, page size, H_kv, D_v].
        Return [T, H, D_v], which is `out` if that is given.
        """
        with torch.no_grad():
            stores = k.flatten(0, 1), v.flatten(0, 1)
            result = self.attention(q, *stores, layout.by_rows(), scores)
        return result if out is None else out.copy_(result)

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layout: RecurrentLayout,
        states: Tensor | None = None,
    ) -> Tensor:
        """Convolve every channel over its last K inputs: [T, C], [C, K], [C] or None -> [T, C].

        Products are added in float32, the oldest input's first and the bias last, and rounded to
        x's dtype. states: [slots, K - 1, C] of x's dtype, the inputs before the new ones; it then
        holds the last ones, and there is no autograd.
        """
        return causal_conv(x, weight, bias, layout, states)

    def gated_delta(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        layout: RecurrentLayout,
        states: Tensor | None = None,
    ) -> Tensor:
        """Compute the gated delta rule of `ops/recurrence.py` over the sequences of `layout`.

        q, k: [T, H_k, D], of which consecutive H_v / H_k value heads share one; v: [T, H_v, D_v];
        g, the logarithm of the decay, at most 0: float32 [T, H_v]; beta: [T, H_v]. Return [T, H_v,
        D_v] in the dtype of `v`; all sums are float32. states: float32 [slots, H_v, R, D_v] with R =
        `state_rows(D, D_v)`; it then holds the new states, and there is no autograd. Without it,
        gradients flow to q, k, v, g and beta.

        Raise ContractError if these operators have no kernel for it.
        """
        return gated_delta(self._delta_ways(DeltaInputs(q, k, v, g, beta)), layout, states)

    def _delta_ways(self, inputs: DeltaInputs) -> DeltaWays:
        """Return how these operators compute the rule; see `gated_delta`."""
        raise ContractError(
            f"{type(self).__name__}: has no gated delta rule, which layers of linear attention "
            "need. Give --operators cpu, or choose another checkpoint."
        )

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, round_last: bool = False) -> Tensor:
        """Compute `weight * (x / rms(x))`, rounding the quotient to x's dtype: [..., D] -> [..., D].

        With `round_last` only the product is rounded, and `weight` may be float32 as well.
        """

    @abstractmethod
    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        """Compute `weight * ((x - mean(x)) / std(x)) + bias` in float32, then round: [..., D].

        weight, bias: [D]; left out if they are None.
        """

    @abstractmethod
    def elementwise(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Apply an activation function that maps every element by itself."""

    def gated(self, activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
        """Compute `activation(gate) * up`, rounding the activation first: [..., I] -> [..., I]."""
        return self.elementwise(activation, gate) * up

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Compute transformers' `apply_rotary_pos_emb`, every product and sum rounded to q's dtype.

        q: [B, H, T, D], k: [B, H_kv, T, D], cos and sin: [B, T, D] -> q and k, rotated.
        """
        return rotate(q, cos, sin), rotate(k, cos, sin)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, round_last: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return `residual + x` and its `rms_norm`: [..., D] -> [..., D] each; no autograd."""
        total = residual + x
        return total, self.rms_norm(total, weight, eps, round_last)

    def norm_rotary(
        self,
        q: Tensor,
        k: Tensor,
        weights: tuple[Tensor, Tensor],
        cos: Tensor,
        sin: Tensor,
        eps: float,
        round_last: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Apply `rotary` to the `rms_norm` of every head; no autograd.

        The shapes are those in `rotary`, with B = 1; weights: [D] of queries and of keys. The
        norms' results have the dtype of `q`.
        """
        of_q, of_k = weights
        q, k = self.rms_norm(q, of_q, eps, round_last), self.rms_norm(k, of_k, eps, round_last)
        return self.rotary(q, k, cos, sin)

    @abstractmethod
    def softmax(self, x: Tensor) -> Tensor:
        """Compute the softmax over the last axis, for routers: [..., E] -> float32 [..., E]."""

    def topk(self, probabilities: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest of each row, sorted: [M, E] -> values [M, k], int64 indices [M, k]."""
        values, indices = torch.topk(probabilities, k, dim=-1)
        return values, indices

    @abstractmethod
    def log_softmax(self, logits: Tensor, temperature: Tensor) -> Tensor:
        """Compute `log_softmax(float32(logits) / temperature)`: [M, V], [M, 1] -> float32 [M, V]."""

    def gather_log_probs(
        self, logits: Tensor, temperature: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return `log_softmax` at `targets`, the same bits, and the entropy in nats; no autograd.

        logits: [M, V]; temperature: float32 [M, 1]; targets: int64 [M] -> float32 [M], float32 [M].
        """
        log_probs = self.log_softmax(logits, temperature)
        chosen = log_probs.gather(1, targets[:, None])[:, 0]
        terms = self.elementwise(torch.exp, log_probs).mul_(log_probs)
        return chosen, -terms.sum(-1)

    def grad_logits(
        self,
        logits: Tensor,
        temperature: Tensor,
        targets: Tensor,
        grad: Tensor,
        grad_entropy: Tensor | None = None,
    ) -> Tensor:
        """Return the gradient of `(grad * log_probs + grad_entropy * entropy).sum()` by the logits.

        log_probs and entropy are the results of `gather_log_probs`; without grad_entropy the second
        term is left out. The gradient is [M, V] in the dtype of `logits`.
        """
        log_probs = self.log_softmax(logits, temperature)
        scale = grad[:, None] / temperature
        if grad_entropy is None:  # in place, for the caches
            out = self.elementwise(torch.exp_, log_probs).mul_(-scale)
        else:
            probabilities = self.elementwise(torch.exp, log_probs)
            entropy = -(probabilities * log_probs).sum(-1, keepdim=True)
            slope = log_probs.add_(entropy).mul_(grad_entropy[:, None] / temperature)
            out = probabilities.mul_(slope.add_(scale).neg_())
        return out.scatter_add_(1, targets[:, None], scale).to(logits.dtype)

    def run_pieces(self, pieces: Sequence[Piece], flops: float) -> None:
        """Run pieces of trainer work, on the operators' threads if they have any."""
        for piece in pieces:
            piece()

    def sample(self, log_probs: Tensor, uniform: Tensor) -> Tensor:
        """Sample one token per row by inverting the cumulative distribution; sums are float64.

        log_probs: float32 [B, V]; uniform: float64 [B] in [0, 1) -> int64 [B]: the first token
        whose cumulative probability exceeds `uniform` times the total.
        """
        cumulative = self.elementwise(torch.exp, log_probs.double()).cumsum(-1)
        threshold = uniform[:, None] * cumulative[:, -1:]
        return (cumulative <= threshold).sum(-1).clamp_(max=log_probs.shape[-1] - 1)

    def uniform(self, seeds: Tensor, positions: Tensor) -> Tensor:
        """Return uniform numbers in [0, 1) by two rounds of SplitMix64, the same bits in every backend.

        seeds, positions: int64 [B] -> float64 [B].
        """
        return uniform_numbers(seeds, positions)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply transformers' rotary embedding: [B, H, T, D], [B, T, D], [B, T, D] -> [B, H, T, D]."""
    return x * cos[:, None] + _rotate_half(x) * sin[:, None]


def _rotate_half(x: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((-right, left), dim=-1)
