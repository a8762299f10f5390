"""Trajectories that grow by answers."""

import dataclasses

import numpy as np

from onpolicy.trajectory import FinishReason, Span, Trajectory
from tests.support.samples import make_completion

EMPTY = Trajectory.begin([2, 3])


def of_version(version, length):
    spans = (Span(version=version, start=0, end=length),)
    return make_completion(range(5, 5 + length), [-1.0] * length, spans=spans)


def test_a_prompt_has_no_sampled_token_and_goes_on():
    assert EMPTY.sampled == [False, False]
    assert (EMPTY.prompt_ids, EMPTY.response_ids, EMPTY.num_sampled) == ([2, 3], [], 0)
    assert EMPTY.finish_reason == FinishReason.ABORT


def test_an_answer_is_sampled_after_what_was_given():
    answered = EMPTY.plus(make_completion([5, 6], [-1.0, -2.0], num_cached_tokens=1), 0.7)
    more = answered.plus(make_completion([7], [-3.0], num_cached_tokens=4, weight_version=3), 0.7)
    assert more.token_ids == [2, 3, 5, 6, 7]
    assert more.sampled == [False, False, True, True, True]
    assert (more.prompt_ids, more.response_ids) == ([2, 3], [5, 6, 7])
    assert more.rollout_log_probs == [-1.0, -2.0, -3.0]
    assert (more.num_cached_tokens, more.weight_version) == (5, 3)
    assert more.num_prefix_tokens == 2 + 4, "what each of the two requests began with"
    assert answered.num_sampled == 2, "the one before is as it was"


def test_stretches_of_one_version_are_one():
    same = EMPTY.plus(of_version(3, 2), 0.7).plus(of_version(3, 1), 0.7)
    assert same.spans == (Span(version=3, start=0, end=3),)
    assert same.plus(of_version(4, 1), 0.7).spans == (
        Span(version=3, start=0, end=3),
        Span(version=4, start=3, end=4),
    )


def test_the_experts_of_a_token_are_those_of_its_own_stretch():
    """A prompt of 2 tokens, and responses of 3 and 2: rows for all tokens but the last."""
    early = np.full((4, 2), 1, dtype=np.int32)
    late = np.full((6, 2), 9, dtype=np.int32)
    first = make_completion([5, 6, 7], [-1.0] * 3, routed_experts=early)
    more = make_completion([8, 9], [-1.0] * 2, routed_experts=late)
    assert EMPTY.plus(first, 0.7).plus(more, 0.7).routed_experts[:, 0].tolist() == [
        1,
        1,
        1,
        1,
        9,
        9,
    ]
    lost = dataclasses.replace(first, routed_experts=None)
    assert EMPTY.plus(lost, 0.7).plus(more, 0.7).routed_experts is None
    unknown = dataclasses.replace(more, routed_experts=None)
    assert EMPTY.plus(first, 0.7).plus(unknown, 0.7).routed_experts is None


def test_what_tokens_were_drawn_from_goes_with_them():
    """Of a turn without filters that is the whole vocabulary: no bytes."""
    plain = EMPTY.plus(of_version(3, 2), 0.7)
    assert plain.kept_tokens == []
    answer = dataclasses.replace(of_version(3, 3), kept_tokens=[b"a", b"b", b"c"])
    grown = plain.plus(answer, 0.7).given([4]).plus(of_version(3, 1), 0.7)
    assert grown.kept_tokens == [b"", b"", b"a", b"b", b"c", b""]
    assert grown.until(6).kept_tokens == [b"", b"", b"a", b"b"]
    assert grown.as_given(5).kept_tokens == [b"b", b"c", b""]
    assert answer.until(2, FinishReason.ABORT).kept_tokens == [b"a", b"b"]


def test_entropies_are_those_of_all_sampled_tokens_or_of_none():
    """Which of them an engine did not tell would not be known otherwise."""
    told = make_completion([5, 6], [-1.0, -2.0], entropy=[0.5, 0.25])
    untold = dataclasses.replace(told, entropy=[])
    both = EMPTY.plus(told, 0.7).given([9]).plus(told, 0.7)
    assert both.entropy == [0.5, 0.25] * 2
    assert both.until(6).entropy == [0.5, 0.25, 0.5]
    assert both.as_given(3).entropy == [0.25, 0.5, 0.25]
    assert told.until(1, FinishReason.ABORT).entropy == [0.5]
    assert EMPTY.plus(told, 0.7).plus(untold, 0.7).entropy == []
    assert EMPTY.plus(untold, 0.7).plus(told, 0.7).entropy == []
    lost = dataclasses.replace(told, entropy=[0.5])
    assert EMPTY.plus(lost, 0.7).entropy == []
