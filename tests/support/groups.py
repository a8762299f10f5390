"""Groups with nothing drawn, for tests of what draws them without engines."""

from __future__ import annotations

from onpolicy.rollout import sampling
from onpolicy.rollout.episodes import SingleTurn
from onpolicy.rollout.open_groups import OpenGroup
from onpolicy.rollout.sampling import make_group
from onpolicy.types import Prompt, SamplingParams

LONGEST, SAMPLES = 9, 2
"""Tokens of the longest response, and responses of a group."""

PARAMS = SamplingParams(temperature=1.0, max_new_tokens=LONGEST, stop_token_ids=(1,))


def open_group(number: int) -> OpenGroup:
    """The group of a prompt of two tokens, of which the second is its number."""
    prompt = Prompt(index=number, prompt_ids=[7, number], label="", text="")
    requests = make_group(prompt, SAMPLES, PARAMS, 0, "rollout", number)
    return sampling.open_group(number, prompt, requests, SingleTurn())
