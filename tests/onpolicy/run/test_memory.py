"""Sums of memory before a run: what they are of, and what they refuse."""

import dataclasses

import pytest
import torch

from onpolicy.config import TrainConfig, groups
from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.models.policy import PackedTokens
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.triton import TritonOperators
from onpolicy.rollout.engine_args import CACHE_MARGIN
from onpolicy.run import memory
from onpolicy.run.contracts import contract_for
from onpolicy.run.engine_specs import rollout_spec
from onpolicy.run.memory import (
    ModelSize,
    ProcessMemory,
    require_cache,
    require_memory,
    require_run_fits,
    server_memory,
    trainer_memory,
)
from onpolicy.train import distributed, make_trainer
from onpolicy.train.state import create_missing_moments
from onpolicy.types import Prompt
from tests.support.run_in_memory import PROMPTS, make_inputs
from tests.support.run_in_memory import make_config as make_run_config
from tests.support.tiny import ARCHITECTURES, make_checkpoint


def make_config(path, dtype="float32", checkpointing=False, **engine):
    return TrainConfig(
        model=groups.ModelConfig(hf_checkpoint=str(path), dtype=dtype),
        rollout=groups.RolloutConfig(num_rollout=1, rollout_batch_size=2, n_samples_per_prompt=2),
        engine=groups.EngineConfig(cpu_threads=1, **engine),
        trainer=groups.TrainerConfig(
            max_tokens_per_gpu=200, activation_checkpointing=checkpointing
        ),
        parity=groups.ParityConfig(true_on_policy_mode=True),
    )


def make_spec(config, longest=50):
    hf_config = load_config(config.model.hf_checkpoint)
    contract = contract_for(config, hf_config, aligned=True)
    return hf_config, rollout_spec(config, hf_config, contract, longest)


def trainer_parts(config, longest=50, ranks=1, **contract):
    cluster = groups.ClusterConfig(actor_num_ranks_per_node=ranks)
    config = dataclasses.replace(config, cluster=cluster)
    hf_config, spec = make_spec(config, longest)
    spec = dataclasses.replace(spec, contract=dataclasses.replace(spec.contract, **contract))
    return trainer_memory(config, hf_config, spec, ModelSize.of(hf_config)).parts


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_a_trainer_keeps_is_what_the_sum_says(architecture, tmp_path):
    config = make_config(make_checkpoint(tmp_path / "model", architecture))
    hf_config = load_config(config.model.hf_checkpoint)
    parts = trainer_parts(config)
    distributed.init_process_group()
    trainer = make_trainer(config, contract_for(config, hf_config, aligned=True), 1)
    create_missing_moments(trainer.optimizer)
    weights = sum(p.nbytes for p in trainer.model.parameters())
    state = trainer.optimizer.state.values()
    moments = sum(s[name].nbytes for s in state for name in ("exp_avg", "exp_avg_sq"))
    assert parts["weights"] == parts["gradients"] == weights
    assert parts["AdamW"] == moments


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_are_what_autograd_keeps_and_not_many_times_more(
    dtype, checkpointing, tmp_path
):
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}
    path = make_checkpoint(tmp_path / "model", "llama", **sizes)
    config = make_config(path, dtype, checkpointing)
    hf_config = load_config(str(path))
    distributed.init_process_group()
    trainer = make_trainer(config, contract_for(config, hf_config, aligned=True), 1)
    parameters = sum(p.nbytes for p in trainer.model.parameters())
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = 200
    packed = PackedTokens.pack([[2 + i % 99 for i in range(tokens)]], [1], 1.0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        log_probs, _ = trainer.model(packed)
    log_probs.sum().backward()
    said = trainer_parts(config, longest=tokens)["activations"]
    found = sum(kept.values())
    assert found - parameters <= said <= 8 * found


def test_mixtures_of_experts_are_counted_as_they_run(tmp_path):
    """They compute activations again, unless a flag says that they keep them."""
    recomputed = make_config(make_checkpoint(tmp_path / "model", "qwen3-moe"))
    trainer = dataclasses.replace(recomputed.trainer, moe_activation_checkpointing=False)
    kept = dataclasses.replace(recomputed, trainer=trainer)
    asked = make_config(recomputed.model.hf_checkpoint, checkpointing=True)
    default, without, explicit = (trainer_parts(c) for c in (recomputed, kept, asked))
    assert default == explicit
    assert default["activations"] < without["activations"]


def test_a_chunk_of_logits_is_that_of_the_contracts_operators(checkpoint):
    config = make_config(checkpoint)
    vocab = load_config(str(checkpoint)).vocab_size
    cpu, triton = (trainer_parts(config, 10**6, backend=x)["logits"] for x in ("cpu", "triton"))
    more_rows = TritonOperators.rows_per_chunk(vocab) - CpuOperators.rows_per_chunk(vocab)
    assert triton - cpu == 4 * vocab * memory.LOGITS_COPIES * more_rows > 0


def test_more_ranks_share_what_is_kept(checkpoint):
    config = make_config(checkpoint)
    one, four = (trainer_parts(config, ranks=ranks) for ranks in (1, 4))
    for name in ("weights", "gradients", "AdamW"):
        assert four[name] == one[name] // 4
    assert four["gathered layers"] == one["gathered layers"]
    assert four["exchanged gradients"] > one["exchanged gradients"] == 0


def test_a_server_is_its_weights_and_its_cache(checkpoint):
    config = make_config(checkpoint, "bfloat16", rollout_max_concurrency=3)
    hf_config, spec = make_spec(config)
    assert spec.cache_tokens == 4 * (50 + CACHE_MARGIN)
    size = ModelSize.of(hf_config)
    process = server_memory(spec, size, hf_config, servers=2)
    assert process.parts["weights"] == 2 * size.parameters
    assert process.parts[f"cache of {spec.cache_tokens} tokens"] == (
        2 * 2 * hf_config.num_hidden_layers * hf_config.num_key_value_heads * 48 * spec.cache_tokens
    )
    assert process.bytes == 2 * sum(process.parts.values())


def test_what_cannot_fit_is_refused_with_the_sum(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: 3 << 30)
    rank = ProcessMemory("trainer rank", {"weights": 1 << 30, "AdamW": 1 << 29}, count=2)
    server = ProcessMemory("SGLang server", {"cache of 9 tokens": 1 << 28})
    require_memory([rank], "cpu")
    with pytest.raises(
        ConfigError,
        match=r"memory=3\.25 GiB together: this host has 3\.00 GiB free\. 2 x trainer rank: weights "
        r"1\.00 \+ AdamW 0\.50 = 3\.00 GiB; SGLang server: cache of 9 tokens 0\.25 = 0\.25 GiB\. ",
    ):
        require_memory([rank, server], "cpu")


def test_on_gpus_each_process_has_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda i: ((2 - i) << 30, 4 << 30))
    require_memory([ProcessMemory("trainer rank", {"weights": 1 << 30}, count=8)], "cuda")
    with pytest.raises(
        ConfigError, match=r"1\.50 GiB the largest of them: the fullest GPU has 1\.00"
    ):
        require_memory([ProcessMemory("trainer rank", {"weights": 3 << 29})], "cuda")


