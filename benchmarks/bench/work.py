"""Work of a benchmark: sequences that fit the model's context, and the amount of computation."""

from __future__ import annotations

from dataclasses import replace

from transformers import PretrainedConfig

from onpolicy.config.kinds import Unasked
from onpolicy.config.tools import BenchConfig
from onpolicy.rollout.engine_args import CONTEXT_MARGIN, MAX_CONCURRENCY
from onpolicy.run.launch.duration import Work
from onpolicy.run.launch.lengths import fit_length


def fit_bench(config: BenchConfig, hf_config: PretrainedConfig) -> BenchConfig:
    """Return a benchmark whose prompt and response fit the context together, unless their lengths
    were given."""
    room = hf_config.max_position_embeddings - CONTEXT_MARGIN
    sampled = config.longest_response or config.max_new_tokens
    beside = room // 3 if isinstance(sampled, Unasked) else room - sampled
    prompt_len = fit_length("--prompt-len", config.prompt_len, beside, hf_config)
    most = room - prompt_len
    return replace(
        config,
        prompt_len=prompt_len,
        max_new_tokens=fit_length("--max-new-tokens", config.max_new_tokens, most, hf_config),
    )


def bench_work(config: BenchConfig, num_measured: int, at_once: int) -> Work:
    """Return the work of all repetitions of `num_measured` things, and one more of each.

    A step of stock operators, every other of `bench loop`, scores its samples as well.
    """
    times = num_measured * (1 + config.repetitions)
    if config.what == "step":
        return Work(scored=0, trained=times * sum(config.num_tokens), decode_steps=0, sampled=0)
    loops = config.what == "loop"
    samples = config.num_prompts * (config.n_samples_per_prompt if loops else 1)
    trained = samples * (config.prompt_len + config.max_new_tokens) if loops else 0
    scored_again = trained // 2 if config.longest_response is None else 0
    waves = -(-samples // max(1, min(at_once, MAX_CONCURRENCY)))
    return Work(
        scored=times * (config.num_prompts * config.prompt_len + scored_again),
        trained=times * trained,
        decode_steps=times * waves * (config.longest_response or config.max_new_tokens),
        sampled=times * samples * config.max_new_tokens // config.engines.rollout_num_engines,
    )
