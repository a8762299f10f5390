"""Functions of a prompt's samples (--group-rm), sums of named rewards (--rewards), weights of tokens."""

from dataclasses import replace

import pytest

from onpolicy.errors import ConfigError, RewardError
from tests.support.samples import answered, make_completion, rewards_of
from tests.support.samples import to_score as one_token
from tests.support.samples import to_score as sample

ALONE = "reward_functions.half_the_length"


def test_a_function_is_given_all_samples_of_a_prompt_and_of_no_other(scorer):
    groups = [[sample("ab"), sample("a"), sample("abc")], [], [sample("abcd")]]
    metrics = scorer(function="ranks", group_rm=True, rm_workers=2).score(groups)
    assert [s.reward for s in groups[0]] == [1.0, 0.0, 2.0]
    assert [s.reward_parts for s in groups[0]] == [{"of": 3.0}] * 3
    assert (groups[2][0].reward, groups[2][0].reward_parts) == (0.0, {"of": 1.0})
    assert not any(metrics.values())


def test_a_group_that_a_function_fails_on_has_failed_whole_and_one_bad_number_alone(scorer, caplog):
    names = ["raises", "number", "none", "short", "dict", "nan"]
    groups = [[sample(name), sample("much longer")] for name in names]
    rule = scorer(function="ranks", group_rm=True, rm_workers=1, rm_max_error_rate=0.95)
    metrics = rule.score(groups)
    assert [*map(rewards_of, groups)] == [[None, None]] * 5 + [[None, 1.0]]
    assert metrics["rollout/reward_errors"] == 11.0
    assert "11 of 12 samples could not be scored" in caplog.text
    rule = scorer(function="ranks", group_rm=True, rm_workers=1, rm_max_error_rate=0.5)
    rule.score([groups[5], [sample("x")]])
    with pytest.raises(RewardError, match=r"2 of 3 samples .* raised ZeroDivisionError"):
        rule.score([groups[0], [sample("x")]])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("ranks", "returned 1.0: it must be a list with one result for each of the 2 .*a list of"),
        ("half_the_length", "raised AttributeError: 'list' object has no attribute 'response'"),
    ],
)  # fmt: skip
def test_a_function_that_takes_no_group_is_found_before_the_first_step(scorer, function, message):
    with pytest.raises(ConfigError, match=message):
        scorer(function=function, group_rm=True).try_out(sample("", "number").prompt)


def test_a_sum_of_named_rewards(scorer):
    samples = [sample("42"), sample("Answer: 42")]
    rule = scorer(rewards=("exact=0.5", f"{ALONE}=-0.25", "dapo=0"), rm_workers=1)
    rule.try_out(samples[0].prompt)
    rule.score([samples])
    assert [s.reward for s in samples] == [0.5 - 0.25, -0.25 * 5]
    assert [s.reward_parts for s in samples] == [
        {
            "exact": 1.0, "half_the_length": 1.0, "half_the_length/is_short": 1.0,
            "dapo": -1.0, "dapo/answered": 0.0,
        },
        {
            "exact": 0.0, "half_the_length": 5.0, "half_the_length/is_short": 0.0,
            "dapo": 1.0, "dapo/answered": 1.0,
        },
    ]  # fmt: skip


def test_a_prompt_may_bring_a_sum_of_its_own_in_place_of_what_scores_the_run(scorer):
    ours, theirs, named = sample("42"), sample("Answer: 42"), sample("Answer: 42")
    theirs.prompt = replace(theirs.prompt, rewards={"dapo": 2.0, "exact": 4.0, ALONE: -1.0})
    named.prompt = replace(named.prompt, rule="dapo")
    for config in ({"rm_type": "exact"}, {"rewards": ("exact",)}):
        rule = scorer(rm_workers=1, **config)
        rule.try_out(theirs.prompt)
        rule.score([[ours, theirs, named]])
        assert [ours.reward, theirs.reward, named.reward] == [1.0, 2.0 - 5.0, 1.0]
        assert theirs.reward_parts == {
            "dapo": 1.0, "dapo/answered": 1.0, "exact": 0.0,
            "half_the_length": 5.0, "half_the_length/is_short": 0.0,
        }  # fmt: skip
        assert theirs.answer == "42"  # the answer of dapo, which its sum names first


