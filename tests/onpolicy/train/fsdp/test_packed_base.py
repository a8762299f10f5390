"""A base that a trainer keeps as codes and scales has the bits of one that it keeps rounded."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from onpolicy.errors import ConfigError
from onpolicy.models.quantised import export_quantised
from onpolicy.train.fsdp import packed_base
from onpolicy.train.fsdp.packed_base import is_packed
from onpolicy.weights import packing
from onpolicy.weights.packed_tensor import memory_of, pack_groups
from onpolicy.weights.rounding import FORMATS
from tests.support.megatron_training import Job, equal, make, make_samples, train, weights
from tests.support.tiny import make_checkpoint

ROWS_OF_128 = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("mixture"), "qwen3-moe")


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("wide"), **ROWS_OF_128)


def job(path, weight_format="int4", packs=True, dtype="bfloat16", **lora):
    changes = {
        "engine": {"rollout_weight_format": weight_format},
        "lora": {"lora_rank": 4, "train_pack_weights": packs, **lora},
        "operators": {"row_parallel_blocks": 1},
    }
    return Job(path=path, backend="fsdp", dtype=dtype, changes=changes)


def packed_of(trainer):
    named = trainer.policy.module.named_parameters()
    return {name: parameter for name, parameter in named if is_packed(parameter)}


def require_the_same(path, *args, **lora):
    """Samples, metrics, the reference's too, and what is pushed, of two steps."""
    kept, packed = (train(job(path, *args, packs=packs, **lora)) for packs in (False, True))
    assert packed[0] == kept[0] and equal(packed[2], kept[2])
    assert all(step["parity/num_mismatched_tokens"] == 0 for step in packed[1])


@pytest.mark.parametrize("weight_format", FORMATS)
def test_steps_have_the_bits_of_a_base_that_is_not_packed(wide, weight_format):
    require_the_same(wide, weight_format)


@pytest.mark.parametrize("lora", [{}, {"lora_rslora": True}], ids=["plain", "rslora"])
def test_so_have_those_of_experts(mixture, lora):
    require_the_same(mixture, "int8", **lora)


def test_so_have_those_that_compute_activations_again(wide):
    again = {"activation_checkpointing": True}
    kept, packed = (job(wide, packs=packs) for packs in (False, True))
    kept, packed = (replace(x, changes={**x.changes, "trainer": again}) for x in (kept, packed))
    kept, packed = train(kept), train(packed)
    assert packed[0] == kept[0] and equal(packed[2], kept[2])


def test_so_have_those_in_float32_of_rows_with_an_odd_number_of_codes(tmp_path):
    path = make_checkpoint(tmp_path, intermediate_size=45)
    kept, packed = (make(job(path, "int3", packs, "float32")) for packs in (False, True))
    assert equal(weights(packed), weights(kept))


def test_a_base_that_was_exported_packs_to_the_bits_that_were_deployed(mixture, tmp_path):
    AutoModelForCausalLM.from_pretrained(mixture, dtype="bfloat16").save_pretrained(tmp_path / "hf")
    export_quantised(tmp_path / "hf", tmp_path / "int4", "int4")
    kept, packed = make(job(mixture, packs=False)), make(job(tmp_path / "int4"))
    assert packed_of(packed) and equal(weights(packed), weights(kept))


def test_linears_and_experts_take_the_memory_of_their_format_and_nothing_else_is_packed(mixture):
    trainer = make(job(mixture))
    packed, policy = packed_of(trainer), trainer.policy
    frozen = {n: p for n, p in policy.module.named_parameters() if not p.requires_grad}
    kept = {name.rpartition("layers.")[2] for name in frozen.keys() - packed.keys()}
    assert all(
        "norm" in name or "embed" in name or "gate" in name or "head" in name for name in kept
    )
    assert any("experts" in name for name in packed)
    for parameter in packed.values():
        rows, columns = parameter.numel() // parameter.shape[-1], parameter.shape[-1]
        assert memory_of(parameter).nbytes == rows * (columns // 2 + 4)


def test_numbers_are_freed_after_a_pass_and_after_a_step(wide):
    trainer = make(job(wide))
    states = [m._get_fsdp_state() for m in trainer.policy.module.layers]
    held = [p for state in states for p in state._fsdp_param_group.fsdp_params]
    for _ in range(2):
        samples = make_samples(trainer)
        whole = [x for p in held for x in p._unsharded_inner_tensors]
        assert len(whole) == len(packed_of(trainer))
        assert not any(x.untyped_storage().nbytes() for x in whole)
        trainer.train(samples, 0, [1e-3])


def test_a_packed_base_leaves_its_device_and_comes_back(wide):
    trainer = make(job(wide))
    before = weights(trainer)
    trainer.release_memory("weights")
    assert not any(memory_of(p).untyped_storage().nbytes() for p in packed_of(trainer).values())
    trainer._bring_back("weights")
    assert equal(weights(trainer), before)


def test_a_code_that_changes_is_noticed(wide):
    trainer = make(job(wide))
    before, pushed = trainer.policy.frozen_digest(), weights(trainer)
    *_, parameter = packed_of(trainer).values()
    memory_of(parameter)[0, 0] ^= 1
    assert trainer.policy.frozen_digest() != before
    assert not equal(weights(trainer), pushed)


def test_nothing_is_written_into_a_packed_weight(wide):
    *_, parameter = packed_of(make(job(wide))).values()
    with pytest.raises(TypeError, match="a packed weight is not written into"), torch.no_grad():
        parameter.zero_()


def test_rows_that_are_no_whole_blocks_are_refused_by_name(checkpoint):
    says = (
        r"--train-pack-weights: model.layers.0.self_attn.q_proj.weight has \d+ rows .* of 128 rows"
    )
    with pytest.raises(ConfigError, match=says):
        make(job(checkpoint, "fp8_e4m3_block128"))


def test_codes_that_would_not_give_the_weight_again_are_refused(monkeypatch):
    decode = packing.decode
    monkeypatch.setattr(packing, "decode", lambda *args: decode(*args) * (1 + 2**-20))
    with pytest.raises(ValueError, match=r"weight_format=int4: .* do not come back"):
        pack_groups(torch.randn(4, 8), "int4")


def test_ranks_that_would_share_a_block_of_rows_are_refused(monkeypatch):
    monkeypatch.setattr(packed_base.distributed, "world_size", lambda: 2)
    with pytest.raises(ConfigError, match=r"k_proj.* on ranks=2, .* in blocks of 128 rows"):
        packed_base._require_rows(
            "k_proj", torch.empty(128, 64), {"k_proj.weight": torch.empty(128, 64)}, 128
        )
