"""Groups that are opened and sampled without engines."""

import dataclasses

import pytest

from onpolicy.errors import EngineError
from onpolicy.rollout.open_groups import OpenGroups
from onpolicy.trajectory import FinishReason, Span
from tests.support.episodes import Part, drive
from tests.support.groups import LONGEST, PARAMS, open_group
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


def test_groups_are_opened_in_the_order_of_the_prompts():
    groups = OpenGroups(open_group)
    opened = [groups.open_next() for _ in range(3)]
    assert [[each.number for each in group] for group in opened] == [[0, 0], [1, 1], [2, 2]]
    assert groups.take_all() == opened and groups.groups == {} and groups.next_number == 3


def test_what_continues_a_response_has_its_seed_and_the_tokens_that_are_left():
    episode = OpenGroups(open_group).open_next()[0]
    whole, requests = episode.turns.request, []
    for version in range(3):
        job = Part([episode], 4, version)
        drive(job, lambda request, v=version: answer(request, LONGEST, v))
        requests += job.requests
    first, _, last = requests
    assert first == dataclasses.replace(whole, params=dataclasses.replace(PARAMS, max_new_tokens=4))
    assert last.sampling_seed == whole.sampling_seed
    assert last.prompt_ids == [7, 0, *range(100, 108)] and last.params.max_new_tokens == 1
    spans = episode.trajectories[0].spans
    assert [(span.version, span.start, span.end) for span in spans] == [
        (0, 0, 4), (1, 4, 8), (2, 8, 9),
    ]  # fmt: skip


def test_an_answer_from_other_weights_ends_the_job():
    drawn = Part(OpenGroups(open_group).open_next(), 4, 1, by_token=True)
    with pytest.raises(EngineError, match="weight_version=0"):
        drive(drawn, lambda request: answer(request, LONGEST, 0))
