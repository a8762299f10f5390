"""Sums of memory before a run: what they are of, and a critic of a size of its own."""

import dataclasses
import re
import shutil

import pytest
import torch

from onpolicy.cli.parse import parse
from onpolicy.config import TrainConfig, groups
from onpolicy.contract import AdapterShape
from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.models.policy import PackedTokens
from onpolicy.models.size import ModelSize
from onpolicy.ops.cpu import CpuOperators
from onpolicy.ops.triton import TritonOperators
from onpolicy.rollout.engine_args import CACHE_MARGIN
from onpolicy.run import saving
from onpolicy.run.launch.contracts import contract_for
from onpolicy.run.launch.input_checks import require_weights
from onpolicy.run.launch.memory import (
    LOGITS_COPIES,
    RunMemory,
    server_memory,
)
from onpolicy.training import distributed, make_trainer
from onpolicy.training.state import create_missing_moments
from onpolicy.types import Prompt
from tests.support.run_in_memory import PROMPTS, make_inputs
from tests.support.run_in_memory import make_config as make_run_config
from tests.support.sized_runs import make_config, make_spec
from tests.support.tiny import ARCHITECTURES, make_checkpoint


def trainer_parts(config, longest=50, ranks=1, shards=0, **contract):
    cluster = groups.ClusterConfig(actor_num_ranks_per_node=ranks, fsdp_shard_ranks=shards)
    config = dataclasses.replace(config, cluster=cluster)
    hf_config, spec = make_spec(config, longest)
    spec = dataclasses.replace(spec, contract=dataclasses.replace(spec.contract, **contract))
    return RunMemory(config, hf_config, spec, ModelSize.of(hf_config)).trainer.parts


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
        RunMemory(config, hf_config, spec, ModelSize.of(hf_config, False, x)).trainer.parts
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


@pytest.mark.parametrize("rank", [0, 4])
def test_of_what_is_pushed_as_changes_a_rank_keeps_a_copy(rank, checkpoint):
    base = make_config(checkpoint, "bfloat16")
    config = dataclasses.replace(
        base,
        lora=groups.LoraConfig(lora_rank=rank),
        sync=groups.WeightSyncConfig(sparse_weight_sync=True),
    )
    hf_config, spec = make_spec(config, 50)
    size = ModelSize.of(hf_config, False, contract_for(config, hf_config, aligned=True).adapter)
    on_gpu = dataclasses.replace(spec.contract, device="cuda")
    here, there = (
        RunMemory(config, hf_config, dataclasses.replace(spec, contract=contract), size).trainer
        for contract in (spec.contract, on_gpu)
    )
    assert here.parts["last push"] == there.host["last push"] == 2 * size.trained > 0
    assert there.parts["last push"] == 0
    assert trainer_parts(base)["last push"] == 0


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3.5"])
def test_activations_are_what_autograd_keeps_and_not_many_times_more(
    architecture, dtype, checkpointing, tmp_path
):
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6}
    if architecture == "qwen3.5":
        sizes["layer_types"] = ["linear_attention", "linear_attention", "full_attention"] * 2
    path = make_checkpoint(tmp_path / "model", architecture, **sizes)
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
    """They compute activations again without being asked."""
    unasked = make_config(make_checkpoint(tmp_path / "model", "qwen3-moe"))
    asked = make_config(unasked.model.hf_checkpoint, checkpointing=True)
    assert trainer_parts(unasked) == trainer_parts(asked)


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


def test_a_replica_is_shared_by_its_own_ranks_alone(checkpoint):
    config = make_config(checkpoint)
    four, replicas, two = (
        trainer_parts(config, ranks=ranks, shards=n) for ranks, n in ((4, 0), (4, 2), (2, 0))
    )
    for name in ("weights", "gradients", "AdamW"):
        assert replicas[name] == two[name] > four[name]
    assert {**two, **{name: replicas[name] for name in ("activations", "logits")}} == replicas


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


def test_a_push_holds_four_buckets(checkpoint):
    config = make_config(checkpoint)
    hf_config, spec = make_spec(config)
    run = RunMemory(config, hf_config, spec, ModelSize.of(hf_config))
    assert run.with_push(1, 1)[-1] == run.push
    assert run.push.bytes == 4 * 4 * run.size.parameters  # all of a tiny model is in one


