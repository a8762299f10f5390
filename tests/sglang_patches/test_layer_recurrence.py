"""What SGLang is told of states; that a server keeps them is tests/e2e/test_recurrent_states.py."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from onpolicy.contract import DeltaShape
from onpolicy.models.hf_config import load_config
from onpolicy.models.size import state_bytes
from sglang_patches import layer_recurrence
from tests.support.tiny import make_checkpoint
from tests.support.tiny_contract import CONTRACT

SIZES = DeltaShape(key_heads=2, value_heads=6, key_dim=24, value_dim=16, kernel_size=4)
SHAPES = dataclasses.replace(CONTRACT.shapes, delta=(SIZES,))
RECURRENT = dataclasses.replace(CONTRACT, shapes=SHAPES, dtype="bfloat16")


@pytest.mark.parametrize(("delta", "hooks"), [((), 0), ((SIZES,), 4)])
def test_an_engine_of_a_model_without_states_has_none_of_the_hooks(delta, hooks, monkeypatch):
    asked = []
    monkeypatch.setattr(layer_recurrence.registry, "hook", lambda *hook: asked.append(hook))
    shapes = dataclasses.replace(SHAPES, delta=delta)
    layer_recurrence.install(dataclasses.replace(RECURRENT, shapes=shapes))
    assert len(asked) == hooks


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """(SGLang's pool for two requests, what it was told, the configuration)."""
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    path = make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3.5")
    config = load_config(str(path))
    spec, states = layer_recurrence.states_of(config, RECURRENT)
    assert spec.uses_mamba_radix_cache and isinstance(config, spec.config_class)
    params = states.mamba2_cache_params
    made = HybridReqToTokenPool(
        size=2, mamba_size=3, mamba_spec_state_size=2, max_context_len=32, device="cpu",
        enable_memory_saver=False, cache_params=params, mamba_layer_ids=params.layers,
        enable_mamba_extra_buffer=False,
    )  # fmt: skip
    return made, states, config


def test_sglangs_pool_holds_the_operators_states_and_as_many_bytes_as_are_counted(pool):
    made, states, config = pool
    assert states.full_attention_layer_ids == [1]
    assert states.mamba2_cache_params.mamba_cache_per_req == state_bytes(config, RECURRENT)
    for layer in (0, 2):
        held = made.mamba2_layer_cache(layer)
        assert (held.conv[0].dtype, held.temporal.dtype) == (torch.bfloat16, torch.float32)
        assert held.conv[0].shape == (4, 3, SIZES.channels)
        assert held.temporal.shape[:2] == (4, 6) and held.temporal.is_contiguous()
    with pytest.raises(AssertionError):
        made.mamba2_layer_cache(1)


def test_sglang_copies_a_whole_state_bit_for_bit(pool):
    made, *_ = pool
    for layer in (0, 2):
        held = made.mamba2_layer_cache(layer)
        held.temporal.copy_(torch.randn_like(held.temporal))
        held.conv[0].copy_(torch.randn_like(held.conv[0]))
    made.mamba_pool.copy_from(torch.tensor([1]), torch.tensor([3]))
    for layer in (0, 2):
        held = made.mamba2_layer_cache(layer)
        for states in (held.temporal, held.conv[0]):
            assert torch.equal(states[1], states[3]) and not torch.equal(states[1], states[2])


SLOTS = torch.tensor([4, 2, 9])


def test_a_prefill_begins_where_its_cached_prefix_ends():
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND, extend_seq_lens_cpu=[7, 1, 48],
        extend_prefix_lens_cpu=[0, 64, 3],
    )  # fmt: skip
    layout = layer_recurrence.layout_of(batch, SLOTS)
    assert (layout.query_lens, layout.past_lens) == ((7, 1, 48), (0, 64, 3))
    assert layout.slots is SLOTS


def test_a_decoded_token_comes_after_all_before_it():
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    batch = SimpleNamespace(forward_mode=ForwardMode.DECODE, seq_lens=torch.tensor([65, 2, 128]))
    layout = layer_recurrence.layout_of(batch, SLOTS)
    assert (layout.query_lens, layout.past_lens) == ((1, 1, 1), (64, 1, 127))
