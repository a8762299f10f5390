"""Attention by FlashAttention-3: one paged call for every layout, and gradients from its lse."""

from contextlib import suppress

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onpolicy.errors import ContractError
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.hopper import HopperOperators, flash_attention
from onpolicy.ops.hopper.flash_attention import PackedKeys
from onpolicy.ops.layouts import AttentionLayout, ScoreRule
from tests.support.recorded_kernels import attend, flash_attn

HEADS, KV_HEADS, DIM, SCALE = 4, 2, 16, 0.25


@pytest.fixture
def calls(monkeypatch):
    made = []
    module = flash_attn(made)
    monkeypatch.setattr(flash_attention, "loaded", lambda: module)
    monkeypatch.setattr(flash_attention, "has_upstream", lambda: True)
    return made


@pytest.fixture
def operators():
    return HopperOperators.__new__(HopperOperators)  # without loading the libraries


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def inputs(queries, keys):
    return random(queries, HEADS, DIM), random(keys, KV_HEADS, DIM), 2 * random(keys, KV_HEADS, DIM)


def scattered():
    """Prefixes in a store of 32 rows, in no order, some rows unused."""
    rows = torch.randperm(32, generator=torch.Generator().manual_seed(2))
    return AttentionLayout(
        query_lens=(3, 1, 5), key_lens=(9, 4, 5), key_rows=rows[:27].view(3, 9).contiguous()
    )


LAYOUTS = {
    "packed": (AttentionLayout.packed((7, 1, 12)), 20, 20),
    "prefixes": (scattered(), 9, 32),
    "a decode step": (
        AttentionLayout(query_lens=(1, 1), key_lens=(8, 3), key_rows=torch.arange(16).view(2, 8)),
        2,
        16,
    ),
}


@pytest.mark.parametrize(("layout", "queries", "keys"), LAYOUTS.values(), ids=LAYOUTS)
def test_it_is_called_like_sglang_calls_it_and_means_the_same(
    calls, operators, layout, queries, keys
):
    q, k, v = inputs(queries, keys)
    with torch.no_grad():
        got = operators.attention(q, k, v, layout, ScoreRule(SCALE))
        again = operators.attention(q, k, v, layout, ScoreRule(SCALE))
        want = CpuOperators().attention(q, k, v, layout, ScoreRule(SCALE))
    torch.testing.assert_close(got, want)
    assert torch.equal(got, again)
    assert calls[0].num_splits == 1 and calls[0].causal and calls[0].k_cache.shape[1] == 1
    assert calls[0].page_table is calls[1].page_table  # worked out once for all layers


@pytest.mark.parametrize("name", ["packed", "prefixes"])
def test_gradients_reach_the_rows_that_keys_came_from(calls, operators, name):
    layout, queries, keys = LAYOUTS[name]
    ours = [x.requires_grad_() for x in inputs(queries, keys)]
    grad = random(queries, HEADS, DIM)
    operators.attention(*ours, layout, ScoreRule(SCALE)).backward(grad)
    q, k, v = (x.detach().clone().requires_grad_() for x in ours)
    keys, query_starts = PackedKeys.of(layout), layout.by_pages().query_starts
    out, _ = attend(q, k[keys.rows], v[keys.rows], query_starts, keys.starts, SCALE)
    out.backward(grad)
    for a, b in zip(ours, (q, k, v), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize(
    "scores", [ScoreRule(SCALE, window=5), ScoreRule(SCALE, softcap=1.0), ScoreRule(SCALE, 8, 2.0)]
)
def test_windows_and_soft_caps_mean_what_they_mean_on_a_cpu(calls, operators, scores):
    layout, queries, keys = LAYOUTS["packed"]
    ours = [x.requires_grad_() for x in inputs(queries, keys)]
    theirs = [x.detach().clone().requires_grad_() for x in ours]
    grad = random(queries, HEADS, DIM)
    if scores.softcap:  # its backward pass is Triton's
        with torch.no_grad():
            got, want = (o.attention(*ours, layout, scores) for o in (operators, CpuOperators()))
        return torch.testing.assert_close(got, want)
    operators.attention(*ours, layout, scores).backward(grad)
    CpuOperators().attention(*theirs, layout, scores).backward(grad)
    assert calls[0].window_size == (4, 0)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize(
    ("dim", "value_dim", "scores", "fits"),
    [
        (192, 192, ScoreRule(1.0, window=8), True),
        (256, 256, ScoreRule(1.0, softcap=8.0), True),
        (256, 256, ScoreRule(1.0, window=8), False),
        (128, 128, ScoreRule(1.0, sinks=torch.zeros(1)), False),
        (192, 128, ScoreRule(1.0), False),
    ],
)
def test_what_its_kernels_might_sum_in_two_ways_is_left_to_triton(dim, value_dim, scores, fits):
    q, v = torch.empty(1, 1, dim), torch.empty(1, 1, value_dim)
    assert flash_attention.fits(q, v, scores) is fits


class _Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen[str(function)] = torch.are_deterministic_algorithms_enabled()
        return function(*args, **(kwargs or {}))


def test_pytorchs_backward_takes_our_call_and_runs_deterministically(monkeypatch):
    layout, queries, keys = LAYOUTS["packed"]
    q, k, v = (x.to("meta", torch.bfloat16) for x in inputs(queries, keys))
    lse = torch.empty(HEADS, queries, device="meta")
    with _Watch() as watch:
        monkeypatch.setattr(flash_attention, "has_upstream", lambda: False)
        grads = flash_attention.packed_backward((q, q, k, v, q, lse), layout, ScoreRule(SCALE))
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
    assert watch.seen["aten._flash_attention_backward.default"]
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("dim", "upstream", "chosen"),
    [
        (128, True, "flash_attn_3.bwd"),
        (128, False, "aten._flash_attention_backward"),
        (256, True, "aten._flash_attention_backward"),
    ],
)
def test_the_backward_is_upstreams_where_it_is_installed_and_can_be_deterministic(
    monkeypatch, dim, upstream, chosen
):
    monkeypatch.setattr(flash_attention, "has_upstream", lambda: upstream)
    q, layout = torch.empty(1, 1, dim, device="meta"), AttentionLayout.packed((1,))
    with _Watch() as watch, suppress(NotImplementedError):  # upstream's has no meta tensors
        flash_attention.packed_backward((q, q, q, q, q, q[0]), layout, ScoreRule(1.0))
    backward = {"flash_attn_3.bwd", "aten._flash_attention_backward"}
    assert {name.removesuffix(".default") for name in watch.seen} & backward == {chosen}


def test_pages_hold_int32_tables_and_the_rows_of_keys_end_to_end():
    layout = scattered()
    pages, keys, table = flash_attention.int32_pages(layout), PackedKeys.of(layout), layout.key_rows
    assert pages.page_table.dtype == pages.query_starts.dtype == pages.key_lens.dtype == torch.int32
    assert (pages.page_size, pages.page_table.tolist()) == (1, table.tolist())
    assert pages.query_starts.tolist() == [0, 3, 4, 9]
    assert (pages.max_query_len, pages.key_lens.tolist()) == (5, [9, 4, 5])
    assert keys.starts.tolist() == [0, 9, 13, 18]
    assert keys.rows.tolist() == [*table[0, :9], *table[1, :4], *table[2, :5]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the library may be there")
def test_a_library_that_cannot_be_loaded_is_named_with_a_remedy():
    with pytest.raises(
        ContractError, match=r"sgl_kernel.flash_attn: cannot.*sglang-kernel.*--operators"
    ):
        flash_attention.loaded()
