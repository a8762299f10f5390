"""Checks of attention: decoding, chunked prefill and training give a query the same bits."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from onpolicy.ops import AttentionLayout, ScoreRule
from tests.gpu.row_checks import check_gradients
from tests.support.gpu.paged_attention import PagedBatch

BORDERS = (1, 2, 63, 64, 65, 80, 112, 127, 128, 129, 160, 175, 176, 177, 255, 256, 257)
"""Lengths around the sizes of key blocks in all kernels."""
JUNK = 1e4
"""The value on unowned pages, and behind a sequence's last key."""


@dataclass(frozen=True, slots=True)
class Heads:
    heads: int
    kv_heads: int
    dim: int

    def __str__(self):
        return f"{self.heads}/{self.kv_heads} heads x {self.dim}"


def sequence_lens(longest):
    return [*(n for n in BORDERS if n < longest), longest]


def packed_inputs(heads, lens, numbers):
    """Return queries, keys and values of whole sequences, laid end to end."""
    total = sum(lens)
    return [
        numbers(total, heads.heads, heads.dim, seed=1),
        numbers(total, heads.kv_heads, heads.dim, seed=2),
        numbers(total, heads.kv_heads, heads.dim, seed=3),
    ]


class PagedSequences:
    """Sequences whose keys and values lie on pages in random order, amid pages of junk."""

    def __init__(self, inputs, lens, page_size):
        self.q, keys, values = inputs
        self.lens, self.page_size = lens, page_size
        self.starts = [sum(lens[:i]) for i in range(len(lens))]
        device, pages = keys.device, -(-max(lens) // page_size)
        generator = torch.Generator().manual_seed(page_size)
        count = len(lens) * pages + 3
        order = torch.randperm(count, generator=generator)[:-3].view(len(lens), pages)
        self.page_table = order.to(device)
        shape = (count * page_size, *keys.shape[1:])
        self.k, self.v = keys.new_full(shape, JUNK), values.new_full(shape, JUNK)
        offsets = torch.arange(page_size, device=device)
        rows = (self.page_table[..., None] * page_size + offsets).flatten(1)
        for owner, start, n in zip(rows, self.starts, lens, strict=True):
            self.k[owner[:n]] = keys[start : start + n]
            self.v[owner[:n]] = values[start : start + n]

    def queries(self, spans):
        """Return rows of the packed queries for (sequence, first token, end): int64 [T]"""
        rows = [torch.arange(self.starts[s] + a, self.starts[s] + b) for s, a, b in spans]
        return torch.cat(rows).to(self.q.device)

    def attend(self, attention, spans, scale):
        """Return out and lse of the spans' queries, all in one call; later tokens are not there
        yet."""
        batch = PagedBatch.of(
            self.page_table[[s for s, _, _ in spans]],
            self.page_size,
            [b - a for _, a, b in spans],
            [b for _, _, b in spans],
        )
        return attention(self.q[self.queries(spans)], self.k, self.v, batch, scale)


def check_paged(operators, attention, heads, page_size, longest, batch_sizes, numbers, tally):
    """Compare decoding steps, chunks after a cached prefix, and both mixed, with the training
    forward."""
    lens, scale = sequence_lens(longest), heads.dim**-0.5
    inputs = packed_inputs(heads, lens, numbers)
    layout = AttentionLayout.packed(tuple(lens), numbers.device)
    training = operators.attention(*inputs, layout, ScoreRule(scale))
    paged = PagedSequences(inputs, lens, page_size)
    prefill, prefill_lse = paged.attend(attention, [(s, 0, n) for s, n in enumerate(lens)], scale)
    case = f"{heads}, pages of {page_size}"
    tally.equal(prefill, training, f"{case}, whole prefill against training")
    rng = random.Random(page_size)

    def compare(spans, what):
        out, lse = paged.attend(attention, spans, scale)
        rows = paged.queries(spans)
        tally.equal(out, training[rows], f"{case}, {what}")
        if lse is not None:
            tally.equal(lse, prefill_lse[rows], f"{case}, {what}, lse")

    def step(size):
        s = rng.randrange(len(lens))
        end = rng.randrange(1, lens[s] + 1)
        return s, max(0, end - size), end

    compare([(s, n - 1, n) for s, n in enumerate(lens)], "the last token of every sequence")
    for size in batch_sizes:
        compare([step(1) for _ in range(size)], f"{size} decoding")
        compare([step(rng.randrange(2, longest)) for _ in range(min(size, 16))], "chunks")
        compare([step(rng.choice([1, 1, 7, 64])) for _ in range(size)], f"{size} mixed")


def check_packing(operators, heads, longest, numbers, tally):
    """Check that a sequence has the same bits in a packed micro-batch, alone, and in another order."""
    lens = sequence_lens(longest)
    inputs = packed_inputs(heads, lens, numbers)

    def attend(order):
        parts = [torch.cat([x.split(lens)[i] for i in order]) for x in inputs]
        chosen = tuple(lens[i] for i in order)
        layout = AttentionLayout.packed(chosen, numbers.device)
        return operators.attention(*parts, layout, ScoreRule(heads.dim**-0.5)).split(chosen)

    whole = attend(range(len(lens)))
    backwards = attend(range(len(lens))[::-1])[::-1]
    for i, n in enumerate(lens):
        tally.equal(backwards[i], whole[i], f"{heads}, {n} tokens, packed backwards")
        tally.equal(attend([i])[0], whole[i], f"{heads}, {n} tokens alone")


def check_accuracy(operators, heads, longest, numbers, tally):
    """Compare values and gradients with float64 attention, and check that gradients repeat."""
    lens = sequence_lens(longest)[::3]
    inputs = packed_inputs(heads, lens, numbers)
    layout, scale = AttentionLayout.packed(tuple(lens), numbers.device), heads.dim**-0.5

    def attend(*inputs):
        return operators.attention(*inputs, layout, ScoreRule(scale))

    def exact(*inputs):
        return torch.cat(
            [
                _attention(*part, scale)
                for part in zip(*(x.split(lens) for x in inputs), strict=True)
            ]
        )

    with torch.no_grad():
        got, want = attend(*inputs), exact(*(x.double() for x in inputs))
    tally.close(got, want, 2**-8 * want.abs() + 2**-8, f"{heads} against float64")
    check_gradients(attend, exact, inputs, tally, str(heads), 2**-5)


def _attention(q, k, v, scale):
    """Compute one sequence's attention in its inputs' dtype, written out: [T, H, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = scale * torch.einsum("thd,shd->hts", q, k)
    future = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
    weights = F.softmax(scores.masked_fill(future, float("-inf")), dim=-1)
    return torch.einsum("hts,shd->thd", weights, v)
