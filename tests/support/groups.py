"""Groups with nothing drawn, for tests of what draws them without engines."""

from onpolicy.rollout import sample_requests
from onpolicy.rollout.rollouter import SingleTurn
from onpolicy.rollout.sample_requests import make_group
from onpolicy.types import Prompt, SamplingParams

LONGEST, SAMPLES = 9, 2
"""Tokens of the longest response, and responses of a group."""

PARAMS = SamplingParams(temperature=1.0, max_new_tokens=LONGEST, stop_token_ids=(1,))


def open_group(number):
    """The group of a prompt of two tokens, of which the second is its number."""
    prompt = Prompt(index=number, prompt_ids=[7, number], label="", text="")
    requests = make_group(prompt, SAMPLES, PARAMS, 0, "rollout", number)
    return sample_requests.open_group(number, prompt, requests, SingleTurn())
