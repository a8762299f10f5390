"""The command `onpolicy verify`: a comparison of rollout and training on real engines."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from onpolicy.config.tools import VerifyConfig
from onpolicy.models.hf_config import load_config
from onpolicy.models.lora.adapters import drawn_values
from onpolicy.outputs.directory import versions
from onpolicy.outputs.progress import Phases
from onpolicy.parity import ParityCounts, compare_draws, compare_log_probs
from onpolicy.rollout.sampling import trajectories_of
from onpolicy.rollout.seeds import sampling_seed, seeds_of
from onpolicy.run.commands.verify_inputs import (
    TRAINED,
    longest_prompt,
    make_prompts,
    make_train_config,
)
from onpolicy.run.engines import EnginePair
from onpolicy.run.launch.cluster_engines import MakeEngines
from onpolicy.run.launch.contracts import contract_for
from onpolicy.train.base import Rescored
from onpolicy.train.policy_trainer import PolicyTrainer
from onpolicy.types import Prompt, Request, Sample, SamplingParams, TrainSample

logger = logging.getLogger(__name__)

LEARNING_RATE = 1e-3

DRAWN = 0.05
"""The scale of random values for adapters, which initially change nothing."""

SCORED_AT_ONCE = 8
"""The number of samples that the trainer scores between two progress updates."""

Report = dict[str, Any]


def verify(config: VerifyConfig, make_engines: MakeEngines = EnginePair) -> Report:
    """Run both rounds and return the report."""
    hf_config = load_config(config.model.hf_checkpoint, config.model.trust_remote_code)
    longest = longest_prompt(config, hf_config)
    train_config = make_train_config(config, longest)
    contract = contract_for(train_config, hf_config, aligned=config.plan.starts_aligned)
    prompts = make_prompts(config, hf_config.vocab_size, longest)
    engines = make_engines(
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
        draw_adapters(engines, config)
        for round_number in (0, 1):
            phases.begin(f"round {round_number + 1} of 2: pushing the trainer's weights")
            engines.push_weights(round_number)
            phases.begin(f"round {round_number + 1} of 2: sampling", config.num_prompts)
            samples = _sample(engines, prompts, config, round_number)
            num_cached += sum(sample.num_cached_tokens for sample in samples)
            phases.begin(f"round {round_number + 1} of 2: scoring", config.num_prompts)
            engines.make_room()
            counts += _score(engines, samples, config, phases)
            if round_number == 0 and config.step:
                trained = samples[:TRAINED]
                num_tokens = sum(len(sample.token_ids) for sample in trained)
                phases.begin(f"one step on {len(trained)} of the samples, {num_tokens} tokens")
                engines.trainer.train(_train_samples(trained), step=0, rates=[LEARNING_RATE])
    finally:
        phases.close()
        engines.stop()
    return {
        **counts.report(),
        **(counts.draws() if contract.is_aligned else {}),
        "k3_kl_max": counts.max_k3,
        "num_cached_tokens": num_cached,
        "optimizer_steps": int(config.step),
        "versions": versions(),
        "contract": {**json.loads(contract.to_json()), "fingerprint": contract.fingerprint},
    }


def passes(report: Report, config: VerifyConfig) -> bool:
    """Check that the report is what the mode promises, and that all paths were really taken."""
    if not config.plan.starts_aligned:
        return True
    passed: bool = (
        report["num_mismatched_tokens"] == 0
        and report["num_drawn_otherwise_tokens"] == 0
        and report["num_compared_tokens"] == 2 * config.num_prompts * config.max_new_tokens
        and report["num_redrawn_tokens"] == report["num_compared_tokens"]
        and report["num_cached_tokens"] > 0
    )
    return passed


def draw_adapters(engines: EnginePair, config: VerifyConfig) -> None:
    """Fill freshly initialised adapters with random values, so that they change the output."""
    if config.lora.lora_rank and not config.lora.lora_adapter:
        engines.trainer.on_each_rank(fill_with_drawn, config.seed)


def fill_with_drawn(trainer: PolicyTrainer, seed: int) -> None:
    """Fill every B, which is initially zero, with random values."""

    def values(name: str, shape: torch.Size) -> torch.Tensor | None:
        return DRAWN * drawn_values(name, shape, seed) if name.endswith(".B") else None

    trainer.policy.fill_adapters(values)


def _sample(
    engines: EnginePair, prompts: Sequence[Prompt], config: VerifyConfig, round_number: int
) -> list[Sample]:
    """Sample a response to each prompt."""
    requests = requests_of(prompts, config, round_number)
    trajectories = trajectories_of(requests, engines.generate(requests))
    return [
        Sample(
            prompt=prompt,
            sample_index=0,
            trajectory=trajectory,
            seeds=seeds_of(trajectory, request.sampling_seed),
        )
        for prompt, request, trajectory in zip(prompts, requests, trajectories, strict=True)
    ]


def requests_of(
    prompts: Sequence[Prompt], config: VerifyConfig, round_number: int
) -> list[Request]:
    """Return a request for each prompt."""
    params = SamplingParams(
        temperature=config.temperature,
        max_new_tokens=config.max_new_tokens,
        stop_token_ids=(),
        ignore_eos=True,
    )
    return [
        Request(
            prompt_ids=prompt.prompt_ids,
            sampling_seed=sampling_seed(config.seed, "verify", round_number, prompt.index),
            params=params,
        )
        for prompt in prompts
    ]


def _score(
    engines: EnginePair, samples: Sequence[Sample], config: VerifyConfig, phases: Phases
) -> ParityCounts:
    """Compare log-probabilities and tokens with the trainer's, in another order and packing."""
    shuffled = list(samples)
    random.Random(config.seed).shuffle(shuffled)
    train: list[Rescored] = []
    for first in range(0, len(shuffled), SCORED_AT_ONCE):
        part = shuffled[first : first + SCORED_AT_ONCE]
        train += engines.trainer.rescore(
            [sample.token_ids for sample in part],
            [len(sample.prompt.prompt_ids) for sample in part],
            config.temperature,
            [sample.trajectory.kept_tokens for sample in part],
            [sample.seeds[0][0] for sample in part] if engines.contract.is_aligned else (),
        )
        phases.advance(len(train))
    log_probs, drawn = (torch.cat(each) for each in zip(*train, strict=True))
    rollout = torch.tensor([x for sample in shuffled for x in sample.rollout_log_probs])
    sampled = torch.tensor([x for sample in shuffled for x in sample.response_ids])
    counts = compare_log_probs(log_probs, rollout)[0] + compare_draws(drawn, sampled)[0]
    logger.info("%d of %d tokens differ", counts.num_mismatched, counts.num_compared)
    if engines.contract.is_aligned:
        logger.info(
            "%d of %d tokens are others than the trainer draws by the same seeds",
            counts.num_drawn_otherwise, counts.num_redrawn,
        )  # fmt: skip
    return counts


def _train_samples(samples: Sequence[Sample]) -> list[TrainSample]:
    return [
        TrainSample(sample=replace(sample, reward=(-1.0) ** i), group=i, episode=i)
        for i, sample in enumerate(samples)
    ]
