"""The interface of the aligned operators: what both engines must compute to the same bits.

An implementation promises *row invariance*: a row of the result depends on the same row of the input
alone, not on how many rows share the call, their order, their padding, how a sequence was cut into
chunks or found in a cache, or how many threads ran. So a token's log-probability is the same in a batch
of decoding requests and in a packed training micro-batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from onpolicy.ops.layouts import AttentionLayout, PagedLayout, ScoreRule
from onpolicy.ops.logit_chunks import CPU_LOGITS, rows_of_logits
from onpolicy.ops.rotary import rotate
from onpolicy.ops.row_parallel import RowParallel, tree_sum
from onpolicy.ops.uniform_numbers import uniform_numbers

Piece = Callable[[], None]
"""Work that depends on no other piece."""


class Operators(ABC):
    """The operators whose bits the two engines share. T: packed tokens, H: heads, D: head dim."""

    column_tile: int | None = None
    """Output columns that one GEMM computes, if `linear` always cuts them so; None if it does not."""

    logits_per_chunk: int = CPU_LOGITS
    """See `rows_per_chunk`."""

    @property
    def of_rounded(self) -> Operators:
        """Those of linears whose inputs and weights are both rounded (`models/rounded_inputs.py`)."""
        return self

    def hold(self, weights: Iterable[Tensor]) -> None:
        """Make now what `linear` makes of these weights in every call; and again when they changed."""

    @abstractmethod
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias`: [..., K], [N, K], [N] -> [..., N], in the dtype of `x`."""

    @abstractmethod
    def partial_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x @ weight.T`, not rounded: [..., K], [N, K] -> float32 [..., N].

        The part of a longer sum over K; see `row_parallel_linear`.
        """

    def linear_gradients(
        self, out: Tensor, x: Tensor, head: Sequence[Tensor], grad: Tensor, sums: Sequence[Tensor]
    ) -> Tensor:
        """The gradient of x in `out = linear(x, *head)`; those of the head are added to `sums`.

        x: [M, K]; head: weight [N, K] and perhaps bias [N]; grad: [M, N]; sums: float32, of the
        head's shapes -> as x. What is added may have been rounded to the head's dtype.
        """
        of_x, *of_head = torch.autograd.grad(out, (x, *head), grad)
        for total, part in zip(sums, of_head, strict=True):
            total += part
        return of_x

    @classmethod
    def rows_per_chunk(cls, vocab_size: int) -> int:
        """Tokens whose logits are alive at a time in training; decides no bit of a log-probability."""
        return rows_of_logits(cls.logits_per_chunk, vocab_size)

    def blockwise_linear(self, x: Tensor, weight: Tensor, blocks: int) -> Tensor:
        """`partial_linear` of equal blocks of K, a power of two, added along a binary tree."""
        pairs = zip(x.chunk(blocks, -1), weight.chunk(blocks, -1), strict=True)
        return tree_sum([self.partial_linear(*pair) for pair in pairs])

    def row_parallel_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, row_parallel: RowParallel
    ) -> Tensor:
        """`linear`, summed over K in a way that does not depend on the tensor-parallel degree.

        x: [..., K / P], weight: [N, K / P] of P tensor-parallel ranks; bias [N] -> [..., N].
        """
        if row_parallel.blocks == 1:
            return self.linear(x, weight, bias)
        blocks = row_parallel.blocks_of(x.shape[-1])
        total = row_parallel.sum([self.blockwise_linear(x, weight, blocks)])
        return (total if bias is None else total + bias.float()).to(x.dtype)

    def add_scaled(self, out: Tensor, added: Tensor, scale: float) -> Tensor:
        """Return `out + scale * added`, summed in float32 and rounded to the dtype of out: [..., N]
        each."""
        return (out.float() + added.float() * scale).to(out.dtype)

    @abstractmethod
    def grouped_linear(self, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        """One linear per expert: [S, K], [E, N, K], int64 [E + 1] -> [S, N] in the dtype of `x`.

        Rows `offsets[e]` to `offsets[e + 1]` of `x` belong to expert e; the rest is as in `linear`.
        """

    @abstractmethod
    def grouped_partial_linear(self, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        """`grouped_linear`, not rounded: [S, K], [E, N, K], int64 [E + 1] -> float32 [S, N]."""

    def mix_few(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate: Callable[[Tensor], Tensor],
    ) -> Tensor | None:
        """What `ops.experts.mix_experts` gives, in fewer kernels; None if there is no such way
        here.

        x: [T, H]; experts: int64 [T, k]; weights: [T, k]; gate_up: [E, 2 I, H]; down: [E, H, I],
        both whole; gate: [T k, 2 I] -> [T k, I]. Return [T, H]; no autograd.
        """
        return None

    @abstractmethod
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: AttentionLayout,
        scores: ScoreRule,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention over the sequences of `layout`.

        q: [T, H, D]; k: [rows, H_kv, D] and v: [rows, H_kv, D_v], the key/value store; D_v may be
        another than D. sinks: [H] of any dtype, one more score per head in the softmax, of a key
        whose value is 0: weights are exp(s_ij) / (exp(sink) + sum_j exp(s_ij)). (As in
        transformers/models/gpt_oss/modeling_gpt_oss.py, which rounds scores to the model's dtype before
        the softmax; here they are float32.)
        Returns [T, H, D_v] in the dtype of `q`; sums are taken in float32. Gradients flow to q, k, v
        and sinks where no key row is used twice, as in packed sequences, or with `layout.shared_keys`.
        """

    def paged_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: PagedLayout,
        scores: ScoreRule,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """`attention` over a rollout engine's pages, to the same bits; no autograd.

        q: [T, H, D]; k: [pages, page size, H_kv, D] and v: [pages, page size, H_kv, D_v].
        Return [T, H, D_v], which is `out` if that is given.
        """
        with torch.no_grad():
            stores = k.flatten(0, 1), v.flatten(0, 1)
            result = self.attention(q, *stores, layout.by_rows(), scores, sinks)
        return result if out is None else out.copy_(result)

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, round_last: bool = False) -> Tensor:
        """`weight * (x / rms(x))`, the quotient rounded to x's dtype first: [..., D] -> [..., D].

        With `round_last` only the product is rounded to it, and `weight` may be float32 as well.
        """

    @abstractmethod
    def layer_norm(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        """`weight * ((x - mean(x)) / std(x)) + bias` in float32, then rounded: [..., D] -> [..., D].

        weight, bias: [D]; left out if they are None.
        """

    @abstractmethod
    def elementwise(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """`function(x)` of an activation function that maps every element by itself."""

    def gated(self, activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
        """`activation(gate) * up`, the activation rounded to its dtype first: [..., I] -> [..., I]."""
        return self.elementwise(activation, gate) * up

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """transformers' `apply_rotary_pos_emb`, every product and sum rounded to the dtype of `q`.

        q: [B, H, T, D], k: [B, H_kv, T, D], cos and sin: [B, T, D] -> q and k, rotated.
        """
        return rotate(q, cos, sin), rotate(k, cos, sin)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, round_last: bool = False
    ) -> tuple[Tensor, Tensor]:
        """`residual + x` and its `rms_norm`: [..., D] -> [..., D] each; no autograd."""
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
        """`rotary` of the `rms_norm` of every head; no autograd.

        Shapes as in `rotary`, with B = 1; weights: [D] of queries and of keys, and what they give has
        the dtype of `q`.
        """
        of_q, of_k = weights
        q, k = self.rms_norm(q, of_q, eps, round_last), self.rms_norm(k, of_k, eps, round_last)
        return self.rotary(q, k, cos, sin)

    @abstractmethod
    def softmax(self, x: Tensor) -> Tensor:
        """Softmax over the last axis in float32, as routers use it: [..., E] -> float32 [..., E]."""

    def topk(self, probabilities: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k largest of every row, largest first: [M, E] -> values [M, k], int64 indices [M, k]."""
        values, indices = torch.topk(probabilities, k, dim=-1)
        return values, indices

    @abstractmethod
    def log_softmax(self, logits: Tensor, temperature: Tensor) -> Tensor:
        """`log_softmax(float32(logits) / temperature)`: [M, V], float32 [M, 1] -> float32 [M, V]."""

    def gather_log_probs(
        self, logits: Tensor, temperature: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`log_softmax` at `targets`, the same bits, and the entropy in nats; no autograd.

        logits: [M, V]; temperature: float32 [M, 1]; targets: int64 [M] -> float32 [M], float32 [M].
        """
        log_probs = self.log_softmax(logits, temperature)
        chosen = log_probs.gather(1, targets[:, None])[:, 0]
        return chosen, -(self.elementwise(torch.exp, log_probs) * log_probs).sum(-1)

    def grad_logits(
        self,
        logits: Tensor,
        temperature: Tensor,
        targets: Tensor,
        grad: Tensor,
        grad_entropy: Tensor | None = None,
    ) -> Tensor:
        """The gradient of `(grad * log_probs + grad_entropy * entropy).sum()`, of what
        `gather_log_probs` returns, or of the former alone: [M, V] in the dtype of `logits`.
        """
        log_probs = self.log_softmax(logits, temperature)
        probabilities = self.elementwise(torch.exp, log_probs)
        scale = grad[:, None] / temperature
        if grad_entropy is None:
            out = probabilities.mul_(-scale)
        else:
            entropy = -(probabilities * log_probs).sum(-1, keepdim=True)
            slope = log_probs.add_(entropy).mul_(grad_entropy[:, None] / temperature)
            out = probabilities.mul_(slope.add_(scale).neg_())
        return out.scatter_add_(1, targets[:, None], scale).to(logits.dtype)

    def run_pieces(self, pieces: Sequence[Piece], flops: float) -> None:
        """Run what a trainer computes beside the operators, on their threads if they have some."""
        for piece in pieces:
            piece()

    def sample(self, log_probs: Tensor, uniform: Tensor) -> Tensor:
        """One token a row, by inverting the cumulative distribution; sums in float64.

        log_probs: float32 [B, V]; uniform: float64 [B] in [0, 1) -> int64 [B]: the first token
        whose cumulative probability exceeds `uniform` times the total.
        """
        cumulative = self.elementwise(torch.exp, log_probs.double()).cumsum(-1)
        threshold = uniform[:, None] * cumulative[:, -1:]
        return (cumulative <= threshold).sum(-1).clamp_(max=log_probs.shape[-1] - 1)

    def uniform(self, seeds: Tensor, positions: Tensor) -> Tensor:
        """Uniform numbers in [0, 1), by two rounds of SplitMix64: the same bits from every backend.

        seeds, positions: int64 [B] -> float64 [B].
        """
        return uniform_numbers(seeds, positions)
