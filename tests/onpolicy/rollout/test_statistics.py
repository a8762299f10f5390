"""What is said of a rollout, in which an episode counts once."""

import pytest

from onpolicy.rollout.evaluation import eval_metrics
from onpolicy.rollout.statistics import (
    idle_shares,
    mean_response_length,
    rollout_metrics,
    truncated_ratio,
)
from onpolicy.trajectory import FinishReason, Trajectory
from onpolicy.types import Prompt, Sample, SampleGroup
from tests.support.samples import make_completion

PROMPT = Prompt(index=0, prompt_ids=[3], label="", text="")


def sample(place, turns, reward, reason=FinishReason.STOP, **more):
    """A trajectory of answers with so many tokens each, between which a token is given."""
    trajectory = Trajectory.begin(PROMPT.prompt_ids)
    for i, length in enumerate(turns):
        answer = make_completion([5] * length, [-1.0] * length, finish_reason=reason)
        trajectory = (trajectory.given([9]) if i else trajectory).plus(answer, 1.0)
    return Sample(prompt=PROMPT, sample_index=place, trajectory=trajectory, reward=reward, **more)


def branched():
    """A group of an episode with three trajectories and one with one, and a group that lost all."""
    more = {"is_rewarded": True, "metrics": {"num_calls": 3.0}}
    samples = [
        sample(0, [2, 3], 1.0, token_rewards=[0.2] * 5, reward_parts={"format": 1.0}, **more),
        sample(0, [1], 0.0, FinishReason.LENGTH, token_rewards=[0.0], **more),
        sample(0, [4], 0.5, token_rewards=[0.0] * 4, reward_parts={"format": 0.0}, **more),
        sample(3, [2], 2.5, reward_parts={"format": 2.5}),
    ]
    return [
        SampleGroup(prompt=PROMPT, samples=samples),
        SampleGroup(prompt=PROMPT, samples=[], number=1),
    ]


def test_an_episode_counts_once_however_often_it_branched():
    metrics = rollout_metrics(branched())
    assert metrics["rollout/raw_reward"] == 1.5  # of .5 and 2.5
    assert metrics["rollout/reward_std"] == 1.0
    assert metrics["rollout/response_length"] == mean_response_length(branched()) == 6.0
    assert metrics["rollout/response_length_max"] == 10.0
    assert metrics["rollout/truncated_ratio"] == truncated_ratio(branched()) == 0.5
    assert metrics["rollout/reward/format"] == 1.5
    assert {name: x for name, x in metrics.items() if name.startswith("episodes/")} == {
        "episodes/num_turns": 2.5,
        "episodes/num_trajectories": 2.0,
        "episodes/num_rewarded": 1.0,
        "episodes/num_token_rewarded": 1.0,
        "episodes/num_empty_groups": 1.0,
        "episodes/num_calls": 3.0,
    }


def test_a_prompt_without_an_episode_is_not_one_that_failed():
    groups = branched()
    groups[0].samples[:3] = []
    assert eval_metrics(groups, 1)["eval/pass@1"] == 1.0
    assert eval_metrics(branched(), 4)["eval/avg@4"] == 1.5
    assert eval_metrics(groups[1:], 1) == {}


def test_of_a_rollout_without_an_episode_there_is_nothing_to_say_but_that():
    assert rollout_metrics(branched()[1:]) == {"episodes/num_empty_groups": 1.0}


@pytest.mark.parametrize(
    ("seconds", "rollout", "trainer"),
    [
        ({"rollout_time": 6.0, "train_time": 2.0}, 0.2, 0.6),
        ({"rollout_time": 8.0}, 0.0, 0.8),  # nothing to learn from
        ({"rollout_time": 8.5, "train_time": 0.5}, 0.0, 0.75),  # what was measured apart adds up
    ],
)
def test_a_side_is_idle_while_it_neither_computes_nor_takes_part_in_a_push(
    seconds, rollout, trainer
):
    metrics = {"step_time": 10.0, "weight_sync_time": 1.5, "probe_time": 0.5, **seconds}
    shares = idle_shares({f"perf/{name}": value for name, value in metrics.items()})
    assert shares == {
        "perf/rollout_idle_share": pytest.approx(rollout),
        "perf/trainer_idle_share": pytest.approx(trainer),
    }
