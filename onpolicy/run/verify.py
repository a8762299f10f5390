"""Measures, on real engines, whether rollout and training agree on every sampled token."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from onpolicy.config import TrainConfig, groups
from onpolicy.config.tools import VerifyConfig
from onpolicy.errors import ConfigError
from onpolicy.models.hf_config import load_config
from onpolicy.models.weight_files import require_fit
from onpolicy.outputs.directory import versions
from onpolicy.parity import ParityCounts, compare_log_probs
from onpolicy.rollout.engine_args import CONTEXT_MARGIN
from onpolicy.rollout.flag_check import FlagCheck
from onpolicy.rollout.seeds import sampling_seed
from onpolicy.run.contracts import contract_for
from onpolicy.run.engine_specs import rollout_spec
from onpolicy.run.engines import EnginePair
from onpolicy.run.input_checks import check_layout
from onpolicy.train import distributed
from onpolicy.types import Completion, Prompt, Request, Sample, SamplingParams, TrainSample

logger = logging.getLogger(__name__)

CHUNKED_PREFILL_SIZE = 48
LEARNING_RATE = 1e-3
SHORTEST_PROMPT = 8

Report = dict[str, Any]


def check_inputs(config: VerifyConfig) -> None:
    """Raise ConfigError for whatever `verify` could not run; starts nothing."""
    train_config = make_train_config(config)
    check_layout(train_config)
    model = config.model
    hf_config = load_config(model.hf_checkpoint, model.trust_remote_code)
    _longest_prompt(config, hf_config)
    contract = contract_for(train_config, hf_config, aligned=config.true_on_policy_mode)
    spec = rollout_spec(train_config, hf_config, contract)
    with FlagCheck(replace(spec, sglang_args=config.sglang_args)) as flags:
        require_fit(model.hf_checkpoint, hf_config, model.trust_remote_code)
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
            completions = engines.generate(_requests(config, prompts, round_number))
            num_cached += sum(completion.num_cached_tokens for completion in completions)
            counts += _score(engines, prompts, completions, config)
            if round_number == 0:
                samples = _train_samples(prompts, completions)
                engines.trainer.train(samples, step=0, rates=[LEARNING_RATE])
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
    longest = hf_config.max_position_embeddings - CONTEXT_MARGIN - config.max_new_tokens
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
    return (
        report["num_mismatched_tokens"] == 0
        and report["num_compared_tokens"] == 2 * config.num_prompts * config.max_new_tokens
        and report["num_cached_tokens"] > 0
    )


def make_prompts(config: VerifyConfig, vocab_size: int, longest: int) -> list[list[int]]:
    """Random token ids of random lengths, some longer than a prefill chunk, sharing prefixes."""
    rng = random.Random(f"prompts/{config.seed}")
    shared = [rng.randrange(vocab_size) for _ in range(longest // 2)]
    prompts = []
    for i in range(config.num_prompts):
        prefix = shared[: rng.randrange(len(shared))]
        length = longest if i == 0 else rng.randrange(1, longest - len(prefix))
        prompts.append((prefix + [rng.randrange(vocab_size) for _ in range(length)])[:longest])
    return prompts


def make_train_config(config: VerifyConfig) -> TrainConfig:
    """A run of one rollout with this command's flags."""
    sglang_args = config.sglang_args
    if not any(arg.startswith("--chunked-prefill-size") for arg in sglang_args):
        sglang_args = (*sglang_args, "--chunked-prefill-size", str(CHUNKED_PREFILL_SIZE))
    return TrainConfig(
        model=config.model,
        rollout=groups.RolloutConfig(
            num_rollout=1,
            rollout_batch_size=config.num_prompts,
            n_samples_per_prompt=1,
            rollout_temperature=config.temperature,
        ),
        engine=groups.EngineConfig(
            rollout_num_engines=config.rollout_num_engines, cpu_threads=config.cpu.cpu_threads
        ),
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


def _requests(
    config: VerifyConfig, prompts: Sequence[list[int]], round_number: int
) -> list[Request]:
    params = SamplingParams(
        temperature=config.temperature,
        max_new_tokens=config.max_new_tokens,
        stop_token_ids=(),
        ignore_eos=True,
    )
    return [
        Request(
            prompt_ids=prompt,
            sampling_seed=sampling_seed(config.seed, "verify", round_number, i),
            params=params,
        )
        for i, prompt in enumerate(prompts)
    ]


def _score(
    engines: EnginePair,
    prompts: Sequence[list[int]],
    completions: Sequence[Completion],
    config: VerifyConfig,
) -> ParityCounts:
    """Compare with the trainer's log-probabilities, computed in an order and packing of its own."""
    order = list(range(len(prompts)))
    random.Random(config.seed).shuffle(order)
    train = engines.trainer.log_probs(
        [prompts[i] + completions[i].response_ids for i in order],
        [len(prompts[i]) for i in order],
        config.temperature,
    )
    rollout = torch.tensor([x for i in order for x in completions[i].rollout_log_probs])
    counts, _ = compare_log_probs(torch.cat(train), rollout)
    if distributed.rank() == 0:
        logger.info("%d of %d tokens differ", counts.num_mismatched, counts.num_compared)
    return counts


def _train_samples(
    prompts: Sequence[list[int]], completions: Sequence[Completion]
) -> list[TrainSample]:
    return [
        TrainSample(
            sample=Sample(
                prompt=Prompt(index=i, prompt_ids=prompt, label="", text=""),
                sample_index=0,
                completion=completion,
            ),
            advantage=(-1.0) ** i,
        )
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
    ]
