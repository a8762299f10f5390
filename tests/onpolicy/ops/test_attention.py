from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onpolicy.ops import AttentionLayout, ScoreRule
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.cpu import attention_tiles as module
from onpolicy.ops.cpu.attention_tiles import Shape
from onpolicy.ops.stock import StockOperators

OPERATORS = CpuOperators(1)

heads = st.sampled_from([(1, 1, 16), (4, 2, 16), (6, 2, 24), (8, 1, 32), (4, 4, 48), (40, 2, 8)])
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
lens = st.lists(st.integers(1, 300), min_size=1, max_size=6)


# Window, soft cap, whether there are sinks: windows end inside a block, at its end, and past it.
PLAIN = (None, None, False)
kinds = st.sampled_from(
    [
        PLAIN, (1, None, False), (50, 2.0, True), (64, None, True), (65, 3.0, False),
        (500, None, True),
    ]
)  # fmt: skip


def packed_inputs(lens, shape, dtype):
    num_heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(sum(lens) * 31 + dim)
    q = torch.randn(sum(lens), num_heads, dim, generator=generator).to(dtype)
    k = torch.randn(sum(lens), kv_heads, dim, generator=generator).to(dtype)
    v = torch.randn(sum(lens), kv_heads, dim, generator=generator).to(dtype)
    return q, k, v


def how(q, kind=PLAIN):
    """The scores of a kind."""
    window, softcap, has_sinks = kind
    sinks = torch.linspace(-2, 3, q.shape[1]).to(q.dtype) if has_sinks else None
    return ScoreRule(q.shape[-1] ** -0.5, window, softcap, sinks)


def attend(q, k, v, layout, operators=OPERATORS, kind=PLAIN):
    with torch.no_grad():
        return operators.attention(q, k, v, layout, how(q, kind))


attend_as = attend


@given(lens, heads, dtypes, kinds, st.data())
def test_a_sequence_does_not_depend_on_the_others(lens, shape, dtype, kind, data):
    q, k, v = packed_inputs(lens, shape, dtype)
    attend = partial(attend_as, kind=kind)
    together = attend(q, k, v, AttentionLayout.packed(tuple(lens))).split(lens)
    order = data.draw(st.permutations(range(len(lens))))
    parts = [torch.cat([x.split(lens)[i] for i in order]) for x in (q, k, v)]
    shuffled_lens = tuple(lens[i] for i in order)
    shuffled = attend(*parts, AttentionLayout.packed(shuffled_lens)).split(shuffled_lens)
    for position, i in enumerate(order):
        assert torch.equal(shuffled[position], together[i])
        alone = attend(*(x.split(lens)[i] for x in (q, k, v)), AttentionLayout.packed((lens[i],)))
        assert torch.equal(alone, together[i])


def require_parts_equal_the_whole(lens, counts, inputs, kind=PLAIN, seed=0):
    """The last `counts` queries of each sequence, keys scattered over a paged store."""
    q, k, v = inputs
    attend, dtype = partial(attend_as, kind=kind), k.dtype
    whole = attend(q, k, v, AttentionLayout.packed(tuple(lens))).split(lens)
    pages = torch.arange(sum(lens) + 5)
    if seed is not None:  # else they lie together
        pages = torch.randperm(len(pages), generator=torch.Generator().manual_seed(seed))
    store_k = torch.zeros(sum(lens) + 5, *k.shape[1:], dtype=dtype)
    store_v = torch.zeros_like(store_k)
    store_k[pages[: sum(lens)]], store_v[pages[: sum(lens)]] = k, v
    rows = AttentionLayout.packed(tuple(lens)).key_rows
    layout = AttentionLayout(
        query_lens=tuple(counts), key_lens=tuple(lens), key_rows=pages[: sum(lens)][rows]
    )
    queries = torch.cat([part[-n:] for part, n in zip(q.split(lens), counts, strict=True)])
    got = attend(queries, store_k, store_v, layout).split(counts)
    for ours, full, count in zip(got, whole, counts, strict=True):
        assert torch.equal(ours, full[-count:])


def draw_counts(lens, data):
    return [data.draw(st.sampled_from([1, n, data.draw(st.integers(1, n))])) for n in lens]


seeds = st.none() | st.integers(0, 999)


@given(lens, heads, dtypes, kinds, seeds, st.data())
def test_chunks_with_a_cached_prefix_and_decode_steps_equal_the_whole(
    lens, shape, dtype, kind, seed, data
):
    inputs = packed_inputs(lens, shape, dtype)
    require_parts_equal_the_whole(lens, draw_counts(lens, data), inputs, kind, seed)


