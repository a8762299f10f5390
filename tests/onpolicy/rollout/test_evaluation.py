"""What an evaluation says, against counting all cases."""

from fractions import Fraction
from itertools import combinations

import pytest

from onpolicy.outputs.meanings import meaning
from onpolicy.rollout.evaluation import eval_metrics, majority_passes, pass_at_k
from onpolicy.types import Prompt, Sample, SampleGroup
from tests.support.samples import answered, make_completion

PROMPT = Prompt(index=0, prompt_ids=[3], label="", text="")


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
