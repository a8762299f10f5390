"""What is said of a rollout and of an evaluation, in which an episode counts once."""

from fractions import Fraction
from itertools import combinations

import pytest

from onpolicy.outputs.meanings import meaning
from onpolicy.rollout.statistics import (
    eval_metrics,
    idle_shares,
    majority_passes,
    mean_response_length,
    pass_at_k,
    rollout_metrics,
    truncated_ratio,
)
from onpolicy.trajectory import FinishReason, Trajectory
from onpolicy.types import Prompt, Sample, SampleGroup
from tests.support.samples import answered, make_completion

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
        "episodes/num_turns": 2.5, "episodes/num_trajectories": 2.0, "episodes/num_rewarded": 1.0,
        "episodes/num_token_rewarded": 1.0, "episodes/num_empty_groups": 1.0,
        "episodes/num_calls": 3.0,
    }  # fmt: skip


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


def group(*episodes):
    """A group of episodes, each a reward and an answer."""
    samples = [
        Sample(
            prompt=PROMPT,
            sample_index=i,
            trajectory=answered(PROMPT, make_completion([5], [-1.0])),
            reward=float(reward),
            answer=answer,
        )
        for i, (reward, answer) in enumerate(episodes)
    ]
    return SampleGroup(prompt=PROMPT, samples=samples)


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_all_draws_that_hold_one_that_passed(n):
    for c in range(n + 1):
        for k in range(1, n + 1):
            draws = [*combinations(range(n), k)]
            hold = sum(min(draw) < c for draw in draws)
            assert pass_at_k(n, c, k) == float(Fraction(hold, len(draws)))


def test_pass_at_k_keeps_its_digits_where_products_of_floats_would_not():
    assert pass_at_k(2000, 1, 1) == 1 / 2000
    assert pass_at_k(2000, 1, 2000) == 1.0


@pytest.mark.parametrize(
    ("answers", "passed", "chance"),
    [
        (["7", "8", "7"], [1, 0, 1], 1.0),
        (["8", "7", "8"], [0, 1, 0], 0.0),
        (["7", "8"], [1, 0], 0.5),
        (["8", "7"], [0, 1], 0.5),  # whichever comes first
        (["7", "8", "9", "7", "8", "9"], [1, 0, 0, 1, 0, 0], 2 / 6),
        (["7", "7", "7"], [1, 1, 0], 2 / 3),  # equal answers, of which one did not pass
        (["7", "", "", "", None], [1, 0, 0, 0, 0], 1.0),  # those without an answer do not vote
        (["", "", None], [0, 0, 1], 0.0),
    ],
)
def test_the_majority_and_how_ties_are_decided(answers, passed, chance):
    assert majority_passes(answers, [bool(each) for each in passed]) == chance


def test_a_set_has_pass_at_every_power_of_two_and_at_n():
    groups = [
        group((1, "7"), (-1, "8"), (-1, "8"), (-1, "9"), (-1, "8"), (1, "7")),
        group((-1, "1"), (-1, "2"), (-1, "3"), (-1, "4"), (-1, "5"), (-1, "")),
    ]
    metrics = eval_metrics(groups, 6)
    assert {name: x for name, x in metrics.items() if "@" in name} == {
        "eval/avg@6": pytest.approx(-2 / 3),
        "eval/pass@1": 1 / 6,
        "eval/pass@2": 3 / 10,  # (1 - 6 / 15) / 2
        "eval/pass@4": 7 / 15,  # (1 - 1 / 15) / 2
        "eval/pass@6": 1 / 2,
        "eval/maj@6": 0.0,
    }
    named = eval_metrics(groups, 6, "aime")
    assert named == {f"eval/aime/{name[5:]}": value for name, value in metrics.items()}
    assert all(meaning(name) for name in [*metrics, *named])


def test_without_answers_there_is_no_majority_and_one_sample_has_none_either():
    assert not any("maj" in name for name in eval_metrics([group((1, None), (0, None))], 2))
    metrics = eval_metrics([group((1, "7"))], 1)
    assert [name for name in metrics if "@" in name] == ["eval/avg@1", "eval/pass@1"]


def test_attempts_that_failed_are_counted_also_where_nothing_else_is():
    assert eval_metrics([group()], 2, "aime", 3.0) == {"eval/aime/num_failed_episodes": 3.0}
    assert eval_metrics([group((1, None))], 1, num_failed=0.0)["eval/num_failed_episodes"] == 0.0


def test_a_prompt_with_fewer_than_k_episodes_counts_in_no_pass_at_k():
    lost = group((0, None))
    metrics = eval_metrics([lost, group((1, None), (0, None))], 2)
    assert metrics["eval/pass@1"] == 0.25
    assert metrics["eval/pass@2"] == 1.0
    assert "eval/pass@2" not in eval_metrics([lost], 2)


def test_the_parts_of_a_sets_rewards_are_its_metrics_too():
    """Means over episodes, as in a rollout."""
    one, other = group((1, "7"), (0.5, "8")), group((0, "9"))
    for sample, parts in zip(
        one.samples, ({"math": 1.0, "brief": 0.0}, {"math": 0.0, "brief": 0.5}), strict=True
    ):
        sample.reward_parts = parts
    other.samples[0].reward_parts = {"math": 0.5, "brief": 1.0}
    metrics = eval_metrics([one, other], 2, "aime")
    assert metrics["eval/aime/reward/math"] == 0.5 == metrics["eval/aime/reward/brief"]
    assert eval_metrics([other], 1)["eval/reward/math"] == 0.5
    assert not any("reward" in name for name in eval_metrics([group((1, "7"))], 1))
    assert meaning("eval/aime/reward/math") == "", "a name of the user's own"
