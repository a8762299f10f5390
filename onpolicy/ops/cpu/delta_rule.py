"""The gated delta rule on a CPU, batched over sequences and heads, with a fixed order of every sum.

The formula is in `ops/recurrence.py`. A chunk of 64 tokens is cut into blocks of 16, aligned like the
chunks, and the blocks of a sequence follow one another. A block's rows are computed together, by the
same products in whatever order its tokens come: of 16 rows with 64 keys or with the state. A row's
sums over the keys of earlier blocks are one product, and those over keys of its own block follow,
one key after another, each product and each difference rounded. Tokens that are not there yet are
rows of zeros, which add exact zeros, and tokens of an earlier call are read from the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from onpolicy.contract import DELTA_CHUNK
from onpolicy.ops.base import Piece
from onpolicy.ops.cpu.layout import whole_vectors
from onpolicy.ops.differentiable_delta import DeltaInputs
from onpolicy.ops.recurrence import NORM_EPS, DeltaState, RecurrentLayout, state_rows

BLOCK = 16
"""Number of rows of a product, from which a single-threaded GEMM gives a row the same bits whatever
rows surround it."""

BLOCKS = DELTA_CHUNK // BLOCK


Run = Callable[[Sequence[Piece], float], None]
"""Runs independent pieces, which together do so many floating-point operations."""


def work(inputs: DeltaInputs) -> float:
    """Return the approximate floating-point operations of the rule."""
    tokens, heads, value_dim = inputs.v.shape
    return 4.0 * tokens * heads * (inputs.k.shape[2] + DELTA_CHUNK) * (value_dim + DELTA_CHUNK)


def heads_apart(inputs: DeltaInputs, parts: int) -> list[tuple[int, int]]:
    """Return the key heads of each of up to `parts` parts: (the first one, their number)."""
    heads = inputs.k.shape[1]
    step = -(-heads // parts)
    return [(first, min(step, heads - first)) for first in range(0, heads, step)]


def delta_rule(
    run: Run, parts: int, inputs: DeltaInputs, layout: RecurrentLayout, states: Tensor | None = None
) -> Tensor:
    """Compute `Operators.gated_delta` without autograd, in up to `parts` pieces of some heads."""
    out = torch.empty_like(inputs.v)
    steps_of(layout, out.device)  # once, and not in every thread

    def piece(first: int, count: int) -> None:
        part, values = inputs.of_heads(first, count), inputs.values_of(first, count)
        _fill(part, layout, None if states is None else states[:, values], out[:, values])

    run([partial(piece, *some) for some in heads_apart(inputs, parts)], work(inputs))
    return out


def unit(x: Tensor) -> Tensor:
    """Return rows of length 1 in float32: [..., D] -> [..., D], as transformers' `l2norm`."""
    x = x.float().contiguous()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def exp(x: Tensor) -> Tensor:
    """Compute the exponential of each element by itself."""
    return whole_vectors(torch.exp, x.contiguous())


@dataclass(frozen=True, slots=True)
class _Step:
    """The next block of every sequence that has one; they are the first `count` ones."""

    rows: Tensor
    """int64 [count, 16]: the token of each row, or T."""

    is_there: Tensor
    """bool [count, 16]: whether a row's token is one of the new ones."""

    is_new: Tensor
    """bool [count, 1, 16, 1]: whether a row's token is not held already; later ones are not either."""

    block: Tensor
    """int64 [count]: place of the block within its chunk."""

    ended: Tensor
    """int64: sequences whose chunk ends with this block."""


