"""A prefix that requests share is prefilled by one of them, and changes nothing of their samples."""

import dataclasses
from inspect import signature
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.rollout.seeds import sampling_seed
from sglang_patches.prefill_once import LEAST, Leaders, _leave_followers, kept_words, words_of
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


class Unread(list):
    """A queue of which only the length may be asked."""

    def __iter__(self):
        raise AssertionError("the queue was read")


NOT_FULL = [
    {"batch_is_full": False},
    {"reqs": []},
    {"chunked_req": SimpleNamespace()},
    {"enable_priority_preemption": True},
    {"is_hybrid_swa": True},
]


def scheduler_with(queue, **changes):
    """(scheduler, running batch) that takes nobody, with these changes."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    of_batch = {"reqs": [object()], "batch_is_full": True} | changes
    running = ScheduleBatch(reqs=of_batch["reqs"], batch_is_full=of_batch["batch_is_full"])
    values = {
        "waiting_queue": queue,
        "running_batch": running,
        "tree_cache": SimpleNamespace(disable=False, supports_mamba=lambda: False),
        "chunked_req": None,
        "enable_priority_preemption": False,
        "is_hybrid_swa": False,
        "last_batch": None,
        "page_size": 1,
        "grammar_manager": SimpleNamespace(has_waiting_grammars=lambda: False),
    }
    return SimpleNamespace(**{**values, **changes}), running


def test_a_queue_is_not_read_while_sglang_takes_nobody_of_it():
    """As SGLang itself does not (reported of other schedulers: sgl-project/sglang-jax#293)."""
    from sglang.srt.managers.scheduler import Scheduler

    original = Scheduler._get_new_batch_prefill_raw
    original = getattr(original, "__wrapped__", original)
    scheduler, running = scheduler_with(Unread([1, 2]))
    # SGLang's releases differ in whether the batch is an argument.
    given = {"prefill_delayer_single_pass": None, "running_batch": running}
    given = {name: given[name] for name in given if name in signature(original).parameters}
    assert _leave_followers(original, scheduler, **given) in (None, (None, running))


def test_no_request_of_a_recurrent_model_waits_since_no_state_lies_within_a_prefix():
    cache = SimpleNamespace(disable=False, supports_mamba=lambda: True)
    scheduler, running = scheduler_with(Unread([1, 2]), tree_cache=cache, batch_is_full=False)
    took = _leave_followers(lambda *_, **__: "all", scheduler, None, running_batch=running)
    assert took == "all"


@pytest.mark.parametrize("changes", NOT_FULL)
def test_a_queue_is_read_whenever_sglang_may_take_of_it(changes):
    scheduler, running = scheduler_with(Unread([1, 2]), **changes)
    with pytest.raises((AssertionError, AttributeError), match=r"read|origin_input_ids"):
        _leave_followers(lambda *_, **__: None, scheduler, None, running_batch=running)


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
