"""The function that stands in FlashAttention-3's place inside SGLang's `fa3` backend."""

import ast
import inspect

import pytest
import torch

from onpolicy.errors import ContractError
from onpolicy.ops import Operators, PagedLayout, ScoreRule
from onpolicy.ops.hopper import HopperOperators, flash_attention
from onpolicy.ops.triton import TritonOperators, attention
from sglang_patches.paged_attention import attend
from tests.support.flash_attention_backend import tree
from tests.support.recorded_kernels import flash_attn


def calls_in_sglang():
    """The keyword names of every call of the function in the installed SGLang's backend."""
    for node in ast.walk(tree()):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "flash_attn_with_kvcache":
            assert not node.args
            yield {keyword.arg for keyword in node.keywords if keyword.arg is not None}


def test_every_call_in_sglang_finds_its_arguments():
    calls = list(calls_in_sglang())
    assert len(calls) > 5
    for names in calls:
        inspect.signature(attend).bind(None, **dict.fromkeys(names))


def given(**changes):
    store = torch.zeros(6, 1, 2, 4)
    return {
        "q": torch.zeros(3, 4, 4), "k_cache": store, "v_cache": store + 1,
        "page_table": torch.zeros(2, 3, dtype=torch.int32),
        "cache_seqlens": torch.tensor([3, 2], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 2, 3], dtype=torch.int32), "max_seqlen_q": 2,
        "softmax_scale": 0.5, "causal": True, "window_size": (-1, -1), "softcap": 0.0,
        "return_softmax_lse": False, "num_splits": 1, "ver": 3, "out": None,
        "cu_seqlens_k_new": torch.tensor([0, 3, 5]), "scheduler_metadata": None, **changes,
    }  # fmt: skip


def test_it_hands_the_operator_what_sglang_means():
    class Noted:
        def paged_attention(self, *args):
            self.seen = args
            return "the result"

    inspect.signature(Operators.paged_attention).bind(*range(7))
    call = given(
        scheduler_metadata=torch.zeros(2), out=torch.zeros(3, 4, 4), window_size=(31, 0), softcap=30.0,
        sinks=torch.zeros(4),
    )  # fmt: skip
    operators = Noted()
    assert attend(operators, **call) == "the result"
    q, k, v, layout, scores, out = operators.seen
    assert q is call["q"] and k is call["k_cache"] and v is call["v_cache"] and out is call["out"]
    assert scores == ScoreRule(0.5, window=32, softcap=30.0) and scores.sinks is call["sinks"]
    assert (layout.page_size, layout.max_query_len) == (1, 2)
    assert layout.page_table is call["page_table"]
    assert layout.key_lens is call["cache_seqlens"]
    assert layout.query_starts is call["cu_seqlens_q"]
    assert {**layout.schedule} == {
        name: call[name] for name in ("cu_seqlens_k_new", "scheduler_metadata")
    }


def test_triton_computes_it_by_its_own_kernel(monkeypatch):
    seen = []

    def blockwise_attention(q, k, v, layout, scores):
        seen.append((q, k, v, layout, scores))
        return torch.full((3, 4, 4), 7.0), None

    inspect.signature(attention.blockwise_attention).bind(*range(5))
    monkeypatch.setattr(attention, "blockwise_attention", blockwise_attention)
    call = given()
    assert attend(TritonOperators(), **call).unique().item() == 7
    q, *stores, layout, scores = seen[0]
    assert q is call["q"] and (scores, scores.sinks) == (ScoreRule(0.5), None)
    for store, name in zip(stores, ("k_cache", "v_cache"), strict=True):
        assert torch.equal(store, call[name].flatten(0, 1))
        assert store.data_ptr() == call[name].data_ptr()
    assert layout.page_table is call["page_table"] and layout.key_lens is call["cache_seqlens"]
    assert layout.query_starts is call["cu_seqlens_q"]
    assert (layout.max_query_len, layout.page_size) == (2, 1)
    buffer = torch.zeros(3, 4, 4)
    assert attend(TritonOperators(), **given(out=buffer)) is buffer
    assert buffer.unique().item() == 7


def test_hopper_calls_flash_attention_3_with_all_that_sglang_gives_it(monkeypatch):
    calls = []
    monkeypatch.setattr(flash_attention, "loaded", lambda: flash_attn(calls))
    operators = HopperOperators.__new__(HopperOperators)  # without loading the libraries
    schedule = torch.zeros(2, dtype=torch.int32)
    call = given(scheduler_metadata=schedule, out=torch.zeros(3, 4, 4))
    attend(operators, **call)
    # The version is 3, the default; every other argument is SGLang's.
    for name, value in call.items():
        got = getattr(calls[0], name)
        assert got is value or (not isinstance(value, torch.Tensor) and got == value), name


def test_an_engines_pages_taken_apart_are_its_rows():
    layout = PagedLayout(
        page_table=torch.tensor([[3, 1], [0, 0]], dtype=torch.int32), page_size=2,
        key_lens=torch.tensor([3, 1]), query_starts=torch.tensor([0, 2, 3]), max_query_len=2,
    )  # fmt: skip
    rows = layout.by_rows()
    assert (rows.query_lens, rows.key_lens) == ((2, 1), (3, 1))
    assert rows.key_rows.tolist() == [[6, 7, 2, 3], [0, 1, 0, 1]]
    assert layout.by_rows() is rows  # worked out once for all layers


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("causal", False),
        ("window_size", (128, 128)),
        ("return_softmax_lse", True),
        ("k_descale", torch.ones(2, 2)),
        ("qv", torch.zeros(3, 4, 4)),
        ("score_mod", max),
    ],
)
def test_attention_that_it_does_not_compute_is_refused_by_name(name, value):
    with pytest.raises(ContractError, match=rf"attention with {name}: has no aligned operator"):
        attend(None, **given(**{name: value}))
