"""A prefix that requests share is prefilled by one of them, and changes nothing of their samples."""

import dataclasses
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.rollout.seeds import sampling_seed
from sglang_patches.prefill_once import LEAST, Leaders, kept_words, words_of
from tests.support.engines_fixture import make_requests

STEM = [*range(LEAST)]


def sequences():
    """Some that share a beginning and go on with few tokens, which occur in several."""
    ends = st.lists(st.integers(0, 2), min_size=1, max_size=4)
    return st.builds(lambda length, end: (STEM * 3)[:length] + end, st.integers(0, 3 * LEAST), ends)


@given(st.lists(sequences(), max_size=8), st.integers(0, LEAST), st.sampled_from([1, 16]))
def test_a_request_waits_if_one_that_does_not_computes_enough_of_its_prefix(queue, cached, page):
    leaders, ahead = Leaders(page), []
    for tokens in queue:
        shared = 0
        for other in ahead:
            equal = [a == b for a, b in zip(tokens, other, strict=False)]
            shared = max(shared, [*equal, False].index(False))
        pages = min(shared, len(tokens) - 1) // page * page
        waits = leaders.compute(words_of(tokens), None, lambda: cached)
        assert waits == (pages - cached >= LEAST)
        ahead += [] if waits else [tokens]


def test_tokens_of_another_adapter_are_no_prefix_and_nothing_is_looked_up_for_them():
    leaders = Leaders()
    leaders.add(words_of([*STEM, 1]), ("adapter", None))
    assert leaders.compute(words_of([*STEM, 2]), ("adapter", None), lambda: 0)
    assert not leaders.compute(
        words_of([*STEM, 2]), ("other", None), lambda: pytest.fail("looked up")
    )


def test_the_words_of_a_request_that_was_retracted_have_what_it_had_answered():
    request = SimpleNamespace(origin_input_ids=STEM, output_ids=[])
    assert kept_words(request) == kept_words(request) == words_of(STEM)
    request.output_ids = [7, 8]
    assert kept_words(request) == words_of([*STEM, 7, 8])


@pytest.mark.engine
@pytest.mark.parametrize("length", [40, 120])
def test_a_group_that_is_sent_at_once_prefills_its_prompt_once(engines, length):
    """120 tokens are three chunks of the engine's; a request that is left fewer than LEAST need not wait
    for the last."""
    (request, *_) = make_requests(1, seed=length, max_new_tokens=8)
    prompt = [(length * 7 + i * i) % 130 + 2 for i in range(length)]
    group = [
        dataclasses.replace(request, prompt_ids=prompt, sampling_seed=sampling_seed(length, i))
        for i in range(8)
    ]
    together = engines.generate(group)
    first, *others = sorted(c.num_cached_tokens for c in together)
    assert first == 0
    assert all(length - 1 - LEAST < cached < length for cached in others)
    alone = [engines.generate([request])[0] for request in group]
    for a, b in zip(together, alone, strict=True):
        assert (a.response_ids, a.rollout_log_probs) == (b.response_ids, b.rollout_log_probs)