def test_what_one_of_them_fails_on_has_no_sum_and_is_counted_for_that_one_alone(scorer):
    rewards = ("exact", f"{ALONE}=2")
    samples = [sample("raises", "raises"), sample("abc")]
    metrics = scorer(rewards=rewards, rm_workers=1, rm_max_error_rate=0.5).score([samples])
    assert rewards_of(samples) == [None, 3.0]
    assert samples[0].reward_parts == {"exact": 1.0}
    assert metrics["rollout/reward_errors"] == 1.0
    with pytest.raises(
        RewardError, match=rf"--rewards={ALONE}: 1 of 2 samples .*LookupError: gone"
    ):
        scorer(rewards=rewards, rm_workers=1, rm_max_error_rate=0.4).score([samples])


HALVES, ALSO, OTHERS = (f"reward_functions.{name}" for name in ("halves", "ones", "others"))


def weighed_sample(response):
    """Of three tokens."""
    made = one_token(response)
    made.trajectory = answered(made.prompt, make_completion([2, 3, 4], [-1.0, -1.0, -1.0]))
    return made


MISFITS = {
    "short": "token_weights['objective']=2 numbers: the sampled tokens are 3. Give one for each",
    "below 0": "token_weights['objective']=-0.5: must be at least 0",
    "nan": "token_weights['objective']=nan: must be a finite number",
    "infinite": "token_weights['objective']=inf: must be a finite number",
    "text": "token_weights['objective']='111': must be a list of numbers",
    "texts": "token_weights['objective']='1': must be a finite number",
    "number": "token_weights['objective']=1.0: must be a list of numbers",
    "nothing": "token_weights['kl_loss']=None: must be a list of numbers",
    "no term": "token_weights['kl']: no term of a loss. Name objective, kl_loss",
    "of what it made itself": "the sampled tokens are 3",
}


def test_a_function_says_the_weights_of_its_samples_tokens_beside_the_reward(scorer):
    samples = [weighed_sample("a"), one_token("b")]
    scorer(function="halves", rm_workers=1).score([samples])
    assert [s.token_weights for s in samples] == [{"objective": [0.5] * 3}, {"objective": [0.5]}]
    assert [s.reward for s in samples] == [2.0] * 2 and samples[0].reward_parts == {"of": 1.0}


def test_a_function_of_a_group_says_those_of_each(scorer):
    samples = [weighed_sample("a"), weighed_sample("b")]
    rule = scorer(function="by_place", group_rm=True, rm_workers=1)
    rule.score([samples])
    assert [s.token_weights["objective"] for s in samples] == [[0.0] * 3, [1.0] * 3]


@pytest.mark.parametrize("misfit", MISFITS)
def test_weights_that_do_not_fit_are_a_failure_of_that_sample_and_no_weights(
    scorer, caplog, misfit
):
    rule = scorer(function="misfits", rm_workers=1, rm_max_error_rate=1.0)
    (failed,) = samples = [weighed_sample(misfit)]
    metrics = rule.score([samples])
    assert (failed.has_failed, failed.token_weights) == (True, {})
    assert metrics["rollout/reward_errors"] == 1
    assert MISFITS[misfit] in caplog.text


def test_in_a_weighted_sum_they_are_the_tokens_of_the_one_that_says_them(scorer):
    samples = [weighed_sample("42")]
    scorer(rewards=("exact=0.5", f"{HALVES}=0.25"), rm_workers=1).score([samples])
    assert samples[0].token_weights == {"objective": [0.5] * 3}
    assert samples[0].reward == 0.5 + 0.5


def test_of_several_each_may_say_those_of_other_terms(scorer):
    rule, weighed = scorer(rewards=(HALVES, OTHERS), rm_workers=1), weighed_sample("42")
    assert {*rule.try_out(weighed.prompt)} == {"objective", "kl_loss", "entropy"}
    rule.score([[weighed]])
    terms = {"objective": [0.5] * 3, "kl_loss": [0.0] * 3, "entropy": [2.0] * 3}
    assert weighed.token_weights == terms


def test_two_that_say_them_are_refused_by_name_before_anything_starts_and_later(scorer):
    says = rf"prompt 0, sample 0: --rewards={HALVES} and --rewards={ALSO} say token_weights\['obj"
    rule, weighed = scorer(rewards=(HALVES, ALSO), rm_workers=1), weighed_sample("42")
    with pytest.raises(ConfigError, match=says):
        rule.try_out(weighed.prompt)
    with pytest.raises(RewardError, match=says):
        rule.score([[weighed]])
    weighed.token_weights = {"objective": [1.0, 0.0, 1.0]}
    with pytest.raises(RewardError, match=rf"its episode and --custom-rm-path={ALSO} say"):
        scorer(custom_rm_path=ALSO, rm_workers=1).score([[weighed]])
