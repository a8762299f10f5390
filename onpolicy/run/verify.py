"""Measures, on real engines, whether rollout and training agree on every sampled token."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from onpolicy.config import TrainConfig, groups
from onpolicy.config.secrets import reveal
from onpolicy.config.tools import VerifyConfig
from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.models.weight_files import require_fit
from onpolicy.outputs.directory import versions
from onpolicy.outputs.progress import Phases
from onpolicy.parity import ParityCounts, compare_log_probs
from onpolicy.rollout.engine_args import CONTEXT_MARGIN, MAX_CONCURRENCY
from onpolicy.rollout.flag_check import FlagCheck
from onpolicy.rollout.reach import require_addresses
from onpolicy.rollout.seeds import sampling_seed
from onpolicy.run.contracts import contract_for
from onpolicy.run.engine_specs import rollout_spec
from onpolicy.run.engines import EnginePair
from onpolicy.run.input_checks import check_layout
from onpolicy.run.push_checks import require_transport
from onpolicy.train import distributed
from onpolicy.types import Prompt, Request, Sample, SamplingParams, TrainSample

logger = logging.getLogger(__name__)

LEARNING_RATE = 1e-3

LONGEST_PROMPT = 1024
"""Tokens of the longest prompt, unless --max-prompt-len says otherwise or the context is shorter."""

SHORTEST_PROMPT = 8
"""What the context must leave for a prompt."""

CHUNKS = 5
"""Prefill chunks that the longest prompt takes."""

SHORTEST_CHUNK = 16

TRAINED = 8
"""Samples of the step between the rounds: all weights change, however few they are."""

SCORED_AT_ONCE = 8
"""Samples that the trainer scores before it says how far it is."""

Report = dict[str, Any]


def check_inputs(config: VerifyConfig) -> None:
    """Raise ConfigError for whatever `verify` could not run; starts nothing."""
    model = config.model
    hf_config = load_config(model.hf_checkpoint, model.trust_remote_code)
    longest = longest_prompt(config, hf_config)
    train_config = make_train_config(config, longest)
    check_layout(train_config)
    key = reveal("--rollout-api-key", config.servers.rollout_api_key)
    require_addresses(train_config.engine, key)
    contract = contract_for(train_config, hf_config, aligned=config.true_on_policy_mode)
    spec = rollout_spec(train_config, hf_config, contract)
    with FlagCheck(replace(spec, sglang_args=config.sglang_args)) as flags:
        require_fit(model.hf_checkpoint, hf_config, model.trust_remote_code)
        require_transport(train_config, contract)
        flags.require_passed()


def verify(config: VerifyConfig) -> Report:
    """Run both rounds and return the report; collective over the trainer's ranks."""
    hf_config = load_config(config.model.hf_checkpoint, config.model.trust_remote_code)
    longest = longest_prompt(config, hf_config)
    train_config = make_train_config(config, longest)
    contract = contract_for(train_config, hf_config, aligned=config.true_on_policy_mode)
    prompts = make_prompts(config, hf_config.vocab_size, longest)
    engines = EnginePair(
        train_config,
        hf_config,
        contract,
        Path(config.run_dir),
        longest_sequence=longest + config.max_new_tokens,
    )
    phases = Phases()
    engines.on_progress = lambda done, _: phases.advance(done)
    counts, num_cached = ParityCounts(), 0
    try:
        engines.start()
        for round_number in (0, 1):
            phases.begin(f"round {round_number + 1} of 2: pushing the trainer's weights")
            engines.push_weights(str(round_number))
            phases.begin(f"round {round_number + 1} of 2: sampling", config.num_prompts)
            samples = _sample(engines, prompts, config, round_number)
            num_cached += sum(sample.num_cached_tokens for sample in samples)
            phases.begin(f"round {round_number + 1} of 2: scoring", config.num_prompts)
            counts += _score(engines, samples, config, phases)
            if round_number == 0:
                trained = samples[:TRAINED]
                num_tokens = sum(len(sample.token_ids) for sample in trained)
                phases.begin(f"one step on {len(trained)} of the samples, {num_tokens} tokens")
                engines.trainer.train(_train_samples(trained), step=0, rates=[LEARNING_RATE])
    finally:
        phases.close()
        engines.stop()
    return {
        "num_compared_tokens": counts.num_compared,
        "num_mismatched_tokens": counts.num_mismatched,
        "max_abs_diff": counts.max_abs_diff,
        "max_ulp": counts.max_ulp,
        "k3_kl_mean": counts.sum_k3 / max(counts.num_compared, 1),
        "k3_kl_max": counts.max_k3,
        "num_cached_tokens": num_cached,
        "versions": versions(),
        "contract": {**json.loads(contract.to_json()), "fingerprint": contract.fingerprint},
    }


