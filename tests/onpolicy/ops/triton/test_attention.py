"""The attention kernels in Triton's interpreter."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onpolicy.ops import AttentionLayout, PagedLayout, ScoreRule
from onpolicy.ops.shared_rows import SharedRows
from onpolicy.ops.stock import StockOperators
from onpolicy.ops.triton import TritonOperators, attention, attention_split
from onpolicy.ops.triton.attention import blockwise_attention

OPERATORS = TritonOperators()

few = settings(max_examples=6)
heads = st.sampled_from([(1, 1, 16, 16), (6, 2, 24, 24), (2, 2, 16, 32), (5, 1, 16, 16)])
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
# Blocks of keys are 32 (float32) or 64: some sequences end inside the first, some after it.
lens = st.lists(st.integers(1, 90), min_size=1, max_size=2)


def packed_inputs(lens, shape, dtype):
    num_heads, kv_heads, dim, value_dim = shape
    generator = torch.Generator().manual_seed(sum(lens) * 31 + dim)
    q = torch.randn(sum(lens), num_heads, dim, generator=generator).to(dtype)
    k = torch.randn(sum(lens), kv_heads, dim, generator=generator).to(dtype)
    v = torch.randn(sum(lens), kv_heads, value_dim, generator=generator).to(dtype)
    return q, k, v


# Window, soft cap, whether there are sinks: windows end inside a block, at its end, and past it.
kinds = st.sampled_from(
    [(None, None, False), (20, None, False), (32, 2.0, False), (1, None, True), (65, 2.0, True)]
)
PLAIN = (None, None, False)


def scores_of(q, special):
    heads = torch.Generator().manual_seed(q.shape[1])
    sinks = torch.randn(q.shape[1], generator=heads).to(q.dtype) if special[2] else None
    return ScoreRule(q.shape[-1] ** -0.5, *special[:2], sinks)


def attend(q, k, v, layout, special=PLAIN):
    """out and lse"""
    return blockwise_attention(q, k, v, layout.by_pages(), scores_of(q, special))


def paged(store, lens, page_size):
    """The rows of `store` on pages in reverse order; what nobody owns is NaN."""
    pages = -(-max(lens) // page_size)
    table = torch.arange(len(lens) * pages).flip(0).view(len(lens), pages)
    out = store.new_full(((len(lens) * pages + 1) * page_size, *store.shape[1:]), torch.nan)
    for owner, rows in zip(table, store.split(lens), strict=True):
        slots = (owner[:, None] * page_size + torch.arange(page_size)).flatten()
        out[slots[: len(rows)]] = rows
    return out, table.to(torch.int32)


@few
@given(lens, heads, dtypes, st.sampled_from([1, 16, 64]), kinds, st.data())
def test_decoding_and_chunked_prefill_equal_whole_sequences(
    lens, shape, dtype, page_size, special, data
):
    """Any last part of each sequence as queries, keys on pages amid NaN."""
    q, k, v = packed_inputs(lens, shape, dtype)
    whole = attend(q, k, v, AttentionLayout.packed(tuple(lens)), special)
    counts = [data.draw(st.sampled_from([1, n, (n + 1) // 2])) for n in lens]
    last = [part[-n:] for part, n in zip(torch.arange(sum(lens)).split(lens), counts, strict=True)]
    rows = torch.cat(last)
    (store_k, table), (store_v, _) = paged(k, lens, page_size), paged(v, lens, page_size)
    layout = PagedLayout(
        page_table=table,
        page_size=page_size,
        key_lens=torch.tensor(lens, dtype=torch.int32),
        query_starts=torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32),
        max_query_len=max(counts) + data.draw(st.integers(0, 20)),
    )
    got = blockwise_attention(q[rows], store_k, store_v, layout, scores_of(q, special))
    for ours, full in zip(got, whole, strict=True):
        assert torch.equal(ours, full[rows])


@few
@given(lens, heads, dtypes, st.data())
def test_a_sequence_does_not_depend_on_the_others(lens, shape, dtype, data):
    q, k, v = packed_inputs(lens, shape, dtype)
    together = attend(q, k, v, AttentionLayout.packed(tuple(lens)))[0].split(lens)
    order = data.draw(st.permutations(range(len(lens))))
    parts = [torch.cat([x.split(lens)[i] for i in order]) for x in (q, k, v)]
    shuffled_lens = tuple(lens[i] for i in order)
    shuffled = attend(*parts, AttentionLayout.packed(shuffled_lens))[0].split(shuffled_lens)
    for position, i in enumerate(order):
        assert torch.equal(shuffled[position], together[i])
    alone = attend(*(x.split(lens)[0] for x in (q, k, v)), AttentionLayout.packed((lens[0],)))
    assert torch.equal(alone[0], together[0])


def split_sinks(operators, layout, scores, q, k, v, sinks=None):
    return operators.attention(q, k, v, layout, replace(scores, sinks=sinks))


@few
@given(lens, heads, dtypes, kinds)
def test_results_and_gradients_are_close_to_float64(lens, shape, dtype, special):
    inputs = [x.requires_grad_() for x in packed_inputs(lens, shape, dtype)]
    layout, scores = AttentionLayout.packed(tuple(lens)), scores_of(inputs[0], special)
    ours_of, exact_of = partial(split_sinks, OPERATORS), partial(split_sinks, StockOperators())
    inputs += [] if scores.sinks is None else [scores.sinks.requires_grad_()]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    got = ours_of(layout, scores, *inputs)
    want = exact_of(layout, scores, *exact)
    tolerance = (
        {"rtol": 1e-4, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 5e-2}
    )
    torch.testing.assert_close(got.double(), want, **tolerance)
    with torch.no_grad():
        assert torch.equal(ours_of(layout, scores, *inputs), got)
    grad = torch.randn(got.shape).to(dtype)
    ours = torch.autograd.grad(got, inputs, grad)
    for a, b in zip(ours, torch.autograd.grad(want, exact, grad.double()), strict=True):
        torch.testing.assert_close(a.double(), b, **tolerance)


def test_queries_may_lie_apart_in_memory():
    """As transformers hands them over: [1, H, T, D], transposed."""
    q, k, v = packed_inputs([40], (4, 2, 16, 16), torch.bfloat16)
    layout = AttentionLayout.packed((40,))
    apart = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    for ours, theirs in zip(attend(*apart, layout), attend(q, k, v, layout), strict=True):
        assert torch.equal(ours, theirs)


def test_a_sequence_without_queries_is_left_out():
    """As in a CUDA graph captured for a larger batch."""
    q, k, v = packed_inputs([9], (2, 1, 16, 16), torch.float32)
    rows = torch.arange(9).expand(3, -1)
    layout = AttentionLayout(query_lens=(9, 0, 1), key_lens=(9, 1, 9), key_rows=rows)
    out, _ = attend(torch.cat([q, q[-1:]]), k, v, layout)
    assert torch.equal(out[8], out[9])


def test_gradients_of_queries_after_other_keys_add_up_to_those_of_whole_sequences():
    """As under context parallelism, where a rank holds some stretches of every sequence."""
    lens, first = (70, 41), (50, 3)
    inputs = [x.requires_grad_() for x in packed_inputs(lens, (4, 2, 16, 16), torch.float32)]
    grad = torch.randn(sum(lens), 4, 16, generator=torch.Generator().manual_seed(0))
    packed, scale = AttentionLayout.packed(lens), 0.25
    whole = OPERATORS.attention(*inputs, packed, ScoreRule(scale))
    q, k, v = inputs
    total = torch.zeros(())
    for ends, starts in ((first, (0, 0)), (lens, first)):
        rows = torch.cat(
            [
                part[start:end]
                for part, start, end in zip(
                    torch.arange(111).split(lens), starts, ends, strict=True
                )
            ]
        )
        query_lens = tuple(end - start for start, end in zip(starts, ends, strict=True))
        layout = AttentionLayout(query_lens=query_lens, key_lens=ends, key_rows=packed.key_rows)
        out = OPERATORS.attention(q[rows], k, v, layout, ScoreRule(scale))
        assert torch.equal(out, whole[rows])
        total = total + (out * grad[rows]).sum()
    parts = torch.autograd.grad(total, inputs)
    for ours, full in zip(parts, torch.autograd.grad(whole, inputs, grad), strict=True):
        torch.testing.assert_close(ours, full, rtol=1e-5, atol=1e-5)


CHUNK = 64


@contextmanager
def in_chunks(size=CHUNK, programs=attention_split.FEW_PROGRAMS):
    """Small chunks, so that a few tokens have several; 0 programs: a decode step is never split."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "ATTENTION_CHUNK", size)
        patch.setattr(attention_split, "ATTENTION_CHUNK", size)
        patch.setattr(attention_split, "FEW_PROGRAMS", programs)
        yield patch


