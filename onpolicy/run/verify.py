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
from onpolicy.parity import ParityCounts, compare_log_probs
from onpolicy.rollout.engine_args import CONTEXT_MARGIN
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

CHUNKED_PREFILL_SIZE = 48
LEARNING_RATE = 1e-3
SHORTEST_PROMPT = 8

Report = dict[str, Any]


def check_inputs(config: VerifyConfig) -> None:
    """Raise ConfigError for whatever `verify` could not run; starts nothing."""
    train_config = make_train_config(config)
    check_layout(train_config)
    key = reveal("--rollout-api-key", config.servers.rollout_api_key)
    require_addresses(train_config.engine, key)
    model = config.model
    hf_config = load_config(model.hf_checkpoint, model.trust_remote_code)
    _longest_prompt(config, hf_config)
    contract = contract_for(train_config, hf_config, aligned=config.true_on_policy_mode)
    spec = rollout_spec(train_config, hf_config, contract)
    with FlagCheck(replace(spec, sglang_args=config.sglang_args)) as flags:
        require_fit(model.hf_checkpoint, hf_config, model.trust_remote_code)
        require_transport(train_config, contract)
        flags.require_passed()


def verify(config: VerifyConfig) -> Report:
    """Run both rounds and return the report; collective over the trainer's ranks."""
    hf_config = load_config(config.model.hf_checkpoint, config.model.trust_remote_code)
    train_config = make_train_config(config)
    contract = contract_for(train_config, hf_config, aligned=config.true_on_policy_mode)
    prompts = make_prompts(config, hf_config.vocab_size, _longest_prompt(config, hf_config))
    engines = EnginePair(train_config, hf_config, contract, Path(config.run_dir))
    counts, num_cached = ParityCounts(), 0
    try:
        engines.start()
        for round_number in (0, 1):
            engines.push_weights(str(round_number))
            samples = _sample(engines, prompts, config, round_number)
            num_cached += sum(sample.num_cached_tokens for sample in samples)
            counts += _score(engines, samples, config)
            if round_number == 0:
                engines.trainer.train(_train_samples(samples), step=0, rates=[LEARNING_RATE])
    finally:
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


def _longest_prompt(config: VerifyConfig, hf_config: PretrainedConfig) -> int:
    longest: int = hf_config.max_position_embeddings - CONTEXT_MARGIN - config.max_new_tokens
    if longest < SHORTEST_PROMPT:
        raise ConfigError(
            f"--max-new-tokens={config.max_new_tokens}: does not fit the model's context of "
            f"{hf_config.max_position_embeddings}. Lower it."
        )
    return longest


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


def make_train_config(config: VerifyConfig) -> TrainConfig:
    """A run of one rollout with this command's flags."""
    sglang_args = config.sglang_args
    starts_servers = not config.servers.rollout_server_url
    chunked = any(arg.startswith("--chunked-prefill-size") for arg in sglang_args)
    if starts_servers and not chunked:
        sglang_args = (*sglang_args, "--chunked-prefill-size", str(CHUNKED_PREFILL_SIZE))
    return TrainConfig(
        model=config.model,
        rollout=groups.RolloutConfig(
            num_rollout=1,
            rollout_batch_size=config.num_prompts,
            n_samples_per_prompt=1,
            rollout_temperature=config.temperature,
        ),
        engine=groups.EngineConfig(**asdict(config.servers)),
        trainer=groups.TrainerConfig(train_backend=config.train_backend, max_tokens_per_gpu=999),
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


def _score(engines: EnginePair, samples: Sequence[Sample], config: VerifyConfig) -> ParityCounts:
    """Compare with the trainer's log-probabilities, computed in an order and packing of its own."""
    shuffled = list(samples)
    random.Random(config.seed).shuffle(shuffled)
    train = engines.trainer.log_probs(
        [sample.token_ids for sample in shuffled],
        [len(sample.prompt.prompt_ids) for sample in shuffled],
        config.temperature,
    )
    rollout = torch.tensor([x for sample in shuffled for x in sample.rollout_log_probs])
    counts, _ = compare_log_probs(torch.cat(train), rollout)
    if distributed.rank() == 0:
        logger.info("%d of %d tokens differ", counts.num_mismatched, counts.num_compared)
    return counts


def _train_samples(samples: Sequence[Sample]) -> list[TrainSample]:
    return [TrainSample(sample=sample, advantage=(-1.0) ** i) for i, sample in enumerate(samples)]
