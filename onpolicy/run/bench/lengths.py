"""The lengths of a benchmark: those that nobody asked for fit themselves to the model."""

from __future__ import annotations

import logging
from dataclasses import fields

from transformers import PretrainedConfig

from onpolicy.config.tools import BenchConfig, BenchFlags
from onpolicy.errors import ConfigError
from onpolicy.rollout.engine_args import CONTEXT_MARGIN

logger = logging.getLogger(__name__)


def fitted(flags: BenchFlags, hf_config: PretrainedConfig) -> BenchConfig:
    """The benchmark that `flags` mean for a model; says which length is not the usual one.

    Raises ConfigError if lengths that were asked for do not fit the model's context.
    """
    context = hf_config.max_position_embeddings
    room = context - CONTEXT_MARGIN
    asked = flags.longest_response or flags.max_new_tokens
    prompt, sampled = flags.prompt_len, flags.max_new_tokens
    if prompt is None:
        prompt = _usual("prompt_len", room - asked if asked else room // 3, context)
    if sampled is None:
        sampled = _usual("max_new_tokens", room - prompt, context)
    values = {field.name: getattr(flags, field.name) for field in fields(flags)}
    config = BenchConfig(**{**values, "prompt_len": prompt, "max_new_tokens": sampled})
    _require_fit(config, context)
    return config


def _usual(name: str, most: int, context: int) -> int:
    """The default of a length, or what is left for it, at least one token."""
    usual: int = getattr(BenchConfig, name)
    length = max(1, min(usual, most))
    if length < usual:
        flag = f"--{name.replace('_', '-')}"
        logger.info(
            "%s %d, not %d: the model's context of %d leaves no more", flag, length, usual, context
        )
    return length


def _require_fit(config: BenchConfig, context: int) -> None:
    name, sampled = "--max-new-tokens", config.max_new_tokens
    if config.longest_response is not None:
        name, sampled = "--longest-response", config.longest_response
    if config.prompt_len + sampled + CONTEXT_MARGIN > context:
        raise ConfigError(
            f"{name}={sampled}: with --prompt-len {config.prompt_len} and "
            f"{CONTEXT_MARGIN} tokens that SGLang keeps free it does not fit the model's context of "
            f"{context}. Lower one of the two."
        )
