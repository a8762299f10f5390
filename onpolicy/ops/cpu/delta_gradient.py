"""The gradient of the gated delta rule on a CPU, a chunk at a time, from the last to the first.

With the names of `ops/recurrence.py`, W_ij = exp(G_i - G_j), A_ij = beta_i W_ij (k_i . k_j) for j < i
and P_ij = W_ij (q_i . k_j) for j <= i, a chunk computes

    (1 + A) U = R = beta (V - exp(G) K S)        O = exp(G) Q S + P U
    S' = exp(G_C) S + (exp(G_C - G) K)^T U

and every gradient follows from those of O and S' by these three lines. States are computed again
first, by the same lines: their last bits need not be those of the forward pass, which follows its
tokens one by one. All matrices are of whole chunks, so a sequence's gradients depend on no other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from onpolicy.contract import DELTA_CHUNK
from onpolicy.ops.cpu.delta_rule import Run, exp, heads_apart, per_value_head, products, work
from onpolicy.ops.differentiable_delta import DeltaInputs
from onpolicy.ops.recurrence import NORM_EPS, RecurrentLayout


def delta_gradient(
    run: Run, parts: int, grad: Tensor, inputs: DeltaInputs, layout: RecurrentLayout
) -> DeltaInputs:
    """Return the gradients of the rule's inputs, in their dtypes; grad: [T, H_v, D_v]."""
    out = DeltaInputs(*map(torch.empty_like, inputs))
    chunks_of(layout, grad.device)

    def piece(first: int, count: int) -> None:
        part, own = inputs.of_heads(first, count), out.of_heads(first, count)
        made = _gradients(grad[:, inputs.values_of(first, count)].float(), part, layout)
        for place, value in zip(own, made, strict=True):
            place.copy_(value)

    pieces = [partial(piece, *some) for some in heads_apart(inputs, parts)]
    run(pieces, 4 * work(inputs))
    return out


@dataclass(frozen=True, slots=True)
class _Rows:
    """One chunk of every sequence that has it; they are the first ones, the longest first."""

    rows: Tensor
    """int64 [n, 64]: the token of each row, or T."""

    is_there: Tensor
    """bool [n, 64]"""


def chunks_of(layout: RecurrentLayout, device: torch.device) -> list[_Rows]:
    """Return the chunks of whole sequences, in the order of the forward pass."""
    if chunks_of not in layout.plans:
        lens = torch.tensor(layout.query_lens, dtype=torch.int64)
        starts = lens.cumsum(0) - lens
        order = lens.argsort(descending=True, stable=True)
        chunks = []
        for first in range(0, max(layout.query_lens, default=0), DELTA_CHUNK):
            own = order[lens[order] > first, None]
            place = first + torch.arange(DELTA_CHUNK)
            is_there = place < lens[own]
            rows = torch.where(is_there, starts[own] + place, int(lens.sum()))
            chunks.append(_Rows(rows.to(device), is_there.to(device)))
        layout.plans[chunks_of] = chunks
    plan: list[_Rows] = layout.plans[chunks_of]
    return plan


def _gradients(grad: Tensor, inputs: DeltaInputs, layout: RecurrentLayout) -> list[Tensor]:
    """Return float32 gradients of some heads' inputs."""
    tokens, heads, value_dim = inputs.v.shape
    given = per_value_head(inputs)
    padded = [torch.cat((x, x.new_zeros(1, *x.shape[1:]))) for x in (*given, grad)]
    of_rows = [torch.zeros_like(x[:tokens]) for x in given]
    plan, chunks = chunks_of(layout, grad.device), []
    state = grad.new_zeros(len(layout.query_lens), heads, inputs.k.shape[2], value_dim)
    for each in plan:
        taken = [x[each.rows].transpose(1, 2) for x in padded]
        chunks.append(_Chunk.of(taken[:-1], state[: len(each.rows)]))
        state = chunks[-1].next_state()
    of_state = state[:0]
    for each in reversed(plan):
        missing = len(each.rows) - len(of_state)
        of_state = F.pad(of_state, (0, 0, 0, 0, 0, 0, 0, missing))
        of_out = padded[-1][each.rows].transpose(1, 2)
        *made, of_state = chunks.pop().gradients(of_out, of_state)
        for total, part in zip(of_rows, made, strict=True):
            total[each.rows[each.is_there]] = part.transpose(1, 2)[each.is_there]
    of_q, of_k, *rest = of_rows
    of_q = of_q * inputs.q.shape[2] ** -0.5
    pairs = (inputs.q, of_q), (inputs.k, of_k)
    return [*(_of_unit(x, of.unflatten(1, (-1, inputs.group)).sum(2)) for x, of in pairs), *rest]


