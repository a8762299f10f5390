"""Requests to the engines of a benchmark, the same for both kinds of operators."""

from __future__ import annotations

import random

from onpolicy.config.tool_flags import BenchConfig
from onpolicy.rollout.seeds import sampling_seed
from onpolicy.types import Prompt, Request, SamplingParams


def random_requests(config: BenchConfig, vocab_size: int) -> list[Request]:
    """Return one request for each of `random_prompts`, with the seed of its index; every response has
    exactly --max-new-tokens."""
    params = SamplingParams(
        temperature=1.0, max_new_tokens=config.max_new_tokens, stop_token_ids=(), ignore_eos=True
    )
    return [
        Request(
            prompt_ids=prompt.prompt_ids,
            sampling_seed=sampling_seed("bench", prompt.index),
            params=params,
        )
        for prompt in random_prompts(config, vocab_size)
    ]


def random_prompts(config: BenchConfig, vocab_size: int) -> list[Prompt]:
    """Return --num-prompts prompts of --prompt-len tokens."""
    rng = random.Random(0)
    prompts = [
        [rng.randrange(vocab_size) for _ in range(config.prompt_len)]
        for _ in range(config.num_prompts)
    ]
    return [Prompt(index=i, prompt_ids=ids, label="", text="") for i, ids in enumerate(prompts)]
