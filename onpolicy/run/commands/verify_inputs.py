"""The inputs of `onpolicy verify`: its prompts, the run of its flags, and the checks before it."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from pathlib import Path

from transformers import PretrainedConfig

from onpolicy.config import TrainConfig, groups
from onpolicy.config.secrets import control_key, reveal
from onpolicy.config.tools import VerifyConfig
from onpolicy.contract import NumericsContract
from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.models.size import ModelSize
from onpolicy.models.weight_files import require_fit, weight_files
from onpolicy.rollout.engine_args import CONTEXT_MARGIN, MAX_CONCURRENCY, EngineSpec
from onpolicy.rollout.flag_check import FlagCheck
from onpolicy.rollout.server import require_addresses
from onpolicy.run.launch.contracts import contract_for
from onpolicy.run.launch.duration import say_how_long, verify_work
from onpolicy.run.launch.engine_specs import rollout_spec
from onpolicy.run.launch.host_shares import placement_here
from onpolicy.run.launch.input_checks import check_layout
from onpolicy.run.launch.memory_checks import require_run_fits
from onpolicy.run.launch.push_checks import require_transport
from onpolicy.types import Prompt

LONGEST_PROMPT = 1024
"""The tokens of the longest prompt, unless --max-prompt-len is given or the context is shorter."""

SHORTEST_PROMPT = 8
"""The least number of tokens that the context must leave for a prompt."""

CHUNKS = 5
"""The number of prefill chunks of the longest prompt."""

SHORTEST_CHUNK = 16

TRAINED = 8
"""The number of samples in the step between the rounds; a few are enough to change all weights."""

BUCKETS = 8
"""The approximate number of buckets that the weights are pushed in."""


def check_inputs(config: VerifyConfig) -> tuple[TrainConfig, NumericsContract]:
    """Return the run and contract of `verify`; start nothing. Raises ConfigError if it cannot run."""
    model = config.model
    hf_config = load_config(model.hf_checkpoint, model.trust_remote_code)
    longest = longest_prompt(config, hf_config)
    train_config = make_train_config(config, longest)
    check_layout(train_config)
    key = reveal("--rollout-api-key", config.servers.rollout_api_key)
    require_addresses(train_config.engine, key, control_key(config.sglang_args, key))
    contract = contract_for(train_config, hf_config, aligned=config.plan.starts_aligned)
    spec = rollout_spec(train_config, hf_config, contract, longest + config.max_new_tokens)
    with FlagCheck(replace(spec, sglang_args=config.sglang_args)) as flags:
        require_fit(model.hf_checkpoint, hf_config, model.trust_remote_code)
        size = ModelSize.of(hf_config, model.trust_remote_code, contract.adapter)
        require_run_fits(train_config, hf_config, spec, size)
        require_transport(train_config, contract)
        if not config.cluster.ray_address:
            placement_here(train_config, contract)
        prompts = make_prompts(config, hf_config.vocab_size, longest)
        _say_how_long(config, prompts, spec, size)
        flags.require_passed()
    return train_config, contract


def _say_how_long(
    config: VerifyConfig, prompts: list[Prompt], spec: EngineSpec, size: ModelSize
) -> None:
    lens = [len(prompt.prompt_ids) for prompt in prompts]
    at_once = (spec.cache_tokens or sum(lens)) // spec.needed_tokens
    work = verify_work(lens, config.max_new_tokens, TRAINED * config.step, at_once)
    say_how_long(work, size, spec.contract.device)


def longest_prompt(config: VerifyConfig, hf_config: PretrainedConfig) -> int:
    """Return the tokens of the longest prompt. Raises ConfigError if the context is too short."""
    context = hf_config.max_position_embeddings
    room: int = context - CONTEXT_MARGIN - config.max_new_tokens
    if room < SHORTEST_PROMPT:
        raise ConfigError(
            f"--max-new-tokens={config.max_new_tokens}: does not fit the model's context of {context}. "
            "Lower it."
        )
    if config.max_prompt_len is None:
        return min(LONGEST_PROMPT, room)
    if config.max_prompt_len > room:
        raise ConfigError(
            f"--max-prompt-len={config.max_prompt_len}: with --max-new-tokens {config.max_new_tokens} "
            f"and {CONTEXT_MARGIN} tokens that SGLang keeps free it does not fit the model's context of "
            f"{context}. At most {room} fit."
        )
    return config.max_prompt_len


def chunk_size(longest: int) -> int:
    """Return the number of tokens of a prefill chunk, so that the longest prompt takes several."""
    return max(SHORTEST_CHUNK, -(-longest // CHUNKS))


def make_prompts(config: VerifyConfig, vocab_size: int, longest: int) -> list[Prompt]:
    """Return random prompts with shared prefixes, some longer than a prefill chunk."""
    rng = random.Random(f"prompts/{config.seed}")
    shared = [rng.randrange(vocab_size) for _ in range(longest // 2)]
    prompts = []
    for i in range(config.num_prompts):
        prefix = shared[: rng.randrange(len(shared))]
        # The first prompt has the full length, so that one takes all prefill chunks.
        length = longest if i == 0 else rng.randrange(1, longest - len(prefix))
        token_ids = (prefix + [rng.randrange(vocab_size) for _ in range(length)])[:longest]
        prompts.append(Prompt(index=i, prompt_ids=token_ids, label="", text=""))
    return prompts


def make_train_config(config: VerifyConfig, longest: int) -> TrainConfig:
    """Return a run with this command's flags on prompts of up to `longest` tokens: of one rollout, or,
    with --no-step, of none."""
    sglang_args = config.sglang_args
    starts_servers = not config.servers.rollout_server_url
    chunked = any(arg.startswith("--chunked-prefill-size") for arg in sglang_args)
    if starts_servers and not chunked:
        sglang_args = (*sglang_args, "--chunked-prefill-size", str(chunk_size(longest)))
    sequence = longest + config.max_new_tokens
    return TrainConfig(
        model=config.model,
        rollout=groups.RolloutConfig(
            num_rollout=int(config.step),
            rollout_batch_size=config.num_prompts,
            n_samples_per_prompt=1,
            rollout_max_response_len=config.max_new_tokens,
            rollout_temperature=config.temperature,
        ),
        engine=groups.EngineConfig(
            **asdict(config.servers),
            rollout_max_concurrency=min(MAX_CONCURRENCY, config.num_prompts),
        ),
        trainer=groups.TrainerConfig(
            train_backend=config.train_backend,
            max_tokens_per_gpu=max(999, 2 * sequence - 1),
            activation_checkpointing=True,
        ),
        algorithm=groups.AlgorithmConfig(advantage_estimator="reinforce"),
        megatron=config.megatron,
        lora=config.lora,
        cluster=config.cluster,
        parity=groups.ParityConfig(
            true_on_policy_mode=config.plan.starts_aligned, parity_policy="warn"
        ),
        operators=config.operators,
        sync=groups.WeightSyncConfig(
            weight_sync=config.weight_sync,
            update_weight_buffer_size=_bucket_mib(config.model.hf_checkpoint),
        ),
        output=groups.OutputConfig(run_dir=config.run_dir),
        seed=config.seed,
        sglang_args=sglang_args,
    )


def _bucket_mib(path: str) -> int:
    files = weight_files(Path(path), "--hf-checkpoint")
    return max(1, (sum(file.stat().st_size for file in files) >> 20) // BUCKETS)
