"""Environments with `reset` and `step`: what is read, what is rewarded, and how an episode ends."""

import asyncio
import math
import re
import threading
from functools import partial
from typing import ClassVar

import pytest

from onpolicy.agents.environments import stepped
from onpolicy.errors import AgentError
from onpolicy.rollout.open_episode import OpenEpisode
from onpolicy.rollout.rollouter import Episode, Turns
from onpolicy.rollout.turns import EpisodeRules
from onpolicy.types import Request
from tests.support.acting import PARAMS, PROMPT, Acts, Draws, decode

MOST_TOKENS = 1000


class Counts:
    """Says how many actions there were; three are enough."""

    made: ClassVar = []

    def __init__(self, last=3, reward=1.0):
        self.last, self.reward, self.actions, self.is_closed = last, reward, [], False
        self.made.append(self)

    def reset(self, prompt):
        return f"{prompt.label}|"

    def step(self, action):
        self.actions.append(action)
        number = len(self.actions)
        return f"[{number}]", self.reward * number, number == self.last

    def close(self):
        self.is_closed = True


class CountsAsync(Counts):
    async def reset(self, prompt):
        return super().reset(prompt)

    async def step(self, action):
        return super().step(action)

    async def close(self):
        super().close()


class PerToken(Counts):
    def step(self, action):
        observation, _, is_done = super().step(action)
        return observation, [0.5] * (len(action) + 1), is_done  # and the stop token


@pytest.fixture(autouse=True)
def nothing_made():
    Counts.made = []


def rolled_out(make, rewards="episode", most=MOST_TOKENS):
    """The episode; what its function raises is raised."""
    return rolled_out_by(lambda prompt, turns: stepped.play(turns, prompt, make, rewards), most)


def rolled_out_by(act, most=MOST_TOKENS):
    request = Request(prompt_ids=PROMPT.prompt_ids, sampling_seed=3, params=PARAMS)
    episode, draws = OpenEpisode(Acts(act), PROMPT, request, rules(most)), Draws()
    episode.go_on(draws)
    assert draws.ended_episodes.acquire(timeout=100)
    if episode.error is not None:
        raise episode.error
    return episode


def rules(most):
    def tokens_of(more, so_far):
        return [*map(ord, more)] if isinstance(more, str) else [*more], ()

    return EpisodeRules(max_context_len=most, decode=decode, tokens_of=tokens_of)


def texts(episode):
    """What was given and what was sampled, in turn."""
    (trajectory,) = episode.trajectories
    found = []
    for token, sampled in zip(trajectory.token_ids, trajectory.sampled, strict=True):
        if not found or found[-1][0] != sampled:
            found.append((sampled, ""))
        found[-1] = (sampled, found[-1][1] + decode([token]))
    return found


@pytest.mark.parametrize("kind", [Counts, CountsAsync])
def test_an_episode_reads_what_is_observed_and_its_actions_are_what_is_sampled(kind):
    episode = rolled_out(kind)
    (environment,) = Counts.made
    given = [text for sampled, text in texts(episode) if not sampled]
    sampled = [text for sampled, text in texts(episode) if sampled]
    assert given == [f"{PROMPT.text}5|", "[1]", "[2]"]
    assert sampled == [f"{action}<stop>" for action in environment.actions]
    assert episode.samples[0].reward == 6.0 and episode.samples[0].token_rewards is None
    assert episode.samples[0].info == {"ended": "done"}
    assert environment.is_closed


class Halves(Counts):
    """What is said up to a space is an action."""

    stop = (" ",)


def test_a_class_is_found_by_its_path_and_its_texts_end_actions():
    where = {"environment": f"{__file__}:Halves", "arguments": {"last": 9}}
    episode = rolled_out_by(lambda prompt, turns: stepped.roll_out(turns, prompt, **where))
    actions = [text for sampled, text in texts(episode) if sampled]
    assert len(actions) == 9 and all(map(re.compile("[^ ]*( |<stop>)").fullmatch, actions))
    assert any(action.endswith(" ") for action in actions)


