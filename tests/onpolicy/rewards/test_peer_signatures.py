"""Reward functions that were written for other frameworks, as they are."""

from dataclasses import replace

import pytest

from onpolicy.errors import ConfigError
from tests.support.samples import to_score as sample

ROW = {"difficulty": "hard", "data_source": "gsm8k", "extra_info": {"split": "train"}}


def of(name):
    return {"custom_rm_path": f"functions_of_peers.{name}", "rm_workers": 1}


def rewards(scorer, name, *texts, chat=False, **flags):
    samples = [sample(text, **ROW) for text in texts]
    if chat:
        for each in samples:
            each.prompt = replace(each.prompt, messages=[{"role": "user", "content": "6 * 7?"}])
    rule = scorer(**of(name), **flags)
    rule.try_out(samples[0].prompt)
    rule.score([samples])
    return samples


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize(
    ("name", "texts", "wanted"),
    [
        ("trl_documented", ["1", "123"], [1.0, 3.0]),
        ("trl_async", ["1", "2"], [1.0, 1.0]),
        ("verl_flexible", ["42", "41"], [1.0, 0.0]),
        ("verl_guide", ["42"], [1.0]),
        ("slime", ["4", "42"], [0.5, 1.0]),
        ("rubric", ["42", "41"], [1.0, 0.0]),
    ],
)
def test_a_function_of_another_framework_scores_as_it_is(scorer, name, texts, wanted, group):
    assert [s.reward for s in rewards(scorer, name, *texts, group_rm=group)] == wanted


def test_of_a_chat_trl_is_given_messages_and_the_row_by_columns_of_which_one_is_the_label(scorer):
    samples = rewards(scorer, "trl_of_a_chat", "42", "41", chat=True, group_rm=True)
    assert [s.reward for s in samples] == [1.0, 0.0]


def test_what_they_report_beside_the_reward_is_logged_and_verls_text_is_the_answer(scorer):
    (one,) = rewards(scorer, "verl_flexible", "41")
    assert (one.answer, one.reward_parts) == ("41", {"acc": 1.0})
    (other,) = rewards(scorer, "slime", "42")
    assert other.reward_parts == {"tokens": float(len(other.response_ids)), "hard": 1.0}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("trl_not_applicable", r"returned None"),
        ("slime_that_reads_flags", r"has no attribute 'rm_url'"),
        ("rubric_with_state", r"the row has no state and no parser, and only one of them can be"),
    ],
)
def test_what_a_run_cannot_give_them_is_said_before_the_first_step(scorer, name, message):
    with pytest.raises(ConfigError, match=message):
        rewards(scorer, name, "42")
