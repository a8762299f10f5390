"""What engines without adapters are pushed."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from onpolicy.cli.main import main
from onpolicy.errors import WeightSyncError
from onpolicy.models.lora.adapters import is_adapters
from onpolicy.models.lora.merged import Merged, merge_push
from onpolicy.run.commands.verification import fill_with_drawn
from tests.onpolicy.training.fsdp.test_trainer import maker_of
from tests.support.tiny import make_checkpoint

BUCKET_BYTES = 20_000

CASES = {
    "LoRA": ("qwen3", "float32", {"lora_target_modules": "q_proj,down_proj,lm_head"}),
    "LoRA in bfloat16": ("qwen3", "bfloat16", {"lora_rslora": True}),
    "experts": ("glm4-moe", "float32", {}),
    "experts whose matrices are transposed": ("gpt-oss", "float32", {}),
}


@pytest.fixture(params=CASES)
def made(request, tmp_path):
    """(a stock trainer with adapters that change everything, its base's directory, dtype)"""
    architecture, dtype, flags = CASES[request.param]
    base = make_checkpoint(tmp_path / "base", architecture)
    if dtype == "bfloat16":  # else export would add to other numbers than the trainer holds
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(base)
    trainer = maker_of(base)(dtype, aligned=False, lora={"lora_rank": 4, **flags})
    fill_with_drawn(trainer, 0)
    return trainer, base, dtype


def parts_of(trainer):
    return {
        part: trainer.policy.weight_buckets(BUCKET_BYTES, part) for part in ("trained", "frozen")
    }


def whole(buckets):
    return {name: tensor for bucket in buckets for name, tensor in bucket}


def test_a_push_is_what_export_merges_bit_for_bit(made, tmp_path):
    trainer, base, dtype = made
    trainer.export(tmp_path / "adapter")
    argv = ["--hf-checkpoint", str(base), "--merge", str(tmp_path / "adapter"), "--dtype", dtype]
    assert main(["export", *argv, "--output", str(tmp_path / "merged")]) == 0
    written = {}
    for file in (tmp_path / "merged").glob("*.safetensors"):
        written |= load_file(file)
    merging = trainer._merging
    pushed = whole(merging.buckets(parts_of(trainer)))
    assert pushed.keys() == written.keys() and not any(map(is_adapters, pushed))
    assert all(torch.equal(tensor, written[name]) for name, tensor in pushed.items())
    unmerged = whole(parts_of(trainer)["frozen"])
    changed = [name for name in unmerged if not torch.equal(unmerged[name], pushed[name])]
    assert changed and len(changed) == merging._last.linears
    assert 0 < merging.metrics()["lora/merged_changed"] <= 1
    assert merging.metrics()["lora/merged_rounding"] < (1e-3 if dtype == "float32" else 0.5)


def test_adapters_that_add_nothing_change_nothing(checkpoint):
    trainer = maker_of(checkpoint)("bfloat16", aligned=False, lora={"lora_rank": 4})
    merging = trainer._merging
    pushed = whole(merging.buckets(parts_of(trainer)))
    unmerged = whole(parts_of(trainer)["frozen"])
    assert all(torch.equal(tensor, pushed[name]) for name, tensor in unmerged.items())
    assert merging.metrics() == {"lora/merged_changed": 0.0, "lora/merged_rounding": 0.0}


def test_no_adapter_is_left_out(made):
    trainer, *_ = made
    merging, parts = trainer._merging, parts_of(trainer)
    left = ([pair for pair in bucket if ".1." not in pair[0]] for bucket in parts["frozen"])
    with pytest.raises(WeightSyncError, match=r"weights=.*layers\.1\..* have adapters, and"):
        whole(merge_push(parts["trained"], left, merging._model, merging._scale, Merged()))


def test_an_aligned_engine_has_adapters_of_its_own(checkpoint):
    for aligned in (True, False):
        trainer = maker_of(checkpoint)(aligned=aligned, lora={"lora_rank": 4})
        contract, merges = trainer.contract, not aligned
        assert contract.merges_adapter == merges
        assert contract.of_engine == dataclasses.replace(
            contract, adapter=None if merges else contract.adapter
        )
