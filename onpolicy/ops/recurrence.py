"""The recurrent operators besides their products: layouts, the blocks that hold states, the convolution.

A gated delta network (Yang, Kautz, Hatamizadeh, arXiv:2412.06464, equations 8 to 10) keeps a matrix
S per head, which every token decays and corrects. Its usual implementations have one formula for a
prompt and one for a decoded token, and round differently. Here is one formula. A sequence is cut
into chunks of DELTA_CHUNK tokens, counted from its first one. With S the state at the chunk's
start, all in float32, and k and q normalised,

    G_i = G_(i-1) + g_i                                              from 0 at the chunk's start
    u_i = beta_i (v_i - exp(G_i) S^T k_i - sum_(j<i) exp(G_i - G_j) (k_j . k_i) u_j)
    o_i = exp(G_i) S^T q_i + sum_(j<=i) exp(G_i - G_j) (q_i . k_j) u_j
    S'  = exp(G_C) S + sum_j exp(G_C - G_j) k_j u_j^T                at the chunk's end

so a token needs S and the chunk's earlier k, u and G. An engine keeps exactly these between two
calls and recomputes nothing, and a token's bits depend on its position and the tokens before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from onpolicy.contract import DELTA_CHUNK, DeltaShape

NORM_EPS = 1e-6
"""Epsilon of the norm of queries and keys: x / sqrt(sum(x^2) + eps), as transformers' `l2norm`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentLayout:
    """The new tokens of each sequence, and the rows of the stores that hold what came before them."""

    query_lens: tuple[int, ...]
    """Number of new tokens of each sequence, packed in this order. Example: (7, 1)"""

    past_lens: tuple[int, ...]
    """Number of tokens of each sequence that its states hold. Example: (0, 32)"""

    slots: Tensor | None = None
    """int64 [S]: row of the state stores of each sequence, all of them different; None in training,
    where sequences are whole and nothing is kept."""

    plans: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """Cache of an implementation's plans for this layout, for the model's other layers."""

    @staticmethod
    def packed(lens: tuple[int, ...]) -> RecurrentLayout:
        """Return the layout of whole sequences laid end to end."""
        return RecurrentLayout(query_lens=lens, past_lens=(0,) * len(lens))

    def on(self, device: torch.device | str) -> RecurrentLayout:
        """Return the same layout on a device."""
        return replace(self, slots=None if self.slots is None else self.slots.to(device), plans={})


