"""The function that stands in FlashAttention-3's place inside SGLang's `fa3` backend."""

import ast
import importlib.util
import inspect
from pathlib import Path

import pytest
import torch

from onpolicy.errors import ContractError
from onpolicy.ops.triton import attention
from sglang_patches.triton_attention import flash_attn_with_kvcache

SOURCE = "srt/layers/attention/flashattention_backend.py"


def calls_in_sglang():
    """The keyword names of every call of the function in the installed SGLang's backend."""
    root = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
    for node in ast.walk(ast.parse((root / SOURCE).read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "flash_attn_with_kvcache":
            assert not node.args
            yield {keyword.arg for keyword in node.keywords if keyword.arg is not None}


def test_every_call_in_sglang_finds_its_arguments():
    calls = list(calls_in_sglang())
    assert len(calls) > 5
    for names in calls:
        inspect.signature(flash_attn_with_kvcache).bind(**dict.fromkeys(names))


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


def test_it_hands_over_what_sglang_means(monkeypatch):
    seen = []

    def paged_attention(*args):
        seen.append(args)
        return torch.full((3, 4, 4), 7.0), None

    inspect.signature(attention.paged_attention).bind(*range(9))
    monkeypatch.setattr(attention, "paged_attention", paged_attention)
    call = given()
    assert flash_attn_with_kvcache(**call).unique().item() == 7
    names = ["q", "k_cache", "v_cache", "page_table", "cache_seqlens", "cu_seqlens_q"]
    assert all(a is call[name] for a, name in zip(seen[0], names, strict=False))
    assert seen[0][6:] == (2, 0.5, 1)
    buffer = torch.zeros(3, 4, 4)
    assert flash_attn_with_kvcache(**given(out=buffer)) is buffer
    assert buffer.unique().item() == 7


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("causal", False),
        ("window_size", (128, 0)),
        ("softcap", 30.0),
        ("return_softmax_lse", True),
        ("sinks", torch.zeros(4)),
        ("k_descale", torch.ones(2, 2)),
        ("qv", torch.zeros(3, 4, 4)),
        ("score_mod", max),
    ],
)
def test_attention_that_it_does_not_compute_is_refused_by_name(name, value):
    with pytest.raises(ContractError, match=rf"attention with {name}: has no aligned operator"):
        flash_attn_with_kvcache(**given(**{name: value}))
