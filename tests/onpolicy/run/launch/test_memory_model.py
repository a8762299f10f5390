"""Sums of memory before a run: what they are of."""

import dataclasses
from collections import deque
from itertools import chain

import pytest
import torch

from onpolicy.config import groups
from onpolicy.models.hf_config import load_config
from onpolicy.models.policy import PackedTokens
from onpolicy.models.size import ModelSize
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.triton import TritonOperators
from onpolicy.rollout.engine_args import CACHE_MARGIN
from onpolicy.run.launch.contracts import contract_for
from onpolicy.run.launch.engine_specs import rollout_spec
from onpolicy.run.launch.memory_model import (
    LOGITS_COPIES,
    TOKEN_RECORD,
    RunMemory,
    server_memory,
)
from onpolicy.train import distributed, make_trainer
from onpolicy.train.state import create_missing_moments
from onpolicy.types import Prompt
from tests.support.live_bytes import LiveBytes
from tests.support.run_in_memory import PROMPTS, make_inputs
from tests.support.run_in_memory import make_config as make_run_config
from tests.support.sized_runs import make_config, make_spec
from tests.support.tiny import ARCHITECTURES, make_checkpoint


def trainer_parts(config, longest=50, ranks=1, **contract):
    cluster = groups.ClusterConfig(actor_num_ranks_per_node=ranks)
    config = dataclasses.replace(config, cluster=cluster)
    hf_config, spec = make_spec(config, longest)
    spec = dataclasses.replace(spec, contract=dataclasses.replace(spec.contract, **contract))
    return RunMemory(config, hf_config, spec, ModelSize.of(hf_config)).trainer().parts


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_a_trainer_keeps_is_what_the_sum_says(architecture, tmp_path):
    config = make_config(make_checkpoint(tmp_path / "model", architecture))
    hf_config = load_config(config.model.hf_checkpoint)
    parts = trainer_parts(config)
    distributed.init_process_group()
    trainer = make_trainer(config, contract_for(config, hf_config, aligned=True), 1)
    create_missing_moments(trainer.policy.optimizer)
    weights = sum(p.nbytes for p in trainer.policy.module.parameters())
    state = trainer.policy.optimizer.state.values()
    moments = sum(s[name].nbytes for s in state for name in ("exp_avg", "exp_avg_sq"))
    assert parts["weights"] == parts["gradients"] == weights
    assert parts["AdamW"] == moments
    assert parts["holes"] == 1.25 * parts["gradients"]  # measured: benchmarks/README.md


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_beside_adapters_the_base_is_kept_in_the_dtype_and_nothing_of_it_beside(dtype, checkpoint):
    base = make_config(checkpoint)
    model = dataclasses.replace(base.model, dtype=dtype)
    config = dataclasses.replace(base, model=model, lora=groups.LoraConfig(lora_rank=4))
    hf_config, spec = make_spec(config, 50)
    adapter = contract_for(config, hf_config, aligned=True).adapter
    parts, whole = (
        RunMemory(config, hf_config, spec, ModelSize.of(hf_config, False, x)).trainer().parts
        for x in (adapter, None)
    )
    distributed.init_process_group()
    trainer = make_trainer(config, contract_for(config, hf_config, aligned=True), 1)
    create_missing_moments(trainer.policy.optimizer)
    parameters = [*trainer.policy.module.parameters()]
    assert parts["weights"] == sum(p.nbytes for p in parameters)
    assert parts["gradients"] == sum(p.nbytes for p in parameters if p.requires_grad)
    assert parts["AdamW"] == 2 * parts["gradients"] < whole["AdamW"] / 10
    assert parts["gathered layers"] < whole["gathered layers"]
    assert parts["logits"] < whole["logits"]


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
    parameters = sum(p.nbytes for p in trainer.policy.module.parameters())
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = 200
    packed = PackedTokens.after_prompts([[2 + i % 99 for i in range(tokens)]], [1], 1.0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        log_probs, *_ = trainer.policy.module(packed)
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
    assert triton - cpu == 4 * vocab * LOGITS_COPIES * more_rows > 0


def test_a_trainer_that_takes_no_step_keeps_weights_alone(checkpoint):
    config = make_config(checkpoint)
    scoring = dataclasses.replace(config, rollout=groups.RolloutConfig(num_rollout=0))
    with_step, without = trainer_parts(config), trainer_parts(scoring)
    assert without["weights"] == with_step["weights"] > 0
    assert without["gradients"] == without["AdamW"] == 0


def test_more_ranks_share_what_is_kept(checkpoint):
    config = make_config(checkpoint)
    one, four = (trainer_parts(config, ranks=ranks) for ranks in (1, 4))
    for name in ("weights", "gradients", "AdamW"):
        assert four[name] == one[name] // 4
    assert four["gathered layers"] == one["gathered layers"]
    assert four["exchanged gradients"] > one["exchanged gradients"] == 0


def test_a_group_whose_prompt_is_computed_once_is_one_ranks(checkpoint):
    config = make_config(checkpoint)
    shared = dataclasses.replace(config.trainer, share_prefixes="on")
    together = dataclasses.replace(config, trainer=shared)
    one, four = (trainer_parts(config, ranks=n)["activations"] for n in (1, 4))
    assert trainer_parts(together, ranks=4)["activations"] == one > four


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
    of_bytes = dataclasses.replace(spec.contract, backend="hopper_fp8")
    spec = dataclasses.replace(spec, contract=of_bytes)
    process = server_memory(spec, size, hf_config, servers=2)
    assert process.parts["weights"] == 3 * size.parameters


def test_the_longest_sequence_is_a_training_or_an_evaluation_prompts(tmp_path):
    sets = {"long": [Prompt(index=1, prompt_ids=[2] * 30, label="x", text="")]}
    longest = max(len(prompt.prompt_ids) for prompt in PROMPTS)
    for sampled, evaluated, expected in [(100, None, 130), (100, 9, 100 + longest), (5, 50, 80)]:
        config = make_run_config(
            tmp_path, rollout_max_response_len=sampled, eval_max_response_len=evaluated
        )
        assert make_inputs(config, sets).longest_sequence(config) == expected


@pytest.mark.parametrize(("way", "senders"), [("tensor", 1), ("disk", 1), ("distributed", 2)])
def test_a_push_holds_as_many_buckets_as_ranks_that_send(tmp_path, way, senders):
    config = make_config(make_checkpoint(tmp_path / "model", "llama"))
    config = dataclasses.replace(config, sync=groups.WeightSyncConfig(weight_sync=way))
    hf_config, spec = make_spec(config, 50)
    run = RunMemory(config, hf_config, spec, ModelSize.of(hf_config))
    for ranks, servers in ((3, 2), (2, 3)):
        assert run.with_push(ranks, servers)[-1].count == senders
    assert run.with_push(1, 3)[-1].count == run.with_push(0, 1)[-1].count == 1


MERGED = {
    "LoRA": ("qwen3", {}),
    "experts": ("qwen3-moe", {"lora_target_modules": "experts"}),
    "experts whose matrices are transposed": ("gpt-oss", {"lora_target_modules": "experts"}),
}


GOVERNED = groups.GovernorFlags(mismatch_governor=True)


@pytest.mark.parametrize("case", MERGED)
def test_what_merging_adapters_takes_is_what_the_sum_says(case, tmp_path):
    architecture, flags = MERGED[case]
    sizes = {"hidden_size": 256, "intermediate_size": 768} if architecture == "qwen3" else {}
    base = make_config(make_checkpoint(tmp_path / "model", architecture, **sizes), "bfloat16")
    stock = groups.ParityConfig(true_on_policy_mode=False)
    sync = groups.WeightSyncConfig(update_weight_buffer_size=0)
    lora = groups.LoraConfig(lora_rank=2, **flags)
    config = dataclasses.replace(base, parity=stock, lora=lora, sync=sync)
    hf_config = load_config(config.model.hf_checkpoint)
    contract = contract_for(config, hf_config, aligned=False)
    spec = rollout_spec(config, hf_config, contract, 50)
    size = ModelSize.of(hf_config, False, contract.adapter)
    said = RunMemory(config, hf_config, spec, size).push().parts["merging"]
    governed = dataclasses.replace(base, lora=lora, sync=sync, governor=GOVERNED)
    aligned = contract_for(governed, hf_config, aligned=True)
    beside = rollout_spec(governed, hf_config, aligned, 50)
    assert RunMemory(governed, hf_config, beside, size).push().parts["merging"] == said
    distributed.init_process_group()
    trainer = make_trainer(config, contract, 1)
    pushes = {"merged": LiveBytes(), "unmerged": LiveBytes()}
    for way, live in pushes.items():
        parts = {x: trainer.policy.weight_buckets(1, x) for x in ("trained", "frozen")}
        merged = trainer.outlet._merging.buckets(parts)
        with live:
            deque(merged if way == "merged" else chain(*parts.values()), maxlen=0)
    found = pushes["merged"].most - pushes["unmerged"].most
    assert found <= said <= 3 * found


def test_a_push_of_adapters_that_are_not_merged_is_that_of_buckets_alone(checkpoint):
    config = dataclasses.replace(make_config(checkpoint), lora=groups.LoraConfig(lora_rank=2))
    hf_config, spec = make_spec(config)
    adapter = contract_for(config, hf_config, aligned=True).adapter
    push = RunMemory(config, hf_config, spec, ModelSize.of(hf_config, False, adapter)).push()
    assert [*push.parts] == ["4 copies of a bucket"]


def test_workers_of_agents_are_counted_and_branches_may_fill_a_micro_batch(checkpoint):
    config = make_config(checkpoint)
    hf_config, spec = make_spec(config)
    plain = RunMemory(config, hf_config, spec, ModelSize.of(hf_config))
    agent = dataclasses.replace(config.agent, custom_generate_function_path="a.b", agent_workers=3)
    config = dataclasses.replace(
        config, agent=agent, trainer=dataclasses.replace(config.trainer, max_tokens_per_gpu=1000)
    )
    acting = RunMemory(config, hf_config, spec, ModelSize.of(hf_config))
    assert plain.agents() == []
    (workers,) = acting.agents()
    assert workers.count == 3 and workers.parts["episodes under way"] == 2 * 50 * TOKEN_RECORD
    assert acting.trainer().parts["activations"] == 5 * plain.trainer().parts["activations"]
    assert "if no episode branches" in str(acting.controller())