def longest_prompt(config: VerifyConfig, hf_config: PretrainedConfig) -> int:
    """Tokens of the longest prompt. Raises ConfigError if the context is too short for it."""
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
    """Tokens of a prefill chunk, so that the longest prompt takes several."""
    return max(SHORTEST_CHUNK, -(-longest // CHUNKS))


def passes(report: Report, config: VerifyConfig) -> bool:
    """Whether the report is what the mode promises, on paths that were really taken."""
    if not config.true_on_policy_mode:
        return True
    passed: bool = (
        report["num_mismatched_tokens"] == 0
        and report["num_compared_tokens"] == 2 * config.num_prompts * config.max_new_tokens
        and report["num_cached_tokens"] > 0
    )
    return passed


def make_prompts(config: VerifyConfig, vocab_size: int, longest: int) -> list[Prompt]:
    """Random token ids of random lengths, some longer than a prefill chunk, sharing prefixes."""
    rng = random.Random(f"prompts/{config.seed}")
    shared = [rng.randrange(vocab_size) for _ in range(longest // 2)]
    prompts = []
    for i in range(config.num_prompts):
        prefix = shared[: rng.randrange(len(shared))]
        length = longest if i == 0 else rng.randrange(1, longest - len(prefix))
        token_ids = (prefix + [rng.randrange(vocab_size) for _ in range(length)])[:longest]
        prompts.append(Prompt(index=i, prompt_ids=token_ids, label="", text=""))
    return prompts


def make_train_config(config: VerifyConfig, longest: int) -> TrainConfig:
    """A run of one rollout with this command's flags, on prompts of up to `longest` tokens."""
    sglang_args = config.sglang_args
    starts_servers = not config.servers.rollout_server_url
    chunked = any(arg.startswith("--chunked-prefill-size") for arg in sglang_args)
    if starts_servers and not chunked:
        sglang_args = (*sglang_args, "--chunked-prefill-size", str(chunk_size(longest)))
    sequence = longest + config.max_new_tokens
    return TrainConfig(
        model=config.model,
        rollout=groups.RolloutConfig(
            num_rollout=1,
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
        megatron=config.megatron,
        parity=groups.ParityConfig(
            true_on_policy_mode=config.true_on_policy_mode, parity_policy="warn"
        ),
        operators=config.operators,
        sync=groups.WeightSyncConfig(weight_sync=config.weight_sync, update_weight_buffer_size=1),
        seed=config.seed,
        sglang_args=sglang_args,
    )


def _sample(
    engines: EnginePair, prompts: Sequence[Prompt], config: VerifyConfig, round_number: int
) -> list[Sample]:
    """A response to each prompt."""
    params = SamplingParams(
        temperature=config.temperature,
        max_new_tokens=config.max_new_tokens,
        stop_token_ids=(),
        ignore_eos=True,
    )
    requests = [
        Request(
            prompt_ids=prompt.prompt_ids,
            sampling_seed=sampling_seed(config.seed, "verify", round_number, prompt.index),
            params=params,
        )
        for prompt in prompts
    ]
    return [
        Sample(prompt=prompt, sample_index=0, completion=completion)
        for prompt, completion in zip(prompts, engines.generate(requests), strict=True)
    ]


def _score(
    engines: EnginePair, samples: Sequence[Sample], config: VerifyConfig, phases: Phases
) -> ParityCounts:
    """Compare with the trainer's log-probabilities, computed in an order and packing of its own."""
    shuffled = list(samples)
    random.Random(config.seed).shuffle(shuffled)
    train: list[torch.Tensor] = []
    for first in range(0, len(shuffled), SCORED_AT_ONCE):
        part = shuffled[first : first + SCORED_AT_ONCE]
        train += engines.trainer.log_probs(
            [sample.token_ids for sample in part],
            [len(sample.prompt.prompt_ids) for sample in part],
            config.temperature,
        )
        phases.advance(len(train))
    rollout = torch.tensor([x for sample in shuffled for x in sample.rollout_log_probs])
    counts, _ = compare_log_probs(torch.cat(train), rollout)
    if distributed.rank() == 0:
        logger.info("%d of %d tokens differ", counts.num_mismatched, counts.num_compared)
    return counts


def _train_samples(samples: Sequence[Sample]) -> list[TrainSample]:
    return [TrainSample(sample=sample, advantage=(-1.0) ** i) for i, sample in enumerate(samples)]