def decode(inputs, lens, page_size, special, order):
    """The last query of every sequence, from pages amid NaN; out and lse."""
    q, k, v = inputs
    ends = torch.tensor(lens).cumsum(0)[order] - 1
    (store_k, table), (store_v, _) = paged(k, lens, page_size), paged(v, lens, page_size)
    layout = PagedLayout(
        page_table=table[order],
        page_size=page_size,
        key_lens=torch.tensor(lens, dtype=torch.int32)[order],
        query_starts=torch.arange(len(lens) + 1, dtype=torch.int32),
        max_query_len=1,
    )
    return ends, blockwise_attention(q[ends], store_k, store_v, layout, scores_of(q, special))


@few
@given(
    st.lists(st.sampled_from([1, 63, 64, 65, 128, 150, 200]), min_size=1, max_size=3),
    heads, dtypes, st.sampled_from([1, 16]), kinds, st.data(),
)  # fmt: skip
def test_a_split_decode_step_equals_one_that_is_not_and_training(
    lens, shape, dtype, page_size, special, data
):
    inputs = packed_inputs(lens, shape, dtype)
    order = data.draw(st.permutations(range(len(lens))))
    with in_chunks():
        whole = attend(*inputs, AttentionLayout.packed(tuple(lens)), special)
        rows, split = decode(inputs, lens, page_size, special, order)
    with in_chunks(programs=0):
        _, in_one_program = decode(inputs, lens, page_size, special, order)
    for ours, alone, full in zip(split, in_one_program, whole, strict=True):
        assert torch.equal(ours, full[rows])
        assert torch.equal(alone, full[rows])


