import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.ops import AttentionLayout, Scores
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.cpu import attention_tiles as module
from tests.support.violations import break_gradient

OPERATORS = CpuOperators(1)

heads = st.sampled_from([(1, 1, 16), (4, 2, 16), (6, 2, 24), (8, 1, 32), (4, 4, 48), (40, 2, 8)])
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
lens = st.lists(st.integers(1, 300), min_size=1, max_size=6)


def packed_inputs(lens, shape, dtype):
    num_heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(sum(lens) * 31 + dim)
    q = torch.randn(sum(lens), num_heads, dim, generator=generator).to(dtype)
    k = torch.randn(sum(lens), kv_heads, dim, generator=generator).to(dtype)
    v = torch.randn(sum(lens), kv_heads, dim, generator=generator).to(dtype)
    return q, k, v


def attend(q, k, v, layout, operators=OPERATORS):
    with torch.no_grad():
        return operators.attention(q, k, v, layout, Scores(q.shape[-1] ** -0.5))


@given(lens, heads, dtypes, st.data())
def test_a_sequence_does_not_depend_on_the_others(lens, shape, dtype, data):
    q, k, v = packed_inputs(lens, shape, dtype)
    together = attend(q, k, v, AttentionLayout.packed(tuple(lens))).split(lens)
    order = data.draw(st.permutations(range(len(lens))))
    parts = [torch.cat([x.split(lens)[i] for i in order]) for x in (q, k, v)]
    shuffled_lens = tuple(lens[i] for i in order)
    shuffled = attend(*parts, AttentionLayout.packed(shuffled_lens)).split(shuffled_lens)
    for position, i in enumerate(order):
        assert torch.equal(shuffled[position], together[i])
        alone = attend(*(x.split(lens)[i] for x in (q, k, v)), AttentionLayout.packed((lens[i],)))
        assert torch.equal(alone, together[i])


@given(lens, heads, dtypes, st.data())
def test_chunks_with_a_cached_prefix_and_decode_steps_equal_the_whole(lens, shape, dtype, data):
    """Any last part of each sequence as queries, keys scattered over a paged store."""
    q, k, v = packed_inputs(lens, shape, dtype)
    whole = attend(q, k, v, AttentionLayout.packed(tuple(lens))).split(lens)
    counts = [data.draw(st.sampled_from([1, n, data.draw(st.integers(1, n))])) for n in lens]
    pages = torch.tensor(data.draw(st.permutations(range(sum(lens) + 5))))
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
def test_threads_do_not_change_bits(lens, shape):
    q, k, v = packed_inputs(lens, shape, torch.float32)
    layout = AttentionLayout.packed(tuple(lens))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onpolicy.ops.cpu.threads.MIN_PARALLEL_FLOPS", 0)
        three = attend(q, k, v, layout, CpuOperators(3))
    assert torch.equal(attend(q, k, v, layout), three)


@given(lens, heads)
def test_the_memory_bound_does_not_change_bits(lens, shape):
    q, k, v = packed_inputs(lens, shape, torch.float32)
    whole = attend(q, k, v, AttentionLayout.packed(tuple(lens)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_FLOATS", 1)
        assert torch.equal(attend(q, k, v, AttentionLayout.packed(tuple(lens))), whole)


@given(lens, heads)
def test_results_and_gradients_are_close_to_scaled_dot_product_attention(lens, shape):
    inputs = [x.requires_grad_() for x in packed_inputs(lens, shape, torch.float32)]
    layout, scale = AttentionLayout.packed(tuple(lens)), shape[2] ** -0.5
    got = OPERATORS.attention(*inputs, layout, Scores(scale))
    want = torch.cat(
        [
            F.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in parts),
                is_causal=True,
                scale=scale,
                enable_gqa=True,
            )[0].transpose(0, 1)
            for parts in zip(*(x.split(lens) for x in inputs), strict=True)
        ]
    )
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    grad = torch.randn_like(got)
    for ours, theirs in zip(
        torch.autograd.grad(got, inputs, grad), torch.autograd.grad(want, inputs, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def gradients(inputs, grad, lens, operators=OPERATORS):
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = operators.attention(*inputs, AttentionLayout.packed(tuple(lens)), Scores(0.3))
    return torch.autograd.grad(out, inputs, grad)


def require_same_gradients(inputs, grad, lens, alone, operators=OPERATORS):
    """A sequence's queries, keys and values get back alone what they get back among the others."""
    together = gradients(inputs, grad, lens, operators)
    parts = [x.split(lens)[alone] for x in inputs]
    ours = gradients(parts, grad.split(lens)[alone], [lens[alone]], operators)
    for name, got, want in zip("qkv", ours, together, strict=True):
        assert torch.equal(got, want.split(lens)[alone]), f"gradient of {name}"


@given(lens, heads, st.data())
def test_gradients_of_a_sequence_do_not_depend_on_the_others(lens, shape, data):
    inputs = packed_inputs(lens, shape, torch.float32)
    grad = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
    require_same_gradients(inputs, grad, lens, data.draw(st.integers(0, len(lens) - 1)))


def test_gradients_that_depend_on_the_batch_are_found():
    inputs, lens = packed_inputs([40, 9], (4, 2, 16), torch.float32), [40, 9]
    grad = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
    require_same_gradients(inputs, grad, lens, 1)
    with pytest.raises(AssertionError, match="gradient of q"):
        broken = break_gradient(CpuOperators(), "attention")
        require_same_gradients(inputs, grad, lens, 1, broken)


@given(lens, heads)
def test_threads_do_not_change_gradients(lens, shape):
    """They share out sequences, and what shares a piece of work must not matter."""
    inputs = packed_inputs(lens, shape, torch.float32)
    grad = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onpolicy.ops.cpu.threads.MIN_PARALLEL_FLOPS", 0)
        three = gradients(inputs, grad, lens, CpuOperators(3))
    for got, want in zip(three, gradients(inputs, grad, lens), strict=True):
        assert torch.equal(got, want)


def test_queries_see_no_later_key():
    q, k, v = packed_inputs([100], (4, 2, 16), torch.float32)
    layout = AttentionLayout.packed((100,))
    before = attend(q, k, v, layout)
    k[60:], v[60:] = 1e4, -1e30
    after = attend(q, k, v, layout)
    assert torch.equal(after[:60], before[:60])
    assert not torch.equal(after[60:], before[60:])


def test_a_sequence_that_is_not_finite_spoils_no_other():
    """Stale page numbers beyond a sequence's keys may point anywhere in the store."""
    q, k, v = packed_inputs([30, 100], (4, 2, 16), torch.float32)
    layout = AttentionLayout.packed((30, 100))
    before = attend(q, k, v, layout)
    k[30:], v[30:] = float("nan"), float("inf")
    after = attend(q, k, v, layout)
    assert torch.equal(after[:30], before[:30])
    assert after[30:].isnan().all()


def test_value_heads_may_have_another_size():
    q, k, _ = packed_inputs([30], (4, 2, 16), torch.float32)
    v = torch.randn(30, 2, 24)
    assert attend(q, k, v, AttentionLayout.packed((30,))).shape == (30, 4, 24)
