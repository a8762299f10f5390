"""Heads of several sizes in SGLang; that a server computes with heads of any size is an e2e test."""

import dataclasses

import pytest

from onpolicy.contract import AttentionShape
from onpolicy.errors import ContractError
from sglang_patches import head_sizes
from tests.support.tiny_contract import CONTRACT

SEVERAL = (
    AttentionShape(heads=4, kv_heads=4, head_dim=48, value_dim=24),
    AttentionShape(heads=4, kv_heads=4, head_dim=32, value_dim=32),
)


def test_heads_of_several_sizes_are_refused_where_other_attention_reads_the_cache(monkeypatch):
    monkeypatch.setattr(head_sizes.registry, "hook", lambda *_: None)
    shapes = dataclasses.replace(CONTRACT.shapes, attention=SEVERAL)
    contract = dataclasses.replace(CONTRACT, shapes=shapes, device="cuda")
    with pytest.raises(ContractError, match=r"\(head_dim, value_dim\)=\[\(32, 32\), \(48, 24\)\]"):
        head_sizes.install(contract)
