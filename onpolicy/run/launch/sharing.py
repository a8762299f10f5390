"""What a run's plan says of shared prefixes, before there are any samples."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from onpolicy.config import TrainConfig
from onpolicy.config.groups.agents import has_agent


def distinct_share(prompt_lens: Sequence[int], response_len: int, n: int) -> float:
    """The share of distinct tokens in n responses of `response_len` tokens to each prompt; fewer tokens
    a response have a smaller one."""
    prompt = fmean(prompt_lens)
    return (prompt + n * response_len) / (n * (prompt + response_len))


def sharing_described(config: TrainConfig, prompt_lens: Sequence[int]) -> str:
    """Whether prefixes are shared, and how much of a step's tokens that leaves to compute at most."""
    shares = config.trainer.share_prefixes
    said = "prefixes are shared" if shares else "prefixes are not shared (--share-prefixes)"
    if has_agent(config.agent):
        return f"{said}: how much that saves is up to the episodes"
    n, longest = config.rollout.n_samples_per_prompt, config.rollout.rollout_max_response_len
    share = distinct_share(prompt_lens, longest, n)
    return (
        f"{said}: {n} responses of at most {longest} tokens to a prompt of "
        f"{fmean(prompt_lens):.0f} have at most {share:.0%} distinct tokens"
    )
