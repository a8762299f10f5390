"""Answers of a server: those that training cannot use, and those that texts end."""

import base64
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.errors import ContractError, EngineError
from onpolicy.rollout.client import completion_of
from onpolicy.rollout.open_episode import until_stop_string
from onpolicy.rollout.sample_requests import require_version
from onpolicy.rollout.turns import EpisodeRules
from onpolicy.trajectory import UNPUSHED, FinishReason, Span
from onpolicy.types import Request, SamplingParams
from tests.support.samples import make_completion

PARAMS = SamplingParams(temperature=1.0, max_new_tokens=2, stop_token_ids=())
REQUEST = Request(prompt_ids=[7], sampling_seed=1, params=PARAMS)
REPLAYED = replace(REQUEST, params=replace(PARAMS, return_routed_experts=True))
PAIRS = [(-0.5, 5, None), (-1.5, 6, None)]
EXPERTS = np.array([[0, 3], [2, 1]], dtype=np.int32)
ROUTED = {
    "routed_experts": base64.b64encode(EXPERTS.tobytes()).decode(),
    "prompt_tokens": 1,
    "completion_tokens": 2,
}


def numbers(dtype, values):
    return base64.b64encode(np.array(values, dtype=dtype).tobytes()).decode()


def answer(pairs, output_ids=(5, 6), **meta):
    log_probs, tokens = [p[0] for p in pairs], [p[1] for p in pairs]
    return {
        "output_ids": numbers("<i4", output_ids),
        "meta_info": {
            "output_token_logprobs": [numbers("<f4", log_probs), numbers("<i4", tokens)],
            "finish_reason": {"type": "stop"},
            "weight_version": 3,
            **meta,
        },
    }


def test_tokens_come_with_their_log_probabilities_and_weight_version():
    completion = completion_of(answer([(-0.5, 5, None), (-1.5, 6, None)]), 200, REQUEST, "http://e")
    assert (completion.response_ids, completion.rollout_log_probs) == ([5, 6], [-0.5, -1.5])
    assert completion.weight_version == 3


@pytest.mark.parametrize(
    ("said", "version"), [("0", 0), ("12", 12), ("default", UNPUSHED), (None, UNPUSHED)]
)
def test_a_version_is_the_number_of_a_push_and_weights_from_elsewhere_are_of_none(said, version):
    """And so no policy's: an engine that has them is refused."""
    completion = completion_of(answer(PAIRS, weight_version=said), 200, REQUEST, "http://e")
    assert completion.weight_version == version
    with pytest.raises(EngineError, match=f"weight_version={version} on a response"):
        require_version(completion, 1)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([], "2 tokens, but log-probabilities for 0"),
        ([(-0.5, 5, None)], "2 tokens, but log-probabilities for 1"),
        ([(-0.5, 5, None), (-0.5, 7, None)], "2 tokens, but log-probabilities for 2"),
        (
            [(-0.5, 5, None), (math.nan, 6, None)],
            "log_prob=nan at response position 1.*--dtype float16",
        ),
        ([(-math.inf, 5, None), (-1.0, 6, None)], "log_prob=-inf at response position 0"),
    ],
)
def test_a_response_without_usable_log_probabilities_is_an_error(pairs, message):
    with pytest.raises(EngineError, match=message):
        completion_of(answer(pairs), 200, REQUEST, "http://e")


def test_digests_of_rows_come_one_for_each_token_or_none_at_all():
    said = [-(1 << 63), (1 << 63) - 1]
    completion = completion_of(answer(PAIRS, row_digests=said), 200, REQUEST, "http://e")
    assert completion.row_digests == said
    assert completion_of(answer(PAIRS), 200, REQUEST, "http://e").row_digests == []


@pytest.mark.parametrize("said", [[5], [5, 6, 7], [5, None], [5, 1.5], ["5", 6], [True, 6]])
def test_digests_that_are_not_of_the_tokens_are_an_error(said):
    with pytest.raises(EngineError, match=rf"2 tokens, and digests of {len(said)} rows"):
        completion_of(answer(PAIRS, row_digests=said), 200, REQUEST, "http://e")


def test_a_refused_request_says_the_servers_reason():
    with pytest.raises(ContractError, match=r"HTTP 400.*top_p"):
        completion_of({"error": {"message": "top_p=0.9: not available"}}, 400, REQUEST, "http://e")


