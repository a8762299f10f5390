"""The sizes of heads in SGLang are the contract's; that a server computes with them is an e2e test."""

import dataclasses
from types import SimpleNamespace

import pytest

from onpolicy.contract import AttentionShape
from onpolicy.errors import ContractError
from sglang_patches import head_sizes
from tests.support.tiny_contract import CONTRACT

LATENT = AttentionShape(heads=4, kv_heads=4, head_dim=48, value_dim=24)


def contract_of(*kinds):
    shapes = dataclasses.replace(CONTRACT.shapes, attention=kinds)
    return dataclasses.replace(CONTRACT, shapes=shapes)


@pytest.fixture
def hooks(monkeypatch):
    installed = {}
    monkeypatch.setattr(
        head_sizes.registry,
        "hook",
        lambda target, function, kind: installed.update({target: function}),
    )
    return installed


def test_cache_and_layers_get_whole_keys_and_values(hooks):
    from sglang.srt.configs.model_config import AttentionArch

    head_sizes.install(contract_of(LATENT, dataclasses.replace(LATENT, window=8)))
    config = SimpleNamespace(attention_arch=AttentionArch.MLA, head_dim=256, v_head_dim=24)
    hooks[head_sizes.CONFIG_TARGET](None, config)
    assert (config.attention_arch, config.head_dim, config.v_head_dim) == (
        AttentionArch.MHA,
        48,
        24,
    )
    layers = {0: SimpleNamespace(head_dim=16, qk_head_dim=16, v_head_dim=16)}
    hooks[head_sizes.LAYERS_TARGET](layers)
    assert vars(layers[0]) == {"head_dim": 48, "qk_head_dim": 48, "v_head_dim": 24}


SEVERAL = (LATENT, dataclasses.replace(LATENT, head_dim=32, value_dim=32))


def test_the_cache_has_the_largest_sizes_of_all_layers(hooks):
    assert head_sizes.head_sizes(contract_of(*SEVERAL)) == (48, 32)


def test_heads_of_several_sizes_are_refused_where_other_attention_reads_the_cache(hooks):
    contract = dataclasses.replace(contract_of(*SEVERAL), device="cuda")
    with pytest.raises(ContractError, match=r"\(head_dim, value_dim\)=\[\(32, 32\), \(48, 24\)\]"):
        head_sizes.install(contract)