def test_keys_that_sequences_share_change_no_bit_and_have_the_sum_of_their_gradients():
    """A prompt of 20 tokens, and answers of 15 and 9."""
    path = [*range(20), *range(35, 44)]
    rows = torch.tensor([*range(35), *path])
    shared = AttentionLayout(
        query_lens=(35, 9),
        key_lens=(35, 29),
        key_rows=torch.tensor([[*range(35)], path + [0] * 6]),
        shared_keys=SharedRows.of([*range(35), *path]),
    )
    inputs = [x.requires_grad_() for x in packed_inputs([44], (4, 2, 16, 16), torch.float32)]
    whole = [x.detach()[rows].requires_grad_() for x in inputs]
    rule = ScoreRule(0.25)
    want = OPERATORS.attention(*whole, AttentionLayout.packed((35, 29)), rule)
    asked = torch.tensor([*range(35), *range(55, 64)])  # the second prompt's queries are nobody's
    got = OPERATORS.attention(*inputs, shared, rule)
    assert torch.equal(got, want[asked])
    grad = torch.randn(got.shape)
    ours = torch.autograd.grad(got, inputs, grad)
    theirs = torch.autograd.grad(want[asked], whole, grad)
    for a, b in zip(ours, theirs, strict=True):
        summed = torch.zeros_like(a).index_add_(0, rows, b)
        torch.testing.assert_close(a, summed, rtol=1e-4, atol=1e-5)
