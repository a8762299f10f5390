"""Weights of tokens that reward functions say: taken from one, and refused where they do not fit."""

import pytest

from onpolicy.errors import ConfigError, RewardError
from tests.support.samples import answered, make_completion
from tests.support.samples import to_score as one_token

ALONE, ALSO, OTHERS = (f"reward_functions.{name}" for name in ("halves", "ones", "others"))


def sample(response):
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
    samples = [sample("a"), one_token("b")]
    scorer(function="halves", rm_workers=1).score([samples])
    assert [s.token_weights for s in samples] == [{"objective": [0.5] * 3}, {"objective": [0.5]}]
    assert [s.reward for s in samples] == [2.0] * 2 and samples[0].reward_parts == {"of": 1.0}


def test_a_function_of_a_group_says_those_of_each(scorer):
    samples = [sample("a"), sample("b")]
    rule = scorer(function="by_place", group_rm=True, rm_workers=1)
    rule.score([samples])
    assert [s.token_weights["objective"] for s in samples] == [[0.0] * 3, [1.0] * 3]


@pytest.mark.parametrize("misfit", MISFITS)
def test_weights_that_do_not_fit_are_a_failure_of_that_sample_and_no_weights(
    scorer, caplog, misfit
):
    rule = scorer(function="misfits", rm_workers=1, rm_max_error_rate=1.0)
    (failed,) = samples = [sample(misfit)]
    metrics = rule.score([samples])
    assert (failed.has_failed, failed.token_weights) == (True, {})
    assert metrics["rollout/reward_errors"] == 1
    assert MISFITS[misfit] in caplog.text


def test_in_a_weighted_sum_they_are_the_tokens_of_the_one_that_says_them(scorer):
    samples = [sample("42")]
    scorer(rewards=("exact=0.5", f"{ALONE}=0.25"), rm_workers=1).score([samples])
    assert samples[0].token_weights == {"objective": [0.5] * 3}
    assert samples[0].reward == 0.5 + 0.5


def test_of_several_each_may_say_those_of_other_terms(scorer):
    rule, weighed = scorer(rewards=(ALONE, OTHERS), rm_workers=1), sample("42")
    assert {*rule.try_out(weighed.prompt)} == {"objective", "kl_loss", "entropy"}
    rule.score([[weighed]])
    terms = {"objective": [0.5] * 3, "kl_loss": [0.0] * 3, "entropy": [2.0] * 3}
    assert weighed.token_weights == terms


def test_two_that_say_them_are_refused_by_name_before_anything_starts_and_later(scorer):
    says = rf"prompt 0, sample 0: --rewards={ALONE} and --rewards={ALSO} say token_weights\['obj"
    rule, weighed = scorer(rewards=(ALONE, ALSO), rm_workers=1), sample("42")
    with pytest.raises(ConfigError, match=says):
        rule.try_out(weighed.prompt)
    with pytest.raises(RewardError, match=says):
        rule.score([[weighed]])
    weighed.token_weights = {"objective": [1.0, 0.0, 1.0]}
    with pytest.raises(RewardError, match=rf"its episode and --custom-rm-path={ALSO} say"):
        scorer(custom_rm_path=ALSO, rm_workers=1).score([[weighed]])
