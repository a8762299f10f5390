"""Episodes that are drawn in rounds, without engines."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.errors import EngineError
from onpolicy.rollout.open_groups import OpenGroups
from onpolicy.rollout.rounds import Round
from onpolicy.trajectory import FinishReason, Span
from tests.support.episodes import drive
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
        weight_version=version,
        spans=(Span(version=version, start=0, end=count),),
    )


lengths_of_responses = st.lists(st.integers(1, LONGEST), min_size=1, max_size=7)


@given(lengths_of_responses, st.integers(1, 12), st.integers(1, 2 * LONGEST), st.integers(1, 12))
def test_a_constant_number_of_responses_is_open_and_each_grows_to_its_own_length(
    lengths, width, tokens, rounds
):
    groups, complete = OpenGroups(open_group, width), []

    def length_of(prompt, seed):
        return lengths[(prompt * SAMPLES + seed) % len(lengths)]

    def length_for(request):
        seeds = [e.turns.request.sampling_seed for e in open_group(request.prompt_ids[1]).episodes]
        return length_of(request.prompt_ids[1], seeds.index(request.sampling_seed))

    for version in range(rounds):
        drawn = Round(groups.next_round(), tokens, version, by_token=True)
        drive(drawn, lambda request, v=version: answer(request, length_for(request), v))
        assert len(drawn.requests) == width
        assert all(1 <= r.params.max_new_tokens <= tokens for r in drawn.requests)
        complete += groups.take_complete()
    assert len({group.number for group in complete}) == len(complete)
    assert len(groups.groups) <= width
    assert {g.number for g in [*complete, *groups.groups]} == set(range(groups.next_number))
    for group in complete:
        for i, episode in enumerate(group.episodes):
            (trajectory,), length = episode.trajectories, length_of(group.number, i)
            assert trajectory.response_ids == [100 + t for t in range(length)]
            assert trajectory.num_sampled == length
            spans = trajectory.spans
            assert [s.start for s in spans] == [0, *(s.end for s in spans[:-1])]
            assert spans[-1].end == length and len({s.version for s in spans}) == len(spans)


def test_what_continues_a_response_has_its_seed_and_the_tokens_that_are_left():
    groups = OpenGroups(open_group, 1)
    (episode,) = groups.next_round()
    whole, requests = episode.turns.request, []
    for version in range(3):
        job = Round([episode], 4, version)
        drive(job, lambda request, v=version: answer(request, LONGEST, v))
        requests += job.requests
    first, _, last = requests
    assert first == dataclasses.replace(whole, params=dataclasses.replace(PARAMS, max_new_tokens=4))
    assert last.sampling_seed == whole.sampling_seed
    assert last.prompt_ids == [7, 0, *range(100, 108)] and last.params.max_new_tokens == 1


def test_an_answer_from_other_weights_ends_the_round():
    drawn = Round(OpenGroups(open_group, 1).next_round(), 4, 1, by_token=True)
    with pytest.raises(EngineError, match="weight_version=0"):
        drive(drawn, lambda request: answer(request, LONGEST, 0))
