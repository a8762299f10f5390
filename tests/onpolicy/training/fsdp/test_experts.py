"""The FSDP2 engine on models with experts: training, what it pushes and what it exports."""

import random

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from onpolicy.config import TrainConfig, groups
from onpolicy.models.hf_config import load_config
from onpolicy.models.hf_export import export_checkpoint
from onpolicy.models.policy import PackedTokens
from onpolicy.run.launch.contracts import contract_for
from onpolicy.training import distributed, make_trainer
from onpolicy.training.fsdp import sharding
from tests.support.samples import make_train_sample
from tests.support.tiny import EXPERT_ARCHITECTURES, make_checkpoint

RATES = [1e-3]


@pytest.fixture(scope="module", params=(*EXPERT_ARCHITECTURES, "deepseek-v2", "gpt-oss"))
def path(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), request.param)


def make(path, dtype="float32", **trainer):
    distributed.init_process_group()
    config = TrainConfig(
        model=groups.ModelConfig(hf_checkpoint=str(path), dtype=dtype),
        rollout=groups.RolloutConfig(num_rollout=10, rollout_batch_size=4, n_samples_per_prompt=2),
        algorithm=groups.AlgorithmConfig(advantage_estimator="reinforce"),
        trainer=groups.TrainerConfig(max_tokens_per_gpu=100, **trainer),
        parity=groups.ParityConfig(true_on_policy_mode=True),
    )
    contract = contract_for(config, load_config(str(path)), aligned=True)
    return make_trainer(config, contract, 1)


def make_samples(trainer, seed):
    """Random sequences with the trainer's own log-probabilities as the rollout's."""
    rng = random.Random(seed)
    sequences = [[rng.randrange(2, 137) for _ in range(rng.randrange(8, 60))] for _ in range(8)]
    log_probs = trainer.log_probs(sequences, [1] * 8, 1.0)
    return [
        make_train_sample(sequence, 1, values.tolist(), rng.uniform(-1, 1), i)
        for i, (sequence, values) in enumerate(zip(sequences, log_probs, strict=True))
    ]


def pushed(trainer, max_bytes=1 << 30):
    return {
        name: tensor
        for bucket in trainer.policy.weight_buckets(max_bytes)
        for name, tensor in bucket
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_pushed_is_the_checkpoint_name_by_name(path, dtype):
    trainer = make(path, dtype)
    on_disk = load_file(path / "model.safetensors")
    held = pushed(trainer)
    assert held.keys() == on_disk.keys()
    for name, tensor in on_disk.items():
        kept = name.endswith("e_score_correction_bias")  # a buffer, never rounded
        assert torch.equal(held[name], tensor if kept else tensor.to(held[name].dtype))


def test_buckets_are_as_small_as_asked_and_hold_everything(path):
    trainer = make(path)
    buckets = list(trainer.policy.weight_buckets(40_000))
    assert len(buckets) > 10
    assert all(len(b) == 1 or sum(t.nbytes for _, t in b) <= 40_000 for b in buckets)
    whole = pushed(trainer)
    assert {name for bucket in buckets for name, _ in bucket} == whole.keys()
    assert sum(map(len, buckets)) == len(whole)


def test_steps_in_a_row_match_and_move_experts_and_routers(path):
    trainer = make(path)
    before = pushed(trainer)
    for step in range(3):
        metrics = trainer.train(make_samples(trainer, step), step, RATES).metrics
        assert metrics["parity/num_mismatched_tokens"] == 0
        assert metrics["parity/num_compared_tokens"] > 100
        assert metrics["train/grad_norm"] > 0
    after = pushed(trainer)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    trained = ("experts.0.", "experts.gate_up_proj", "gate.weight", "router.weight")
    assert {n for n in before if any(part in n for part in trained)} <= moved
    assert not any(n.endswith("e_score_correction_bias") for n in moved)


def test_recomputed_activations_are_the_default_and_give_the_same_gradients(path, monkeypatch):
    results, recomputed = [], []
    plain = sharding.checkpoint_activations
    monkeypatch.setattr(
        sharding, "checkpoint_activations", lambda layer: recomputed.append(layer) or plain(layer)
    )
    for kept in (True, False):
        with monkeypatch.context() as patch:
            if kept:
                patch.setattr(
                    "onpolicy.training.fsdp.fsdp_model.recomputes_activations", lambda *_: False
                )
            trainer = make(path)
        assert bool(recomputed) is not kept
        trainer.train(make_samples(trainer, 0), 0, RATES)
        results.append(pushed(trainer))
    assert all(torch.equal(results[0][name], tensor) for name, tensor in results[1].items())


def test_experts_that_no_token_chose_have_gradients_of_zero(path):
    trainer = make(path)
    trainer.policy.module(PackedTokens.after_prompts([[5, 7]], [1], 1.0))[0].sum().backward()
    for name, parameter in trainer.policy.module.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        if ".experts." in name:
            is_used = parameter.grad.full_tensor().flatten(1).any(1)
            assert is_used.any() and not is_used.all()


def test_the_export_loads_as_the_same_bits(path, tmp_path):
    trainer = make(path, "bfloat16")
    trainer.train(make_samples(trainer, 0), 0, RATES)
    export_checkpoint(trainer.policy.weight_buckets(60_000), tmp_path / "hf", path, "bfloat16")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    loaded.save_pretrained(tmp_path / "again")
    want, got = pushed(trainer), load_file(tmp_path / "again" / "model.safetensors")
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