def test_a_sequence_that_fits_no_cache_is_refused_and_waiting_is_said(checkpoint, caplog):
    config = make_config(checkpoint)
    small = dataclasses.replace(config, sglang_args=("--max-total-tokens", "57"))
    with pytest.raises(
        ConfigError, match=r"--sglang-max-total-tokens=57: .*have 50 tokens.* need 58"
    ):
        require_cache(make_spec(small)[1])
    caplog.set_level("INFO")
    two = dataclasses.replace(config, sglang_args=("--max-total-tokens=120",))
    require_cache(make_spec(two)[1])
    assert "120 tokens holds 2 sequences of 50 tokens" in caplog.text
    assert "of 256 requests in flight the others wait" in caplog.text


def test_servers_elsewhere_are_not_counted(checkpoint, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: 1 << 30)
    for urls, fits in ((("http://h:1",), True), ((), False)):
        config = make_config(checkpoint, rollout_server_url=urls)
        hf_config, spec = make_spec(config)
        if fits:
            require_run_fits(config, hf_config, spec, ModelSize.of(hf_config))
            continue
        with pytest.raises(ConfigError, match=r"memory=.* SGLang server: weights"):
            require_run_fits(config, hf_config, spec, ModelSize.of(hf_config))


def test_hosts_of_a_cluster_are_not_counted_against_this_one(checkpoint, monkeypatch, caplog):
    monkeypatch.setattr(memory, "free_memory", lambda: 1 << 30)
    caplog.set_level("INFO")
    config = dataclasses.replace(
        make_config(checkpoint, rollout_num_engines=2),
        cluster=groups.ClusterConfig(ray_address="h:1", actor_num_nodes=2),
    )
    hf_config, spec = make_spec(config)
    require_run_fits(config, hf_config, spec, ModelSize.of(hf_config))
    assert "memory of 2 x trainer rank: " in caplog.text
    assert "memory of 2 x SGLang server: " in caplog.text and "this host" not in caplog.text
    small = dataclasses.replace(config, sglang_args=("--max-total-tokens", "57"))
    with pytest.raises(ConfigError, match="--sglang-max-total-tokens=57: "):
        require_run_fits(small, hf_config, make_spec(small)[1], ModelSize.of(hf_config))


def test_a_dry_run_says_what_cannot_fit_and_goes_on(checkpoint, monkeypatch, caplog):
    monkeypatch.setattr(memory, "free_memory", lambda: 1 << 30)
    config = dataclasses.replace(make_config(checkpoint), dry_run=True)
    hf_config, spec = make_spec(config)
    require_run_fits(config, hf_config, spec, ModelSize.of(hf_config))
    assert "here and now the run would be refused: memory=" in caplog.text


def test_the_longest_sequence_is_a_training_or_an_evaluation_prompts(tmp_path):
    inputs = make_inputs(
        make_run_config(tmp_path),
        {"long": [Prompt(index=1, prompt_ids=[2] * 30, label="x", text="")]},
    )
    longest = max(len(prompt.prompt_ids) for prompt in PROMPTS)
    for sampled, evaluated, expected in [(100, None, 130), (100, 9, 100 + longest), (5, 50, 80)]:
        config = make_run_config(
            tmp_path, rollout_max_response_len=sampled, eval_max_response_len=evaluated
        )
        assert inputs.longest_sequence(config) == expected
