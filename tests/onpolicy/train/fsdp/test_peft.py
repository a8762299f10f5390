"""The package peft computes with our adapters what we compute with them."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from onpolicy.models.adapters import adapters
from tests.onpolicy.train.fsdp.test_trainer import make, make_samples

__all__ = ["make"]

peft = pytest.importorskip("peft")

CLOSE = 1e-5
"""Between log-probabilities of float32 models that sum in other orders."""

KINDS = {
    "all linears": {},
    "named ones": {"lora_target_modules": "q_proj,down_proj"},
    "rsLoRA": {"lora_rslora": True, "lora_alpha": 4.0},
}


def drawn(trainer):
    """The trainer, with adapters that change every log-probability."""
    torch.manual_seed(0)
    with torch.no_grad():
        for adapter in adapters(trainer.policy.module):
            adapter.B.to_local().normal_(std=0.05)
    return trainer


def scored(samples, model):
    """Log-probabilities of the samples' sampled tokens by a model of transformers."""
    found = []
    for sample in (each.sample for each in samples):
        ids, asked = torch.tensor(sample.token_ids), len(sample.rollout_log_probs)
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0]
        table = torch.log_softmax(logits[:-1], dim=-1)
        found.append(table.gather(1, ids[1:, None])[-asked:, 0])
    return torch.cat(found)


def ours(samples):
    return torch.tensor([x for s in samples for x in s.sample.rollout_log_probs])


@pytest.mark.parametrize("kind", KINDS)
def test_peft_computes_with_what_we_wrote_what_we_compute(make, checkpoint, tmp_path, kind):
    trainer = drawn(make(lora={"lora_rank": 4, **KINDS[kind]}))
    samples = make_samples(trainer)
    trainer.export(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    without = scored(samples, base)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert (scored(samples, model) - ours(samples)).abs().max() < CLOSE
    assert (without - ours(samples)).abs().max() > 100 * CLOSE
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.Linear):
            module.scaling["default"] *= 1.01
    assert (scored(samples, model) - ours(samples)).abs().max() > 10 * CLOSE