def test_branches_may_fill_a_micro_batch(checkpoint):
    config = make_config(checkpoint)
    hf_config, spec = make_spec(config)
    plain = RunMemory(config, hf_config, spec, ModelSize.of(hf_config))
    agent = dataclasses.replace(config.agent, custom_generate_function_path="a.b", agent_workers=3)
    config = dataclasses.replace(
        config, agent=agent, trainer=dataclasses.replace(config.trainer, max_tokens_per_gpu=1000)
    )
    acting = RunMemory(config, hf_config, spec, ModelSize.of(hf_config))
    assert acting.trainer.parts["activations"] == 5 * plain.trainer.parts["activations"]


CRITIC = ("--advantage-estimator", "gae")


def config_of(checkpoint, *argv):
    flags = ["--hf-checkpoint", str(checkpoint), "--prompt-data", "p.jsonl", "--rm-type", "exact"]
    return parse(TrainConfig, [*flags, *argv], "onpolicy train")


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    changes = {"num_hidden_layers": 5, "intermediate_size": 416}
    return make_checkpoint(tmp_path_factory.mktemp("larger"), "qwen3", **changes)


def size_of(path):
    return ModelSize.of(load_config(str(path)))


def test_a_critic_that_cannot_be_laid_out_as_the_policy_is_refused_by_its_flag(checkpoint, larger):
    pytest.importorskip("megatron.core")
    flags = (*CRITIC, "--critic-load", str(larger))
    layout = (
        "--train-backend", "megatron", "--megatron-pp", "2", "--actor-num-ranks-per-node", "2",
    )  # fmt: skip
    hf_config = load_config(str(checkpoint))
    require_weights(config_of(checkpoint, *flags), hf_config)
    require_weights(config_of(checkpoint, *CRITIC, *layout), hf_config)
    with pytest.raises(ConfigError, match=rf"--critic-load={larger}: --megatron-pp=2: .*layers=5"):
        require_weights(config_of(checkpoint, *flags, *layout), hf_config)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_a_rank_holds_a_critic_of_its_own_size(checkpoint, larger, backend):
    parts = {}
    for name, path in (("none", None), ("policy", checkpoint), ("larger", larger)):
        flags = (*CRITIC, "--critic-load", str(path)) if path else ()
        config = config_of(checkpoint, "--train-backend", backend, *flags)
        hf_config, spec = make_spec(config, 50)
        parts[name] = RunMemory(config, hf_config, spec, size_of(checkpoint)).trainer.parts
    kept = [parts["policy"][name] for name in ("weights", "gradients", "AdamW")]
    assert parts["none"]["critic"] == 0 and parts["policy"]["critic"] == sum(kept)
    times = size_of(larger).parameters / size_of(checkpoint).parameters
    assert parts["larger"]["critic"] == pytest.approx(times * sum(kept)) and times > 1.5
    assert parts["larger"]["weights"] == parts["none"]["weights"]
    assert parts["larger"]["activations"] > parts["policy"]["activations"]
    if backend == "fsdp":
        assert parts["larger"]["gathered layers"] > parts["policy"]["gathered layers"]


def test_beside_adapters_a_rank_holds_a_critic_that_is_trained_whole(checkpoint):
    config = config_of(checkpoint, *CRITIC, "--true-on-policy-mode", "--lora-rank", "4")
    hf_config, spec = make_spec(config, 50)
    adapter = AdapterShape(rank=4, scale=1.0, targets=("q_proj",))
    adapted, whole = ModelSize.of(hf_config, adapter=adapter), size_of(checkpoint)
    parts = RunMemory(config, hf_config, spec, adapted).trainer.parts
    assert parts["critic"] == 4 * 4 * whole.parameters > 10 * parts["AdamW"]
    assert parts["holes"] == 1.25 * 4 * whole.parameters  # of the larger backward pass


def test_the_room_asked_for_is_that_of_both(checkpoint, larger, monkeypatch):
    nothing = shutil._ntuple_diskusage(0, 0, 0)
    monkeypatch.setattr("shutil.disk_usage", lambda path: nothing)
    both = size_of(checkpoint).parameters + size_of(larger).parameters
    config = config_of(checkpoint, *CRITIC, "--critic-load", str(larger), "--save", "s")
    text = re.escape(f"{both:,} parameters of policy and critic x (12 bytes of training state + 2")
    with pytest.raises(ConfigError, match=text):
        saving.require_room(config, load_config(str(checkpoint)))
