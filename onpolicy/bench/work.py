"""Lengths of a benchmark's sequences that fit the model's context."""

from __future__ import annotations

from dataclasses import replace

from transformers import PretrainedConfig

from onpolicy.config.kinds import Unasked
from onpolicy.config.tool_flags import BenchConfig
from onpolicy.rollout.engine_args import CONTEXT_MARGIN
from onpolicy.run.launch.input_checks import fit_length


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
