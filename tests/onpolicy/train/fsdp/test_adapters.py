"""A trainer of adapters: what moves, what is kept, and what is scored without them."""

import json

import pytest
import torch
from safetensors.torch import load_file

from onpolicy.models.lora.adapters import adapters
from onpolicy.models.trainable import trainable_parameters
from tests.onpolicy.train.fsdp.test_trainer import RATES, make, make_samples, maker_of, weights
from tests.support.tiny import make_checkpoint

__all__ = ["make"]

LORA = {"lora_rank": 8, "lora_target_modules": "q_proj,down_proj,lm_head"}


@pytest.fixture
def lora(make):
    def make_one(**changes):
        return make(lora=LORA, **changes)

    return make_one


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_at_first_log_probabilities_are_those_of_the_base(lora, make, dtype):
    """Until B is no longer zero, and then they are not."""
    adapted, base = lora(dtype=dtype), make(dtype)
    sampled = [s.sample.rollout_log_probs for s in make_samples(base)]
    assert [s.sample.rollout_log_probs for s in make_samples(adapted)] == sampled
    adapted.train(make_samples(adapted), 0, RATES)
    assert [s.sample.rollout_log_probs for s in make_samples(adapted)] != sampled


def test_adapters_alone_move_and_have_optimizer_state(lora):
    trainer = lora()
    before = weights(trainer)
    frozen = trainer.policy.frozen_digest()
    for step in (0, 1):  # A has no gradient as long as B is zero
        metrics = trainer.train(make_samples(trainer), step, RATES).metrics
        assert metrics["parity/num_mismatched_tokens"] == 0
    moved = {n for n, x in weights(trainer).items() if not torch.equal(before[n], x)}
    names = {n for n in before if ".lora." in n}
    held = [*adapters(trainer.policy.module)]
    assert moved == names and len(names) == sum(len(adapter.state_dict()) for adapter in held)
    assert trainer.policy.frozen_digest() == frozen
    state = trainer.policy.optimizer.state
    trained = sum(len([*adapter.parameters()]) for adapter in held)
    assert len(state) == trained == len(trainable_parameters(trainer.policy.module))


def test_the_base_and_a_reference_are_held_in_the_dtype_that_is_computed_in(lora, make, checkpoint):
    """Masters of full training are float32; what is pushed has the same bits."""
    trainer, whole = lora(dtype="bfloat16"), make("bfloat16")
    for name, parameter in trainer.policy.module.named_parameters():
        assert parameter.dtype == (torch.float32 if ".lora." in name else torch.bfloat16)
    held = weights(trainer)
    assert all(torch.equal(held[name], x) for name, x in weights(whole).items())
    algorithm = {"use_kl_loss": True, "ref_checkpoint": str(checkpoint)}
    reference = make("bfloat16", algorithm=algorithm).models["reference"]
    assert {p.dtype for p in reference.module.parameters()} == {torch.bfloat16}


def test_a_checkpoint_holds_adapters_alone_and_goes_on_with_the_same_bits(lora, tmp_path):
    whole, first, second = lora(), lora(), lora()
    for trainer in (whole, first):
        trainer.train(make_samples(trainer), 0, RATES)
    first.save(tmp_path)
    assert all(".lora." in n for n in first.policy._tensors() if n.startswith("model."))
    second.load(tmp_path)
    for trainer in (whole, second):
        trainer.train(make_samples(trainer, seed=1), 1, RATES)
    assert all(torch.equal(weights(whole)[name], x) for name, x in weights(second).items())


def test_the_reference_is_the_base_in_the_same_memory(lora, make):
    algorithm = {"use_kl_loss": True, "kl_loss_coef": 0.5}
    trainer = lora(algorithm=algorithm)
    reference = trainer.models["reference"]
    assert reference.module is trainer.policy.module and reference.optimizer is None
    trainer.train(make_samples(trainer), 0, RATES)
    samples = make_samples(trainer)
    base = make_samples(make())
    assert samples[0].sample.rollout_log_probs != base[0].sample.rollout_log_probs
    policy, trainer.models["policy"] = trainer.policy, reference
    assert make_samples(trainer)[0].sample.rollout_log_probs == base[0].sample.rollout_log_probs
    trainer.models["policy"] = policy
    assert make_samples(trainer)[0].sample.rollout_log_probs == samples[0].sample.rollout_log_probs


def test_memory_that_the_reference_shares_is_not_taken_away_with_the_others(lora):
    trainer = lora(algorithm={"use_kl_loss": True, "kl_loss_coef": 0.5})
    kept = []
    trainer._away["state"].take = lambda tensors, dropped: kept.extend(tensors)
    trainer.release_memory("state")
    assert not any(p is x for p in trainer.policy.module.parameters() for x in kept)


def test_it_is_exported_as_peft_writes_it(lora, checkpoint, tmp_path):
    trainer = lora()
    trainer.train(make_samples(trainer), 0, RATES)
    trainer.export(tmp_path / "adapter")
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(checkpoint)
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (
        8, 32.0, ["down_proj", "lm_head", "q_proj"],
    )  # fmt: skip
    held = {n: x for n, x in weights(trainer).items() if ".lora." in n}
    assert len(written) == len(held)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    assert torch.equal(written[name], held["model.layers.0.self_attn.q_proj.lora.B"])
    assert config["use_dora"] is False


def test_adapters_of_experts_move_alone(tmp_path):
    """And at first every log-probability is the base's."""
    mixture = make_checkpoint(tmp_path / "moe", "glm4-moe")
    trainer = maker_of(mixture)(lora={"lora_rank": 4})
    sampled = [s.sample.rollout_log_probs for s in make_samples(maker_of(mixture)())]
    assert [s.sample.rollout_log_probs for s in make_samples(trainer)] == sampled
    before = weights(trainer)
    for step in (0, 1):
        metrics = trainer.train(make_samples(trainer), step, RATES).metrics
        assert metrics["parity/num_mismatched_tokens"] == 0
    moved = {n for n, x in weights(trainer).items() if not torch.equal(before[n], x)}
    assert moved == {n for n in before if ".lora." in n}
    assert {n.rpartition(".lora.")[2] for n in moved if ".experts." in n} == {
        f"{pair}.{part}" for pair in ("gate_up", "down") for part in "AB"
    }
    assert [s.sample.rollout_log_probs for s in make_samples(trainer)] != sampled
