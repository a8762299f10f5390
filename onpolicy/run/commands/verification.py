"""The command `onpolicy verify`: a comparison of rollout and training on real engines.

The engines sample random prompts and the trainer scores the samples, in two rounds with an optimizer
step between them unless --no-step is given. `check_inputs` makes and checks a run of its flags first.
"""

import json
import logging
import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from onpolicy.cluster.placement import placement_here
from onpolicy.config import TrainConfig, groups
from onpolicy.config.secrets import control_key, reveal
from onpolicy.config.tool_flags import VerifyConfig
from onpolicy.contract import NumericsContract
from onpolicy.errors import ConfigError
from onpolicy.images.family import ImageFamily
from onpolicy.models.hf_config import load_config
from onpolicy.models.lora.adapters import drawn_values
from onpolicy.models.size import ModelSize
from onpolicy.models.weight_files import require_fit, weight_files
from onpolicy.outputs.directory import versions
from onpolicy.outputs.progress import Phases
from onpolicy.parity import (
    ParityCounts,
    compare_draws,
    compare_log_probs,
    compare_rows,
    two_digests,
)
from onpolicy.rollout.engine_args import CONTEXT_MARGIN, MAX_CONCURRENCY, FlagCheck
from onpolicy.rollout.sample_requests import trajectories_of
from onpolicy.rollout.seeds import sampling_seed, seeds_of
from onpolicy.rollout.server import require_addresses
from onpolicy.run.commands.depth_table import Apart, by_depth, depths_of, table
from onpolicy.run.commands.random_prompts import make_prompts
from onpolicy.run.engines import EnginePair
from onpolicy.run.launch.cluster_engines import MakeEngines
from onpolicy.run.launch.contracts import contract_for
from onpolicy.run.launch.engine_specs import rollout_spec
from onpolicy.run.launch.input_checks import check_layout, require_transport
from onpolicy.run.launch.memory import require_run_fits
from onpolicy.training.base import Rescored
from onpolicy.training.policy_trainer import PolicyTrainer
from onpolicy.types import Prompt, Request, Sample, SamplingParams, TrainOutcome

logger = logging.getLogger(__name__)

LONGEST_PROMPT = 1024
"""The tokens of the longest prompt, unless --max-prompt-len is given or the context is shorter."""

SHORTEST_PROMPT = 8
"""The least number of tokens that the context must leave for a prompt."""

CHUNKS = 5

SHORTEST_CHUNK = 16

TRAINED = 8
"""The number of samples in the step between the rounds; a few are enough to change all weights."""

BUCKETS = 8
"""The approximate number of buckets that the weights are pushed in."""

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
    counts, num_cached, apart = ParityCounts(), 0, list[Apart]()
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
            found, numbers = _score(engines, samples, config, phases)
            counts += found
            apart.append(numbers)
            if round_number == 0 and config.step:
                trained = samples[:TRAINED]
                num_tokens = sum(len(sample.token_ids) for sample in trained)
                phases.begin(f"one step on {len(trained)} of the samples, {num_tokens} tokens")
                rewarded = [
                    replace(sample, reward=(-1.0) ** i, group=i, episode=i)
                    for i, sample in enumerate(trained)
                ]
                while _skips(engines.trainer.train(rewarded, step=0, rates=[LEARNING_RATE])):
                    pass  # a step in float16 is taken once the loss's scale has fallen enough
    finally:
        phases.close()
        engines.stop()
    return {
        **counts.report(),
        **(counts.draws() if contract.is_aligned else {}),
        **({"by_depth": _by_depth(apart)} if config.by_depth else {}),
        "k3_kl_max": counts.max_k3,
        "num_cached_tokens": num_cached,
        "optimizer_steps": int(config.step),
        "versions": versions(),
        "contract": {**json.loads(contract.to_json()), "fingerprint": contract.fingerprint},
    }