def test_a_server_of_another_version_is_refused_with_the_remedy():
    with pytest.raises(ContractError, match="of the same version as the run"):
        completion_of({"detail": "Not Found"}, 404, REQUEST, "http://e")


def test_experts_come_for_every_token_but_the_last_if_they_were_asked_for():
    found = completion_of(answer(PAIRS, **ROUTED), 200, REPLAYED, "http://e").routed_experts
    assert np.array_equal(found, EXPERTS)
    assert completion_of(answer(PAIRS, **ROUTED), 200, REQUEST, "http://e").routed_experts is None


def test_experts_of_a_retracted_request_are_not_those_it_was_sampled_with():
    meta = {**ROUTED, "num_retractions": 1}
    assert completion_of(answer(PAIRS, **meta), 200, REPLAYED, "http://e").routed_experts is None


def test_experts_that_do_not_come_are_an_error():
    with pytest.raises(EngineError, match="enable-return-routed-experts"):
        completion_of(answer(PAIRS), 200, REPLAYED, "http://e")


ABORTED = {"finish_reason": {"type": "abort", "message": "Aborted"}}


def test_what_an_abort_leaves_goes_on_after_its_last_token_but_one():
    """Whether the last one would have ended the response, an abort does not say."""
    spans = [{"version": "3", "start": 0, "end": 2}]
    meta = {**ABORTED, **ROUTED, "weight_versions": spans}
    part = completion_of(answer(PAIRS, **meta), 200, REPLAYED, "http://e")
    assert (part.response_ids, part.rollout_log_probs) == ([5], [-0.5])
    assert part.spans == (Span(version=3, start=0, end=1),)
    assert part.finish_reason == FinishReason.ABORT
    assert np.array_equal(part.routed_experts, EXPERTS[:1])


@pytest.mark.parametrize("tokens", [0, 1])
def test_an_abort_may_leave_nothing(tokens):
    """One that waits for the engine comes back without what only the model's pass adds."""
    spans = [{"version": "3", "start": 0, "end": tokens}]
    given = answer(PAIRS[:tokens], (5, 6)[:tokens], **ABORTED, weight_versions=spans)
    if tokens:
        given["meta_info"] |= {**ROUTED, "prompt_tokens": 2, "completion_tokens": 1}
    part = completion_of(given, 200, REPLAYED, "http://e")
    assert (part.response_ids, part.rollout_log_probs, part.spans) == ([], [], ())


LETTERS = "ab<>/"
RULES = EpisodeRules(
    decode=lambda token_ids: "".join(LETTERS[i] for i in token_ids),
    tokens_of=lambda text, so_far: ([LETTERS.index(letter) for letter in text], ()),
)
STOP = ("</a>", "bb")


def part(token_ids):
    log_probs = [-float(i) for i in range(len(token_ids))]
    return make_completion(token_ids, log_probs, finish_reason=FinishReason.LENGTH)


def engine(token_ids):
    """As many of the tokens as an engine samples for one request."""
    for end in range(1, len(token_ids) + 1):
        if any(text in RULES.decode(token_ids[:end]) for text in STOP):
            return token_ids[:end]
    return token_ids


@given(st.lists(st.integers(0, len(LETTERS) - 1), max_size=30), st.integers(1, 7))
def test_an_answer_ends_where_it_would_in_one_request(token_ids, size):
    found, stopped = [], False
    for start in range(0, len(token_ids), size):
        sampled = engine(token_ids[start : start + size])
        more = until_stop_string(found, part(sampled), STOP, RULES)
        assert more.rollout_log_probs == part(sampled).rollout_log_probs[: len(more.response_ids)]
        found += more.response_ids
        stopped = (
            more.finish_reason == FinishReason.STOP or sampled != token_ids[start : start + size]
        )
        if stopped:
            break
    assert found == engine(token_ids) or (not stopped and found == token_ids)


def test_nothing_is_cut_from_an_answer_that_no_text_ends():
    whole = part([0, 1, 0])
    assert until_stop_string([2], whole, STOP, RULES) is whole
    assert until_stop_string([], part([1, 1]), STOP, RULES).finish_reason == FinishReason.LENGTH