long_lens = st.lists(
    st.sampled_from([1, 90, 511, 512, 513, 700, 1100, 1537, 2048]), min_size=1, max_size=3
)
long_kinds = st.sampled_from(
    [PLAIN, (None, 2.0, True), (600, None, False), (512, 3.0, True), (40, None, True)]
)
small_heads = st.sampled_from([(1, 1, 16), (4, 2, 16), (6, 2, 24), (8, 1, 32)])


@settings(max_examples=30)
@given(long_lens, small_heads, dtypes, long_kinds, seeds, st.data())
def test_decode_prefill_and_training_put_chunks_of_keys_together_alike(
    lens, shape, dtype, kind, seed, data
):
    counts = [data.draw(st.sampled_from([1, min(n, 70)])) for n in lens]
    require_parts_equal_the_whole(lens, counts, packed_inputs(lens, shape, dtype), kind, seed)


@settings(max_examples=25)
@given(lens | st.sampled_from([[700], [1100, 90], [513, 1, 512]]), heads, kinds)
def test_threads_that_share_out_sequences_or_heads_change_no_bit_and_no_gradient(lens, shape, kind):
    inputs = packed_inputs(lens, shape, torch.float32)
    layout = AttentionLayout.packed(tuple(lens))
    grad = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onpolicy.ops.cpu.threads.MIN_PARALLEL_FLOPS", 0)
        three = attend(*inputs, AttentionLayout.packed(tuple(lens)), CpuOperators(3), kind)
        of_three = gradients(inputs, grad, lens, CpuOperators(3), kind)
    assert torch.equal(attend(*inputs, layout, kind=kind), three)
    for got, want in zip(of_three, gradients(inputs, grad, lens, kind=kind), strict=True):
        assert torch.equal(got, want)


def test_a_long_sequence_is_shared_out_by_its_heads():
    layout = AttentionLayout(query_lens=(1,), key_lens=(5000,), key_rows=torch.arange(5000)[None])
    batches = module.batches_of(layout, Shape(8, 4, 32, 32, None), 2)
    assert [batch.query_heads for batch in batches] == [slice(0, 4), slice(4, 8)]