def state_rows(key_dim: int, value_dim: int) -> int:
    """Return R, the rows of `value_dim` numbers that hold the state of one head; see `DeltaState`."""
    numbers_of_keys = DELTA_CHUNK * key_dim
    return key_dim + DELTA_CHUNK + -(-numbers_of_keys // value_dim) + -(-DELTA_CHUNK // value_dim)


def state_shapes(shape: DeltaShape) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """Return the shapes of a sequence's states in one layer: of `Operators.causal_conv`, (K - 1, C),
    and of `Operators.gated_delta`, (H_v, R, D_v)."""
    rows = state_rows(shape.key_dim, shape.value_dim)
    return (shape.kernel_size - 1, shape.channels), (shape.value_heads, rows, shape.value_dim)


class DeltaState(NamedTuple):
    """Views of states [..., R, D_v]: what a head needs of the tokens so far.

    Of `u`, `k` and `G` there are as many rows as the current chunk has tokens; the rest are zeros.
    """

    s: Tensor
    """[..., D, D_v]: the state at the start of the current chunk."""

    u: Tensor
    """[..., 64, D_v]"""

    k: Tensor
    """[..., 64, D], normalised."""

    g: Tensor
    """[..., 64]: G, the sum of the decays since the chunk's start."""

    @staticmethod
    def of(states: Tensor, key_dim: int) -> DeltaState:
        """Return the parts of states [..., R, D_v] in contiguous memory."""
        value_dim, numbers = states.shape[-1], states.flatten(-2)
        own = key_dim * value_dim, DELTA_CHUNK * value_dim
        keys = -(-DELTA_CHUNK * key_dim // value_dim) * value_dim
        s, u, k, g = numbers.tensor_split((own[0], sum(own), sum(own) + keys), dim=-1)
        return DeltaState(
            s.unflatten(-1, (key_dim, value_dim)),
            u.unflatten(-1, (DELTA_CHUNK, value_dim)),
            k[..., : DELTA_CHUNK * key_dim].unflatten(-1, (DELTA_CHUNK, key_dim)),
            g[..., :DELTA_CHUNK],
        )


class _Inputs(NamedTuple):
    """Rows of [inputs held of every sequence, then new inputs] that a convolution reads and keeps."""

    read: Tensor
    """int64 [K, T]: rows of the inputs of each new token, the oldest first."""

    kept: Tensor
    """int64 [S, K - 1]: rows of the last inputs of each sequence."""

    is_new: Tensor
    """bool [S, 1, 1]: whether the store holds nothing of the sequence."""


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, layout: RecurrentLayout, states: Tensor | None
) -> Tensor:
    """Compute `Operators.causal_conv`: products and sums of float32, one input after another.

    Each is rounded by itself, so an element's bits depend on its own inputs on every device.
    """
    plan = _inputs_of(layout, weight.shape[1], x.device)
    if states is None:
        out: Tensor = _CausalConv.apply(x, weight, bias, plan)
        return out
    assert layout.slots is not None
    held = states[layout.slots].masked_fill(plan.is_new, 0)
    inputs = torch.cat((held.flatten(0, 1), x))
    states[layout.slots] = inputs[plan.kept]
    return _convolved(inputs, weight, bias, plan)


def _convolved(inputs: Tensor, weight: Tensor, bias: Tensor | None, plan: _Inputs) -> Tensor:
    total = inputs.new_zeros(plan.read.shape[1], inputs.shape[1], dtype=torch.float32)
    for rows, factor in zip(plan.read, weight.float().unbind(1), strict=True):
        total += inputs.index_select(0, rows).float() * factor
    return (total if bias is None else total.add_(bias.float())).to(inputs.dtype)


class _CausalConv(torch.autograd.Function):
    """The convolution of whole sequences, which keeps only its inputs for the backward pass."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor | None, plan: _Inputs
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)  # type: ignore[arg-type]
        ctx.plan = plan  # type: ignore[attr-defined]
        return _convolved(_after_zeros(x, plan), weight, bias, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors  # type: ignore[attr-defined]
        plan: _Inputs = ctx.plan  # type: ignore[attr-defined]
        inputs, grad = _after_zeros(x, plan), grad.float()
        of_inputs, of_weight = torch.zeros_like(inputs, dtype=torch.float32), []
        for rows, factor in zip(plan.read, weight.float().unbind(1), strict=True):
            of_inputs[rows] += grad * factor  # each row once
            of_weight.append((grad * inputs.index_select(0, rows).float()).sum(0))
        of_x = of_inputs[len(inputs) - len(x) :].to(x.dtype)
        of_bias = None if bias is None else grad.sum(0).to(bias.dtype)
        return of_x, torch.stack(of_weight, dim=1).to(weight.dtype), of_bias, None


def _after_zeros(x: Tensor, plan: _Inputs) -> Tensor:
    """Return the inputs of sequences of which nothing came before: [S (K - 1) + T, C]."""
    return torch.cat((x.new_zeros(plan.kept.numel(), x.shape[1]), x))


def _inputs_of(layout: RecurrentLayout, size: int, device: torch.device) -> _Inputs:
    if (key := (_inputs_of, size)) not in layout.plans:
        before = size - 1
        lens = torch.tensor(layout.query_lens, dtype=torch.int64)
        starts = lens.cumsum(0) - lens
        first_new = before * len(lens)
        of = torch.arange(len(lens)).repeat_interleave(lens)
        token = torch.arange(int(lens.sum())) - starts[of]

        def rows(sequence: Tensor, number: Tensor) -> Tensor:
            """Return the row of an input, numbered from the first new one."""
            held = (sequence + 1) * before + number
            return torch.where(number < 0, held, first_new + starts[sequence] + number)

        read = torch.stack([rows(of, token - before + i) for i in range(size)])
        kept = rows(torch.arange(len(lens))[:, None], lens[:, None] + torch.arange(-before, 0))
        is_new = torch.tensor(layout.past_lens, dtype=torch.int64).eq(0)[:, None, None]
        layout.plans[key] = _Inputs(read.to(device), kept.to(device), is_new.to(device))
    plan: _Inputs = layout.plans[key]
    return plan
