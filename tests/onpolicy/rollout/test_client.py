"""Answers of a server that training cannot use."""

import math

import pytest

from onpolicy.errors import ContractError, EngineError
from onpolicy.rollout.client import _completion


def answer(pairs, **meta):
    return {
        "output_ids": [5, 6],
        "meta_info": {
            "output_token_logprobs": pairs,
            "finish_reason": {"type": "stop"},
            "weight_version": 3,
            **meta,
        },
    }


def test_tokens_come_with_their_log_probabilities_and_weight_version():
    completion = _completion(answer([(-0.5, 5, None), (-1.5, 6, None)]), 200, "http://e")
    assert (completion.token_ids, completion.log_probs) == ([5, 6], [-0.5, -1.5])
    assert completion.weight_version == "3"


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (None, "2 tokens, but log-probabilities for 0"),
        ([(-0.5, 5, None)], "2 tokens, but log-probabilities for 1"),
        ([(-0.5, 5, None), (None, 6, None)], "2 tokens, but log-probabilities for 2"),
        ([(-0.5, 5, None), (-0.5, 7, None)], "2 tokens, but log-probabilities for 2"),
        ([(-0.5, 5, None), (math.nan, 6, None)], "log_prob=nan at response position 1"),
        ([(-math.inf, 5, None), (-1.0, 6, None)], "log_prob=-inf at response position 0"),
    ],
)
def test_a_response_without_usable_log_probabilities_is_an_error(pairs, message):
    with pytest.raises(EngineError, match=message):
        _completion(answer(pairs), 200, "http://e")


def test_a_refused_request_says_the_servers_reason():
    with pytest.raises(ContractError, match=r"HTTP 400.*top_p"):
        _completion({"error": {"message": "top_p=0.9: not available"}}, 400, "http://e")