def steps_of(layout: RecurrentLayout, device: torch.device) -> tuple[Tensor, list[_Step]]:
    """Return the order in which sequences are numbered, the longest first, and the steps."""
    if steps_of not in layout.plans:
        told = layout.query_lens, layout.past_lens
        lens, past = (torch.tensor(x, dtype=torch.int64) for x in told)
        starts = lens.cumsum(0) - lens
        first = past // BLOCK
        counts = torch.where(lens > 0, (past + lens - 1) // BLOCK - first + 1, 0)
        order = counts.argsort(descending=True, stable=True)
        steps = []
        for number in range(int(counts.max()) if len(counts) else 0):
            own = order[counts[order] > number]
            block = first[own] + number
            position = block[:, None] * BLOCK + torch.arange(BLOCK)
            place = position - past[own, None]
            is_there = (place >= 0) & (place < lens[own, None])
            rows = torch.where(is_there, starts[own, None] + place, int(lens.sum()))
            block %= BLOCKS
            ended = ((block == BLOCKS - 1) & is_there[:, -1]).nonzero()[:, 0]
            is_new = (place >= 0)[:, None, :, None]
            parts = rows, is_there, is_new, block, ended
            steps.append(_Step(*(x.to(device) for x in parts)))
        layout.plans[steps_of] = order.to(device), steps
    plan: tuple[Tensor, list[_Step]] = layout.plans[steps_of]
    return plan


def _fill(inputs: DeltaInputs, layout: RecurrentLayout, states: Tensor | None, out: Tensor) -> None:
    """Write the results of some heads to `out`, and their new states to `states`."""
    order, steps = steps_of(layout, out.device)
    state = _begin(inputs, layout, states, order)
    # One more row, of zeros, for the tokens that are not there.
    q, k, v, g, beta = (
        torch.cat((x, x.new_zeros(1, *x.shape[1:]))) for x in per_value_head(inputs)
    )
    for step in steps:
        taken = [x[step.rows].transpose(1, 2) for x in (q, k, v, g, beta)]
        made = _block(DeltaState(*(x[: len(step.rows)] for x in state)), step, taken)
        there = step.is_there
        out[step.rows[there]] = made.transpose(1, 2)[there].to(out.dtype)
    if states is not None:
        assert layout.slots is not None
        _end(state, states, layout.slots[order])


def per_value_head(inputs: DeltaInputs) -> tuple[Tensor, ...]:
    """Return float32 q, k, v, g and beta for every value head; q and k normalised, q scaled."""
    q, k = (unit(x).repeat_interleave(inputs.group, dim=1) for x in inputs[:2])
    return q * q.shape[2] ** -0.5, k, inputs.v.float(), inputs.g.float(), inputs.beta.float()


def _begin(
    inputs: DeltaInputs, layout: RecurrentLayout, states: Tensor | None, order: Tensor
) -> DeltaState:
    """Return the states of the sequences in `order`, in memory of their own."""
    heads, value_dim = inputs.v.shape[1:]
    key_dim = inputs.k.shape[2]
    if states is None:
        rows = state_rows(key_dim, value_dim)
        held = inputs.g.new_zeros(len(order), heads, rows, value_dim)
        return DeltaState(*(x.contiguous() for x in DeltaState.of(held, key_dim)))
    assert layout.slots is not None
    past = torch.tensor(layout.past_lens, device=order.device)[order, None]
    state = DeltaState.of(states[layout.slots[order]], key_dim)
    # A slot may hold another request's numbers, even NaN, where this one has none.
    is_held = (torch.arange(DELTA_CHUNK, device=past.device) < past % DELTA_CHUNK)[:, None]
    return DeltaState(
        s=state.s.masked_fill((past < DELTA_CHUNK)[..., None, None], 0),
        u=state.u.masked_fill(~is_held[..., None], 0),
        k=state.k.masked_fill(~is_held[..., None], 0),
        g=state.g.masked_fill(~is_held, 0),
    )


def _end(state: DeltaState, states: Tensor, slots: Tensor) -> None:
    made = states.new_zeros(len(slots), *states.shape[1:])
    for part, own in zip(DeltaState.of(made, state.k.shape[-1]), state, strict=True):
        part.copy_(own)
    states[slots] = made


@cache
def _distances(device: torch.device) -> Tensor:
    """Return int64 [4, 16, 64]: how far a key is before a row, for each block of a chunk."""
    places = torch.arange(DELTA_CHUNK, device=device)
    return places.view(BLOCKS, BLOCK, 1) - places


def _block(state: DeltaState, step: _Step, taken: list[Tensor]) -> Tensor:
    """Compute a block of n sequences: float32 [n, H, 16, D_v]; change `state` in place.

    taken: q, k, v [n, H, 16, ...], g and beta [n, H, 16].
    """
    q, k, v, g, beta = taken
    every, own = torch.arange(len(v), device=v.device), step.block
    u, keys, sums = (x.unflatten(2, (BLOCKS, BLOCK)) for x in state[1:])
    k = keys[every, :, own] = torch.where(step.is_new, k, keys[every, :, own])
    sum_g = _running_sums(g, sums, step)
    sums[every, :, own] = sum_g.masked_fill((step.is_new[..., 0] & ~step.is_there[:, None]), 0)
    decay = sum_g[..., None] - state.g[:, :, None]
    distance = _distances(v.device)[own][:, None]
    weights = exp(decay.masked_fill(distance < 0, float("-inf")))
    since_start = exp(sum_g)[..., None]
    # What the state and the keys so far predict of the values, and then the corrections.
    overlap = products(k, state.k.transpose(2, 3)) * weights
    overlap = torch.where(step.is_new & (distance > 0), overlap * beta[..., None], 0)
    inside = overlap.unflatten(3, (BLOCKS, BLOCK))[every, :, :, own]
    outside = overlap.masked_fill(distance <= torch.arange(BLOCK, device=v.device)[:, None], 0)
    rest = v - since_start * products(k, state.s)
    rest = rest * beta[..., None] - products(outside, state.u)
    rest = torch.where(step.is_new, rest, u[every, :, own])
    for j in range(BLOCK - 1):
        rest[:, :, j + 1 :] -= inside[:, :, j + 1 :, j, None] * rest[:, :, j, None]
    u[every, :, own] = rest
    seen = products(q, state.k.transpose(2, 3)) * weights
    out = since_start * products(q, state.s) + products(seen, state.u)
    if len(step.ended):
        _end_chunk(state, step.ended)
    return out


def _running_sums(g: Tensor, sums: Tensor, step: _Step) -> Tensor:
    """Return G of a block's rows: g [n, H, 16], all sums so far [n, H, 4, 16] -> [n, H, 16].

    torch.cumsum sums in float64, which a call that begins within a chunk could not go on with.
    """
    every = torch.arange(len(g), device=g.device)
    last = sums[every, :, (step.block - 1).clamp(min=0), -1].clone()
    last[step.block == 0] = 0
    held, is_new, total = sums[every, :, step.block], step.is_new[..., 0], []
    for i in range(BLOCK):
        last = torch.where(is_new[:, :, i], last + g[:, :, i], held[:, :, i])
        total.append(last)
    return torch.stack(total, dim=2)


def _end_chunk(state: DeltaState, which: Tensor) -> None:
    """Add the chunk's corrections to the states of these sequences, and begin the next chunk."""
    s, u, k, g = (x[which] for x in state)
    last = g[..., -1:]
    keys = k * exp(last - g)[..., None]
    state.s[which] = exp(last)[..., None] * s + products(keys.transpose(2, 3), u)
    for part in state[1:]:
        part[which] = 0


def products(a: Tensor, b: Tensor) -> Tensor:
    """Compute [n, H, M, K] @ [n, H, K, N] -> [n, H, M, N], each matrix in contiguous memory."""
    product = torch.bmm(a.flatten(0, 1).contiguous(), b.flatten(0, 1).contiguous())
    out: Tensor = product.unflatten(0, a.shape[:2])
    return out
