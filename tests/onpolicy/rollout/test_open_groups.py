"""Responses that are drawn in rounds, without engines."""

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.rollout.open_groups import OpenGroups, joined
from onpolicy.types import FinishReason, Span
from tests.support.groups import LONGEST, PARAMS, SAMPLES, open_group
from tests.support.samples import make_completion


def answer(request, length, version):
    """Token t of a response is 100 + t; it ends by a stop token after `length` of them."""
    done = len(request.prompt_ids) - 2
    count = min(request.params.max_new_tokens, length - done)
    ends = done + count == length < LONGEST
    return make_completion(
        [100 + done + i for i in range(count)],
        [-1.0] * count,
        finish_reason=FinishReason.STOP if ends else FinishReason.LENGTH,
        weight_version=str(version),
        spans=(Span(version=str(version), start=0, end=count),),
    )


lengths_of_responses = st.lists(st.integers(1, LONGEST), min_size=1, max_size=7)


@given(lengths_of_responses, st.integers(1, 12), st.integers(1, 2 * LONGEST), st.integers(1, 12))
def test_a_constant_number_of_responses_is_open_and_each_grows_to_its_own_length(
    lengths, width, tokens, rounds
):
    groups, complete = OpenGroups(open_group, width, tokens), []
    for version in range(rounds):
        slots = groups.next_round()
        assert len(slots) == width
        order = [(group.number, i) for group, i in slots]
        assert order == sorted(order)
        requests = [groups.request(slot) for slot in slots]
        assert all(1 <= r.params.max_new_tokens <= tokens for r in requests)
        answers = [
            answer(r, lengths[(group.number * SAMPLES + i) % len(lengths)], version)
            for r, (group, i) in zip(requests, slots, strict=True)
        ]
        complete += groups.take(slots, answers)
    assert len({group.number for group in complete}) == len(complete)
    assert len(groups.groups) <= width
    assert {g.number for g in [*complete, *groups.groups]} == set(range(groups.next_number))
    for group in complete:
        for i, completion in enumerate(group.completions):
            length = lengths[(group.number * SAMPLES + i) % len(lengths)]
            assert completion.response_ids == [100 + t for t in range(length)]
            assert len(completion.rollout_log_probs) == length
            spans = completion.spans
            assert [s.start for s in spans] == [0, *(s.end for s in spans[:-1])]
            assert spans[-1].end == length and len({s.version for s in spans}) == len(spans)


def test_what_continues_a_response_has_its_seed_and_the_tokens_that_are_left():
    groups = OpenGroups(open_group, 1, 4)
    (slot,) = groups.next_round()
    whole = slot[0].requests[0]
    first = groups.request(slot)
    assert first == dataclasses.replace(whole, params=dataclasses.replace(PARAMS, max_new_tokens=4))
    groups.take([slot], [answer(first, LONGEST, 0)])
    groups.take([slot], [answer(groups.request(slot), LONGEST, 1)])
    last = groups.request(slot)
    assert last.sampling_seed == whole.sampling_seed
    assert last.prompt_ids == [7, 0, *range(100, 108)] and last.params.max_new_tokens == 1


def test_stretches_of_one_version_are_one():
    first = make_completion([5, 6], [-1.0] * 2, spans=(Span(version="3", start=0, end=2),))
    same = make_completion([7], [-2.0], spans=(Span(version="3", start=0, end=1),))
    other = make_completion([8], [-2.0], spans=(Span(version="4", start=0, end=1),))
    assert joined(first, same).spans == (Span(version="3", start=0, end=3),)
    assert joined(joined(first, same), other).spans == (
        Span(version="3", start=0, end=3),
        Span(version="4", start=3, end=4),
    )


def test_the_experts_of_a_token_are_those_of_its_own_stretch():
    """A prompt of 2 tokens, and responses of 3 and 2: rows for all tokens but the last."""
    early = np.full((4, 2), 1, dtype=np.int32)
    late = np.full((6, 2), 9, dtype=np.int32)
    first = make_completion([5, 6, 7], [-1.0] * 3, routed_experts=early)
    more = make_completion([8, 9], [-1.0] * 2, routed_experts=late)
    assert joined(first, more).routed_experts[:, 0].tolist() == [1, 1, 1, 1, 9, 9]
    lost = dataclasses.replace(first, routed_experts=None)
    assert joined(lost, more).routed_experts is None
    assert joined(first, dataclasses.replace(more, routed_experts=None)).routed_experts is None