@pytest.mark.parametrize("rewards", ["turn", "token"])
def test_rewards_of_turns_and_tokens_stand_where_they_were_earned(rewards):
    episode = rolled_out(PerToken if rewards == "token" else Counts, rewards)
    rewarded = episode.samples[0].token_rewards
    (environment,) = Counts.made
    lengths = [len(action) + 1 for action in environment.actions]
    expected = {
        "turn": [r for n, length in enumerate(lengths, 1) for r in [0.0] * (length - 1) + [n]],
        "token": [0.5] * sum(lengths),
    }
    assert episode.samples[0].reward == math.fsum(rewarded)
    assert rewarded == expected[rewards]
    assert len(rewarded) == episode.trajectories[0].num_sampled


def test_an_episode_that_fills_the_context_ends_with_what_it_has_earned():
    episode = rolled_out(partial(Counts, last=1000), most=60)
    (environment,) = Counts.made
    number = len(environment.actions)
    assert episode.samples[0].info == {"ended": "context"}
    assert episode.samples[0].reward == number * (number + 1) / 2 and environment.is_closed
    assert len(episode.trajectories[0].token_ids) <= 60


def test_an_episode_ends_with_the_most_tokens_that_may_be_sampled():
    episode = rolled_out(partial(Counts, last=1000), most=10_000)
    assert episode.samples[0].info == {"ended": "length"}
    assert episode.trajectories[0].num_sampled == PARAMS.max_new_tokens


@pytest.mark.parametrize(
    ("found", "rewards", "message"),
    [
        (("", 1.0), "episode", "must be the tuple \\(observation, reward, done\\)"),
        (("", 1.0, "yes"), "episode", "done True or False"),
        (("", None, True), "episode", "must be a number"),
        (("", True, True), "turn", "must be a number"),
        (("", float("nan"), True), "turn", "not JSON compliant"),  # it could not be journalled
        (("", [1.0] * 99, True), "token", "as many as tokens"),
        (("", 1.0, True), "token", "as many as tokens"),
    ],
)
def test_what_step_must_not_return_fails_the_episode(found, rewards, message):
    class Wrong(Counts):
        def step(self, action):
            return found

    with pytest.raises(AgentError, match=message):
        rolled_out(Wrong, rewards)
    assert Counts.made[0].is_closed


def test_what_an_environment_raises_fails_the_episode():
    class Dies(Counts):
        def step(self, action):
            raise OSError("the sandbox is gone")

    with pytest.raises(AgentError, match="raised OSError: the sandbox is gone"):
        rolled_out(Dies)
    assert Counts.made[0].is_closed


@pytest.mark.parametrize("known", range(5))
def test_an_environment_catches_up_when_the_journal_of_its_observations_ends(known, monkeypatch):
    whole = rolled_out(Counts)
    first, Counts.made = Counts.made[0], []
    journal = ["5|", ("[1]", 1.0, False), ("[2]", 2.0, False), ("[3]", 3.0, True)][:known]

    async def observe(turns, make):
        return journal.pop(0) if journal else await make()

    monkeypatch.setattr(Turns, "observe", observe)
    again = rolled_out(Counts)
    assert texts(again) == texts(whole) and again.samples == whole.samples
    if known == 4:
        assert Counts.made == []
    else:
        assert Counts.made[0].actions == first.actions


def test_a_step_that_blocks_holds_nobody_up():
    others = threading.Event()

    class Waits(Counts):
        def step(self, action):
            assert others.wait(100)
            return super().step(action)

    class Frees(Counts):
        async def step(self, action):
            others.set()
            return super().step(action)

    async def both(prompt, turns):
        plays = [stepped.play(turns.fork(), prompt, make) for make in (Waits, Frees)]
        await asyncio.gather(*plays)
        return Episode()

    assert len(rolled_out_by(both).trajectories) == 2