@pytest.mark.parametrize("length", [512, 900])
def test_a_sequence_of_one_chunk_has_the_bits_of_a_sum_without_chunks(length):
    q, k, v = packed_inputs([length], (4, 2, 16), torch.float32)
    found = attend(q, k, v, AttentionLayout.packed((length,)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "KEY_CHUNK", 1024)
        patch.setattr("onpolicy.ops.cpu.attention_tiles.KEY_CHUNK", 1024)
        without = attend(q, k, v, AttentionLayout.packed((length,)))
    assert torch.equal(found[:512], without[:512])
    assert torch.equal(found, without) == (length == 512)


@given(
    lens, st.sampled_from([(8, 4, 16), (6, 2, 24), (8, 2, 32), (16, 4, 64), (8, 1, 128)]), dtypes
)
def test_heads_do_not_depend_on_the_others(lens, shape, dtype):
    """As tensor parallelism shares them out; ranks beyond the key heads hold copies of one."""
    num_heads, kv_heads, _ = shape
    q, k, v = packed_inputs(lens, shape, dtype)
    layout = AttentionLayout.packed(tuple(lens))
    whole = attend(q, k, v, layout)
    for ranks in (2, 4, 8):
        if num_heads % ranks:
            continue
        key_ranks = min(ranks, kv_heads)
        for rank, (queries, want) in enumerate(
            zip(q.chunk(ranks, 1), whole.chunk(ranks, 1), strict=True)
        ):
            keys, values = (x.chunk(key_ranks, 1)[rank * key_ranks // ranks] for x in (k, v))
            assert torch.equal(attend(queries, keys, values, layout), want)


@given(lens, heads)
def test_the_memory_bound_does_not_change_bits(lens, shape):
    q, k, v = packed_inputs(lens, shape, torch.float32)
    whole = attend(q, k, v, AttentionLayout.packed(tuple(lens)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BATCH_FLOATS", 1)
        assert torch.equal(attend(q, k, v, AttentionLayout.packed(tuple(lens))), whole)


def exact_attention(q, k, v, sinks, lens, scores):
    """By its definition, one query after the other, in float64."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    outs = []
    for part in zip(q.split(lens), k.split(lens), v.split(lens), strict=True):
        for i in range(len(part[0])):
            first = 0 if scores.window is None else max(0, i - scores.window + 1)
            query, keys, values = part[0][i], part[1][first : i + 1], part[2][first : i + 1]
            row = scores.scale * torch.einsum("hd,khd->hk", query, keys)
            if scores.softcap is not None:
                row = scores.softcap * torch.tanh(row / scores.softcap)
            if sinks is not None:
                row = torch.cat([row, sinks[:, None]], dim=1)
            weights = row.softmax(-1)[:, : len(keys)]
            outs.append(torch.einsum("hk,khd->hd", weights, values))
    return torch.stack(outs)


@pytest.mark.parametrize("operators", [OPERATORS, StockOperators()], ids=["aligned", "stock"])
@settings(max_examples=25)
@given(
    lens=st.lists(st.integers(1, 150), min_size=1, max_size=3), shape=heads, kind=kinds,
    value_dim=st.sampled_from([None, 40]),
)  # fmt: skip
def test_results_and_gradients_are_close_to_float64(operators, lens, shape, kind, value_dim):
    q, k, v = packed_inputs(lens, shape, torch.float32)
    v = v if value_dim is None else torch.randn(len(v), shape[1], value_dim)
    scores = how(q, kind)
    inputs = [x for x in (q, k, v, scores.sinks) if x is not None]
    inputs = [x.clone().requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    ours = replace(scores, sinks=inputs[3] if len(inputs) == 4 else None)
    got = operators.attention(*inputs[:3], AttentionLayout.packed(tuple(lens)), ours)
    want = exact_attention(*exact[:3], exact[3] if len(exact) == 4 else None, lens, scores)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
    grad = torch.randn_like(got)
    for ours, theirs in zip(
        torch.autograd.grad(got, inputs, grad),
        torch.autograd.grad(want, exact, grad.double()),
        strict=True,
    ):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-4)


def test_keys_before_the_window_are_not_read():
    """What a cache has forgotten may be anything, and work grows with the window alone."""
    q, k, v = packed_inputs([1000], (4, 2, 16), torch.float32)
    whole = attend(q, k, v, AttentionLayout.packed((1000,)), kind=(100, None, False))
    k[:832], v[:832] = float("nan"), float("nan")
    layout = AttentionLayout(query_lens=(20,), key_lens=(1000,), key_rows=torch.arange(1000)[None])
    assert torch.equal(attend(q[-20:], k, v, layout, kind=(100, None, False)), whole[-20:])
    (batch,) = next(iter(layout.plans.values()))
    assert batch.blocks.stop - batch.blocks.start == 3


def gradients(inputs, grad, lens, operators=OPERATORS, kind=PLAIN):
    inputs = [x.clone().requires_grad_() for x in inputs]
    layout = AttentionLayout.packed(tuple(lens))
    out = operators.attention(*inputs, layout, how(inputs[0], kind))
    return torch.autograd.grad(out, inputs, grad)


def require_same_gradients(inputs, grad, lens, alone, operators=OPERATORS, kind=PLAIN):
    """A sequence's queries, keys and values get back alone what they get back among the others."""
    together = gradients(inputs, grad, lens, operators, kind)
    parts = [x.split(lens)[alone] for x in inputs]
    ours = gradients(parts, grad.split(lens)[alone], [lens[alone]], operators, kind)
    for name, got, want in zip("qkv", ours, together, strict=True):
        assert torch.equal(got, want.split(lens)[alone]), f"gradient of {name}"


@given(lens, heads, kinds, st.data())
def test_gradients_of_a_sequence_do_not_depend_on_the_others(lens, shape, kind, data):
    inputs = packed_inputs(lens, shape, torch.float32)
    grad = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
    alone = data.draw(st.integers(0, len(lens) - 1))
    require_same_gradients(inputs, grad, lens, alone, kind=kind)


def test_a_sequence_that_is_not_finite_spoils_no_other():
    """Stale page numbers beyond a sequence's keys may point anywhere in the store."""
    q, k, v = packed_inputs([30, 100], (4, 2, 16), torch.float32)
    layout = AttentionLayout.packed((30, 100))
    before = attend(q, k, v, layout)
    k[30:], v[30:] = float("nan"), float("inf")
    after = attend(q, k, v, layout)
    assert torch.equal(after[:30], before[:30])
    assert after[30:].isnan().all()