def _of_unit(x: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of x in `unit(x)`: float32 [T, H, D] each."""
    x = x.float()
    scale = torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)
    y = x * scale
    return scale * (grad - y * (y * grad).sum(-1, keepdim=True))


@dataclass(slots=True)
class _Chunk:
    """A chunk of n sequences with all that its gradient needs: float32 [n, H, 64, ...] each."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    state: Tensor
    """[n, H, D, D_v], at the start."""

    since_start: Tensor
    """[n, H, 64, 1]: exp(G)"""

    until_end: Tensor
    """[n, H, 64, 1]: exp(G_C - G)"""

    weights: Tensor
    """[n, H, 64, 64]: W, zero above the diagonal."""

    overlap: Tensor
    """[n, H, 64, 64]: A, zero on the diagonal too."""

    predicted: Tensor
    """[n, H, 64, D_v]: K S"""

    u: Tensor

    @staticmethod
    def of(taken: list[Tensor], state: Tensor) -> _Chunk:
        """Compute the rule for q, k, v [n, H, 64, ...] and g, beta [n, H, 64]."""
        q, k, v, g, beta = (x.contiguous() for x in taken)
        sums, beta = g.cumsum(-1)[..., None], beta[..., None]
        lower = torch.ones(DELTA_CHUNK, DELTA_CHUNK, dtype=torch.bool, device=q.device).tril()
        weights = exp((sums - sums.transpose(2, 3)).masked_fill(~lower, float("-inf")))
        overlap = (products(k, k.transpose(2, 3)) * weights * beta).tril(-1)
        since_start, predicted = exp(sums), products(k, state)
        rest = beta * (v - since_start * predicted)
        u = torch.linalg.solve_triangular(overlap, rest, upper=False, unitriangular=True)
        until_end = exp(sums[:, :, -1:] - sums)
        scales = since_start, until_end
        return _Chunk(q, k, v, beta, state, *scales, weights, overlap, predicted, u)

    def next_state(self) -> Tensor:
        """Return S'."""
        added = products((self.k * self.until_end).transpose(2, 3), self.u)
        return self.since_start[:, :, -1:] * self.state + added

    def gradients(self, of_out: Tensor, of_next: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of q, k, v, g, beta and S from those of O and S'."""
        q, k, u, state, since = self.q, self.k, self.u, self.state, self.since_start
        seen = products(q, k.transpose(2, 3)) * self.weights
        of_u = products(seen.transpose(2, 3), of_out) + products(k * self.until_end, of_next)
        of_rest = torch.linalg.solve_triangular(
            self.overlap.transpose(2, 3), of_u, upper=True, unitriangular=True
        )
        of_seen = products(of_out, u.transpose(2, 3)).tril()
        of_overlap = -products(of_rest, u.transpose(2, 3)).tril(-1)
        # The state is read by queries and keys, and goes on to the chunk's end.
        of_read, of_predicted = since * of_out, -self.beta * since * of_rest
        of_state = since[:, :, -1:] * of_next + products(q.transpose(2, 3), of_read)
        of_state += products(k.transpose(2, 3), of_predicted)
        of_qk, of_kk = of_seen * self.weights, of_overlap * self.weights * self.beta
        of_q = products(of_read, state.transpose(2, 3)) + products(of_qk, k)
        of_added = self.until_end * products(u, of_next.transpose(2, 3))
        of_k = products(of_predicted, state.transpose(2, 3)) + products(of_qk.transpose(2, 3), q)
        of_k += products(of_kk + of_kk.transpose(2, 3), k) + of_added
        of_sums = self._of_sums(of_seen * seen + of_overlap * self.overlap)
        of_sums += (since * products(q, state) * of_out + self.predicted * of_predicted).sum(-1)
        ends = (of_added * k).sum(-1)
        of_sums -= ends
        of_sums[..., -1] += ends.sum(-1) + (since[:, :, -1] * (state * of_next).sum(-2)).sum(-1)
        of_g = of_sums.flip(-1).cumsum(-1).flip(-1)
        bare = products(k, k.transpose(2, 3)) * self.weights
        of_beta = ((self.v - since * self.predicted) * of_rest).sum(-1)
        of_beta += (of_overlap * bare).sum(-1)
        return of_q, of_k, self.beta * of_rest, of_g, of_beta, of_state

    @staticmethod
    def _of_sums(of_pairs: Tensor) -> Tensor:
        """Return the part of the gradient of G by the weights W: [n, H, 64, 64] -> [n, H, 64]."""
        return of_pairs.sum(-1) - of_pairs.sum(-2)
