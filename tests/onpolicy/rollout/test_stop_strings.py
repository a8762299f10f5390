"""Answers that texts end, in one request or in many."""

from hypothesis import given
from hypothesis import strategies as st

from onpolicy.rollout.episode_rules import EpisodeRules
from onpolicy.rollout.stop_strings import until_stop_string
from onpolicy.trajectory import FinishReason
from tests.support.samples import make_completion

LETTERS = "ab<>/"
RULES = EpisodeRules(
    decode=lambda token_ids: "".join(LETTERS[i] for i in token_ids),
    tokens_of=lambda text, so_far: [LETTERS.index(letter) for letter in text],
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
