"""Episodes of several turns, without engines."""

import asyncio
import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onpolicy.errors import AgentError
from onpolicy.rollout.episodes import Episode, Rollouter, SingleTurn
from onpolicy.rollout.open_episode import OpenEpisode
from onpolicy.rollout.rounds import Round
from onpolicy.trajectory import FinishReason
from onpolicy.types import Prompt, Request, SamplingParams
from tests.support.episodes import drive
from tests.support.samples import make_completion

END, GIVEN, LONGEST = 1, [90, 91], 12
PROMPT = Prompt(index=0, prompt_ids=[7, 8], label="", text="")


class Asks(Rollouter):
    """Gives two tokens after every answer that ended by itself, three times at most."""

    async def roll_out(self, prompt, turns):
        for _ in range(3):
            answer = await turns.sample()
            if not turns.num_left:
                break
            assert answer.finish_reason == FinishReason.STOP
            await asyncio.sleep(0)
            turns.append(GIVEN)
        return Episode()


def open_episode(rollouter, longest=LONGEST):
    params = SamplingParams(temperature=0.5, max_new_tokens=longest, stop_token_ids=(END,))
    return OpenEpisode(
        rollouter, PROMPT, Request(prompt_ids=PROMPT.prompt_ids, sampling_seed=3, params=params)
    )


def answer(request, version=0):
    """Token t is decided by the seed and its absolute position alone, as the engines' sampler does."""
    ids = []
    while len(ids) < request.params.max_new_tokens:
        position = len(request.prompt_ids) + len(ids)
        ids.append(random.Random(request.sampling_seed * 1000 + position).choice([END, 5, 6]))
        if ids[-1] == END:
            break
    reason = FinishReason.STOP if ids[-1] == END else FinishReason.LENGTH
    return make_completion(ids, [-1.0] * len(ids), finish_reason=reason, weight_version=version)


def drawn(rollouter, most, longest=LONGEST):
    """An episode in rounds of so many tokens, and how many each round drew."""
    episode, counts = open_episode(rollouter, longest), []
    while not episode.is_complete:
        job = Round([episode], most, 0)
        drive(job, answer)
        counts.append(job.num_tokens)
    return episode.trajectories, counts


def test_one_turn_is_a_prompt_and_its_answer():
    (trajectory,), _ = drawn(SingleTurn(), None)
    assert trajectory.prompt_ids == PROMPT.prompt_ids
    assert {*trajectory.temperatures} == {0.5}
    request = open_episode(SingleTurn()).turns.request
    assert trajectory.response_ids == answer(request).response_ids


def test_what_is_given_stands_between_what_is_sampled():
    (trajectory,), counts = drawn(Asks(), None)
    assert len(counts) == 1, "all turns of an episode are of one round, if it may draw so much"
    turns = "".join("s" if sampled else "g" for sampled in trajectory.sampled)
    assert turns.startswith("gg") and "sggs" in turns
    given = [t for t, s in zip(trajectory.token_ids, trajectory.sampled, strict=True) if not s]
    assert given == PROMPT.prompt_ids + GIVEN * (len(given) // 2 - 1)
    assert trajectory.num_sampled == sum(counts) <= LONGEST


@given(st.integers(1, 5), st.integers(1, 20))
def test_a_round_counts_sampled_tokens_across_turns_and_changes_none(most, longest):
    whole, _ = drawn(Asks(), None, longest)
    again, counts = drawn(Asks(), most, longest)
    assert again == whole
    assert all(count == most for count in counts[:-1])


def test_an_episode_that_has_sampled_its_longest_response_is_asked_for_no_more():
    (trajectory,), _ = drawn(Asks(), None, longest=2)
    assert trajectory.num_sampled <= 2


class Waits(Asks):
    """Waits for what is no answer of the policy."""

    async def roll_out(self, prompt, turns):
        await asyncio.sleep(0.01)
        await asyncio.create_subprocess_exec("true")
        return await super().roll_out(prompt, turns)


def test_a_rollouter_may_wait_for_anything():
    assert drawn(Waits(), None) == drawn(Asks(), None)


@given(st.integers(1, 12))
def test_an_episode_that_is_resumed_goes_on_where_it_was(most):
    whole, _ = drawn(Asks(), None)
    before, after = open_episode(Asks()), open_episode(Asks())
    drive(Round([before], most, 0), answer)
    after.resume(before.record())
    drive(Round([after], None, 0), answer)
    assert after.trajectories == whole


def test_a_rollouter_that_gives_other_tokens_when_it_is_resumed_is_refused():
    before, after = open_episode(Asks()), open_episode(Asks())
    drive(Round([before], None, 0), answer)
    (record,) = before.record()
    other = list(record.trajectory.token_ids)
    other[record.answers[0][0]] += 1
    trajectory = dataclasses.replace(record.trajectory, token_ids=other)
    after.resume([dataclasses.replace(record, trajectory=trajectory)])
    with pytest.raises(ValueError, match="gives other tokens than before after token"):
        drive(Round([after], None, 0), answer)


def test_a_policy_that_has_stopped_is_to_be_given_something_first():
    class Twice(Rollouter):
        async def roll_out(self, prompt, turns):
            await turns.sample()
            await turns.sample()
            return Episode()

    with pytest.raises(AgentError, match=r"prompt 0, sample 0: .*give it tokens before"):
        drawn(Twice(), None)
