"""Which settings a resumed run may change."""

import dataclasses

import pytest

from onpolicy.config import TrainConfig
from onpolicy.config.settings import BY_CONTENT, DECIDE_NO_RESULT, changes, same_run
from onpolicy.report.page import NOT_THE_EXPERIMENT
from tests.support.unstarted_run import changed

CONFIG = TrainConfig()


def names(config, recorded=None):
    return [change.name for change in changes(recorded or CONFIG.to_dict(), config)]


def another(value):
    """A value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return value + "x"
    return (*value, "x") if isinstance(value, tuple) else (value or 0) - 2


def test_the_table_names_flags_and_the_report_shares_it():
    assert {*CONFIG.to_dict(), "save_hf"} >= DECIDE_NO_RESULT  # the latter of `onpolicy sft`
    assert {"seed"} == NOT_THE_EXPERIMENT - DECIDE_NO_RESULT


def test_every_flag_decides_results_unless_the_table_says_that_it_does_not(subtests):
    for name, value in {**CONFIG.to_dict(), "rollout_api_key": ""}.items():
        recorded = {**CONFIG.to_dict(), name: another(value)}
        is_free = name in DECIDE_NO_RESULT or name == "num_rollout"
        with subtests.test(name):
            assert names(CONFIG, recorded) == ([] if is_free or name in BY_CONTENT else [name])
            assert same_run(recorded, CONFIG.to_dict()) == is_free


def test_what_json_makes_of_a_value_is_the_value():
    config = changed(CONFIG, rollout_stop_token_ids=(5,), lr=1e-7)
    recorded = {**config.to_dict(), "rollout_stop_token_ids": [5], "lr": float("1e-07")}
    assert names(config, recorded) == []
    not_a_number = changed(CONFIG, kl_loss_coef=float("nan"))
    assert names(not_a_number, not_a_number.to_dict()) == []


def test_a_file_that_was_recorded_as_a_text_is_the_only_one_of_several():
    now = changed(CONFIG, prompt_data=("a.jsonl",))
    for text, is_same in (("a.jsonl", True), ("b.jsonl", False)):
        was = {**now.to_dict(), "prompt_data": text}
        assert same_run(was, now.to_dict()) is same_run(now.to_dict(), was) is is_same
        assert changes(was, now) == []  # their contents are compared


@pytest.mark.parametrize(
    ("num_rollout", "style", "may"),
    [(101, "constant", True), (99, "constant", False), (101, "cosine", False)],
)
def test_a_run_may_be_made_longer_if_its_learning_rate_does_not_go_by_its_length(
    num_rollout, style, may
):
    recorded = changed(CONFIG, lr_decay_style=style).to_dict()
    config = changed(CONFIG, num_rollout=num_rollout, lr_decay_style=style)
    assert names(config, recorded) == ([] if may else ["num_rollout"])


def test_the_key_is_in_no_message():
    config = changed(CONFIG, rollout_api_key="secret")
    assert "secret" not in str(changes({**CONFIG.to_dict(), "lr": 2.0}, config))
    assert dataclasses.asdict(config)["engine"]["rollout_api_key"] == "secret"


def test_a_run_that_draws_ahead_may_not_be_made_longer_unasked():
    """At the end of the shorter one nothing was drawn ahead."""
    recorded = changed(CONFIG, rollout_lag=1).to_dict()
    assert names(changed(CONFIG, rollout_lag=1, num_rollout=101), recorded) == ["num_rollout"]


@pytest.mark.parametrize("name", ["align", "lora_dora", "rollout_kv_format"])
def test_a_record_with_a_setting_that_was_removed_is_of_another_run(name):
    assert names(CONFIG, {**CONFIG.to_dict(), name: "int8"}) == [name]
    assert names(CONFIG, {**CONFIG.to_dict(), name: ""}) == []
