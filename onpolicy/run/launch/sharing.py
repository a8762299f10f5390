"""The choice of --share-prefixes auto, and the line about it in a run's plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import torch

from onpolicy.config import TrainConfig
from onpolicy.config.groups.agents import has_agent
from onpolicy.config.rules import rule_against


def fit_sharing(config: TrainConfig) -> TrainConfig:
    """Return the run with --share-prefixes auto resolved: on where it is tested and saves something."""
    if config.trainer.share_prefixes != "auto":
        return config
    trainer = replace(config.trainer, share_prefixes="off" if _reason_not_to(config) else "on")
    return replace(config, trainer=trainer)


def _reason_not_to(config: TrainConfig) -> str:
    """Return the reason why `auto` shares nothing, or "" if it shares."""
    asked = replace(config, trainer=replace(config.trainer, share_prefixes="on"))
    if contradiction := rule_against(asked, "share_prefixes"):
        return contradiction
    reasons = {
        "on a GPU it was tried once, with triton": torch.cuda.is_available(),
        "a prompt has one sample": config.rollout.n_samples_per_prompt == 1
        and not has_agent(config.agent),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def distinct_share(prompt_lens: Sequence[int], response_len: int, n: int) -> float:
    """Return the fraction of distinct tokens in n responses of `response_len` tokens to each prompt;
    shorter responses have a smaller one."""
    prompt = fmean(prompt_lens)
    return (prompt + n * response_len) / (n * (prompt + response_len))


def sharing_described(config: TrainConfig, prompt_lens: Sequence[int]) -> str:
    """Return a line on whether prefixes are shared, and the share of tokens left to compute."""
    why = _reason_not_to(config) or "--share-prefixes off"
    is_on = config.trainer.shares_prefixes
    said = "prefixes are shared" if is_on else f"prefixes are not shared ({why})"
    if has_agent(config.agent):
        return f"{said}: how much that saves is up to the episodes"
    n, longest = config.rollout.n_samples_per_prompt, config.rollout.rollout_max_response_len
    share = distinct_share(prompt_lens, longest, n)
    return (
        f"{said}: {n} responses of at most {longest} tokens to a prompt of "
        f"{fmean(prompt_lens):.0f} have at most {share:.0%} distinct tokens"
    )