def _skips(outcome: TrainOutcome) -> bool:
    return outcome.metrics.get("train/skipped_share", 0.0) > 0


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
    if config.full_vocabulary:
        rows = report["num_compared_rows"], report["num_mismatched_rows"]
        return passed and rows == (report["num_compared_tokens"], 0)
    return passed


def _by_depth(apart: Sequence[Apart]) -> list[Report]:
    """Return the differences of all rounds by depth, and log them."""
    found = by_depth(*(torch.cat(column) for column in zip(*apart, strict=True)))
    logger.info("differences by the number of tokens before a sampled one\n%s", table(found))
    return found


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
            images=prompt.images,
            sampling_seed=sampling_seed(config.seed, "verify", round_number, prompt.index),
            params=params,
        )
        for prompt in prompts
    ]


def _score(
    engines: EnginePair, samples: Sequence[Sample], config: VerifyConfig, phases: Phases
) -> tuple[ParityCounts, Apart]:
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
            [sample.trajectory.images for sample in part],
        )
        phases.advance(len(train))
    log_probs, drawn, digests = (torch.cat(each) for each in zip(*train, strict=True))
    rollout = torch.tensor([x for sample in shuffled for x in sample.rollout_log_probs])
    sampled = torch.tensor([x for sample in shuffled for x in sample.response_ids])
    counts = compare_log_probs(log_probs, rollout)[0] + compare_draws(drawn, sampled)[0]
    logger.info("%d of %d tokens differ", counts.num_mismatched, counts.num_compared)
    if engines.contract.is_aligned:
        logger.info(
            "%d of %d tokens are others than the trainer draws by the same seeds",
            counts.num_drawn_otherwise, counts.num_redrawn,
        )  # fmt: skip
    if config.full_vocabulary:
        counts += _compared_rows(digests, shuffled)
    return counts, (depths_of([sample.trajectory for sample in shuffled]), log_probs, rollout)


def _compared_rows(train: torch.Tensor, samples: Sequence[Sample]) -> ParityCounts:
    """Compare digests of rows, int64 [R], with the engines', and log the first that differs."""
    digests = [x for sample in samples for x in sample.trajectory.row_digests]
    rollout = torch.tensor(digests, dtype=torch.int64)
    counts, first = compare_rows(train, rollout)
    logger.info("%d of %d rows differ", counts.num_mismatched_rows, counts.num_compared_rows)
    if first is not None:
        sample, place = [(s, i) for s in samples for i in range(len(s.response_ids))][first]
        told = two_digests(sample.response_ids[place], int(train[first]), int(rollout[first]))
        logger.error("First: %s, response position=%d: %s", sample.name, place, told)
    return counts


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
        require_fit(model.hf_checkpoint, hf_config, model.trust_remote_code, sees=model.images)
        size = ModelSize.of(hf_config, model.trust_remote_code, contract.adapter, model.tower_of)
        require_run_fits(train_config, hf_config, spec, size, config.cluster.num_ranks)
        require_transport(train_config, contract)
        if not config.cluster.ray_address:
            placement_here(train_config, contract)
        flags.require_passed()
    return train_config, contract


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


def _cuts_no_prompt(config: VerifyConfig) -> bool:
    """Return whether the engine may not prefill a prompt in chunks."""
    model = config.model
    return model.images and ImageFamily.of(model.hf_checkpoint).sees_both_ways


def make_train_config(config: VerifyConfig, longest: int) -> TrainConfig:
    """Return a run of one rollout (none with --no-step) on prompts of up to `longest` tokens."""
    sglang_args = config.sglang_args
    starts_servers = not config.servers.rollout_server_url
    chunked = any(arg.startswith("--chunked-prefill-size") for arg in sglang_args)
    if starts_servers and not chunked and not _cuts_no_prompt(config):
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
            true_on_policy_mode=config.plan.starts_aligned,
            parity_policy="warn",
            parity_check="full" if config.full_vocabulary else "sampled",
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
