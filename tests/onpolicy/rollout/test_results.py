"""What an episode says of its rewards, and the samples that it makes."""

import math
from datetime import datetime

import numpy as np
import pytest

from onpolicy.errors import AgentError
from onpolicy.rollout.results import rewarded
from onpolicy.rollout.rollouter import Episode
from onpolicy.trajectory import Trajectory
from onpolicy.types import Prompt
from tests.support.samples import make_completion

PROMPT = Prompt(index=4, prompt_ids=[7, 3], label="", text="")


def branches():
    """A trajectory of three sampled tokens, and one that leaves it after two of them, with two more."""
    first = Trajectory.begin(PROMPT.prompt_ids).plus(make_completion([5, 6], [-1.0, -2.0]), 1.0)
    second = first.given([9])
    fork = second.forked(5, "0").plus(make_completion([2, 3], [-3.0, -4.0]), 1.0)
    return [second.plus(make_completion([8], [-0.5]), 1.0), fork]


def samples(**more):
    whole = branches()
    return rewarded(Episode(trajectories=whole, **more), PROMPT, 2, whole)


def test_the_trajectories_of_an_episode_are_samples_with_its_place_metrics_and_info():
    found = samples(metrics={"num_calls": 2}, info={"calls": [["add", (1, 2)]]})
    assert [s.sample_index for s in found] == [2, 2]
    assert [s.name for s in found] == ["prompt 4, sample 2", "prompt 4, sample 2, trajectory 1"]
    assert [s.response_ids for s in found] == [[5, 6, 8], [2, 3]]
    assert all(s.metrics == {"num_calls": 2.0} for s in found)
    assert all(s.info == {"calls": [["add", [1, 2]]]} for s in found)
    assert not any(s.is_rewarded for s in found) and found[0].token_rewards is None


def test_a_reward_is_that_of_all_or_of_each():
    assert [(s.reward, s.is_rewarded) for s in samples(reward=1)] == [(1.0, True)] * 2
    found = samples(rewards=[0.5, -1])
    assert [(s.reward, s.is_rewarded) for s in found] == [(0.5, True), (-1.0, True)]


def test_rewards_of_tokens_come_to_the_episodes_and_stay_with_the_tokens_that_are_learnt():
    """The first two of the fork are learnt in the other trajectory, and rewarded there."""
    found = samples(token_rewards=[[0.1, 0.2, 0.3], [100.0, 100.0, 0.0, 1]])
    assert [s.token_rewards for s in found] == [[0.1, 0.2, 0.3], [0.0, 1.0]]
    assert [s.reward for s in found] == [math.fsum([0.1, 0.2, 0.3, 1.0])] * 2
    assert all(s.is_rewarded for s in found)


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ({"reward": math.nan}, "reward=nan: must be a finite number"),
        ({"reward": "1"}, "reward='1': must be a finite number"),
        ({"rewards": [1.0]}, "rewards=1 numbers: its trajectories are 2. Give one for each"),
        ({"rewards": [1.0, math.inf]}, "rewards=inf: must be a finite number"),
        ({"reward": 1.0, "rewards": [1.0, 1.0]}, "reward and rewards: an episode says its rewards"),
        ({"token_rewards": [[1.0]]}, "token_rewards=1 lists: the episode has 2 trajectories"),
        (
            {"token_rewards": [[1.0] * 3, [1.0] * 2]},
            r"token_rewards\[1\]=2 numbers: sampled tokens of trajectory 1 are 4",
        ),
        ({"metrics": {"num_turns": 3}}, "metrics='num_turns': the run counts this itself"),
        ({"metrics": {"calls": None}}, r"metrics\['calls'\]=None: must be a finite number"),
        ({"info": {"tool": object()}}, "info=.*must be what JSON can say"),
        ({"info": {"x": math.nan}}, "info=.*must be what JSON can say"),
    ],
)
def test_a_result_that_does_not_fit_is_refused(more, fault):
    with pytest.raises(AgentError, match=f"^returned {fault}") as caught:
        samples(**more)
    assert caught.value.reason == "result"


def test_what_an_episode_notes_may_have_times_and_numbers_of_numpy():
    info = {"at": datetime(2024, 5, 1), "seconds": np.float32(1.5)}
    found = samples(info=info)
    assert found[0].info == {"at": "2024-05-01T00:00:00", "seconds": 1.5}


def test_weights_of_tokens_stay_with_those_that_are_learnt():
    found = samples(token_weights=[[0, 1, 2], [0.5, 0.5, 3, 4]])
    assert [s.token_weights["objective"] for s in found] == [[0.0, 1.0, 2.0], [3.0, 4.0]]
    assert not any(s.is_rewarded for s in found) and samples()[0].token_weights == {}


def test_weights_may_be_said_of_each_term_of_the_loss():
    ones = [[1, 1, 1], [1, 1, 1, 1]]
    (found, _) = samples(token_weights={"kl_loss": [[0, 1, 2], [0.5, 0.5, 3, 4]], "entropy": ones})
    assert found.token_weights == {"kl_loss": [0.0, 1.0, 2.0], "entropy": [1.0, 1.0, 1.0]}


@pytest.mark.parametrize(
    ("weights", "fault"),
    [
        ([[1, 1, 1]], r"token_weights\['objective'\]=1 lists: the episode has 2 trajectories"),
        (
            [[1, 1], [1] * 4],
            r"token_weights\['objective'\]\[0\]=2 numbers: sampled tokens of trajectory 0 are 3",
        ),
        (
            [[1, 1, math.nan], [1] * 4],
            r"token_weights\['objective'\]\[0\]=nan: must be a finite number",
        ),
        ({"kl_loss": 1.0}, r"token_weights\['kl_loss'\]=1.0: must be a list of lists"),
        ({"kl_loss": [1, 1]}, r"token_weights\['kl_loss'\]\[0\]=1: must be a list of numbers"),
        ({"kl": []}, r"token_weights\['kl'\]: no term of a loss. Name objective, kl_loss, opd_kl"),
        ([[1, -0.5, 1], [1] * 4], r"token_weights\['objective'\]\[0\]=-0.5: must be at least 0"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights, fault):
    with pytest.raises(AgentError, match=fault):
        samples(token_weights=weights)
