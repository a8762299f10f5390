import json
from dataclasses import replace

import pytest

from onpolicy.errors import ConfigError, RewardError
from onpolicy.rewards import scorer as scorer_module
from onpolicy.rewards import scoring_workers as workers_module
from onpolicy.rewards.scoring_workers import Workers
from onpolicy.rollout.generated_prompts import rows_of
from tests.onpolicy.rewards.reward_functions import MISDEEDS
from tests.support.samples import rewards_of
from tests.support.samples import to_score as sample

NOTHING_FAILED = {
    "rollout/reward_timeouts": 0.0, "rollout/reward_errors": 0.0, "rollout/reward_repeats": 0.0,
    "rollout/num_unscored": 0.0,
}  # fmt: skip


def test_a_rule_scores_samples_in_order(scorer):
    samples = [sample("42"), sample("41"), sample("42")]
    metrics = scorer(rm_type="exact", rm_workers=2).score([samples])
    assert [s.reward for s in samples] == [1.0, 0.0, 1.0]
    assert [s.answer for s in samples] == ["42", "41", "42"]
    assert metrics == NOTHING_FAILED


def test_a_rule_that_comes_later_is_imported_before_samples_have_their_time(scorer, monkeypatch):
    imported = []

    def noting(config, rules):
        imported.append(rules)
        return Workers(config, rules)

    monkeypatch.setattr(scorer_module, "Workers", noting)
    rule, other = scorer(rm_type="exact", rm_workers=1), sample("Answer: 42")
    other.prompt = replace(other.prompt, rule="dapo")
    for samples in ([sample("42")], [other, sample("42")], [sample("42"), other]):
        rule.score([samples])
        assert {each.reward for each in samples} == {1.0}
    assert imported == [["exact"], ["dapo", "exact"]]


def test_a_prompt_may_name_its_rule_in_place_of_the_runs(scorer):
    problem = next(rows_of("reasoning-gym:chain_sum", 1, 0, "--prompt-data"))[1]
    made = sample(json.loads(problem["label"])["answer"], problem["label"])
    made.prompt = replace(made.prompt, rule="reasoning_gym")
    samples = [sample("42"), made, sample("41")]
    scorer(rm_type="exact", rm_workers=1).score([samples])
    assert [s.reward for s in samples] == [1.0, 1.0, 0.0]
    scorer(rm_workers=1).score([[made]])
    with pytest.raises(RewardError, match="no rule would"):
        scorer(rm_workers=1).score([[made, sample("42")]])


def test_a_function_of_ones_own_may_return_parts_and_a_hanging_one_is_ended(scorer):
    samples = [sample("abc"), sample("hang"), sample("spin"), sample("abcd")]
    rule = scorer(function="length_or_hang", rm_time_limit=0.1, rm_workers=2, rm_max_error_rate=0.5)
    metrics = rule.score([samples])
    assert rewards_of(samples) == [3.0, None, None, 4.0]
    assert samples[3].reward_parts == {"half": 2.0}
    assert metrics["rollout/reward_timeouts"] == metrics["rollout/num_unscored"] == 2
    assert metrics["rollout/reward_repeats"] == 2


def test_four_samples_are_scored_at_the_same_time_by_default(scorer, tmp_path):
    samples = [sample(str(i), directory=str(tmp_path), count=4) for i in range(4)]
    metrics = scorer(function="meets_others", rm_time_limit=60.0).score([samples])
    assert [s.reward for s in samples] == [1.0] * 4
    assert metrics["rollout/reward_timeouts"] == 0


@pytest.mark.parametrize("workers", [1, 3])
def test_rewards_do_not_depend_on_the_number_of_workers(scorer, workers):
    samples = [sample("x" * n) for n in range(9)]
    scorer(function="slow_for_some", rm_workers=workers).score([samples])
    assert [s.reward for s in samples] == [float(n) for n in range(9)]


def test_what_fails_has_no_reward_is_counted_and_ends_no_worker_for_good(scorer, caplog):
    rule = scorer(function="misbehaves", rm_workers=2, rm_max_error_rate=0.9)
    samples = [sample(name) for name in MISDEEDS] + [sample("good"), sample("good")]
    for _ in range(2):
        metrics = rule.score([samples])
        assert rewards_of(samples) == [None] * len(MISDEEDS) + [1.0, 1.0]
        assert metrics == NOTHING_FAILED | {
            "rollout/reward_errors": float(len(MISDEEDS)),
            "rollout/num_unscored": float(len(MISDEEDS)),
            "rollout/reward_repeats": 2.0,  # of what ends its process
        }
    assert (
        caplog.text.count("11 of 13 samples could not be scored; nothing is learnt from them") == 2
    )
    assert caplog.text.count("ZeroDivisionError: division by zero\n") == 1  # one traceback
    assert "prompt 0, sample 0, label '42', response 'raises'" in caplog.text


def test_more_failures_than_are_let_pass_end_the_run(scorer):
    samples = [sample("raises"), *[sample("good") for _ in range(9)]]
    scorer(function="misbehaves", rm_workers=1, rm_max_error_rate=0.1).score([samples])
    message = r"1 of 10 samples .* more than --rm-max-error-rate=0.09 .* raised ZeroDivisionError"
    with pytest.raises(RewardError, match=message):
        scorer(function="misbehaves", rm_workers=1, rm_max_error_rate=0.09).score([samples])


REFUSED = [
    ("raises", r"it raised ZeroDivisionError: division by zero \(reward_functions.py, line \d+\)"),
    ("exits", r"it raised SystemExit: 3"),
    ("dies", r"it ended its process \(exit code 3\)"),
    ("crashes", r"it ended its process \(SIGSEGV\)"),
    ("none", r"returned None: it must be a number"),
    ("text", r"returned '1.0': it must be a number"),
    ("nan", r"returned nan: a reward must be finite"),
    ("huge", r"returned 10000.*int too large"),
    ("no score", r'must hold the reward under "score"'),
    ("number as a name", r"the names in a dict must be text"),
    ("no scalar", r"returned <.*NoNumber object.*>: two elements"),
]


@pytest.mark.parametrize(("label", "message"), REFUSED)
def test_a_function_is_tried_on_the_first_prompt_with_its_label_as_the_response(
    scorer, label, message
):
    assert {label for label, _ in REFUSED} == MISDEEDS.keys()
    with pytest.raises(ConfigError, match=message):
        scorer(function="misbehaves").try_out(sample("", label).prompt)


def test_a_function_that_works_is_tried_and_nothing_is_said(scorer):
    for function in ("misbehaves", "a_lambda"):
        scorer(function=function).try_out(sample("", "good").prompt)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no.such.function", "cannot be imported: ModuleNotFoundError"),
        ("time.no_such_function", "has no 'no_such_function'"),
        ("reward_functions.__name__", "is a str, not a function"),
        ("reward_functions.asynchronous", "is async"),
        ("reward_functions.takes_two", r"takes_two\(\) missing 1 required positional argument"),
    ],
)
def test_a_path_that_is_no_function_is_refused_before_the_first_step(scorer, path, message):
    with pytest.raises(ConfigError, match=rf"--custom-rm-path={path}: .*{message}"):
        scorer(custom_rm_path=path).try_out(sample("").prompt)


def test_a_function_that_hangs_is_found(scorer):
    with pytest.raises(ConfigError, match=r"no result within --rm-time-limit=0\.1 seconds"):
        rule = scorer(function="length_or_hang", rm_time_limit=0.1)
        rule.try_out(sample("", "hang").prompt)


def test_a_module_that_hangs_is_found(scorer, tmp_path, monkeypatch):
    monkeypatch.setattr(workers_module, "START_SECONDS", 1.0)
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\n")
    with pytest.raises(ConfigError, match="was not imported after 1 seconds"):
        scorer(custom_rm_path=f"{tmp_path}/slow.py:f", rm_time_limit=1.0).try_out(sample("").prompt)


def test_a_sample_without_a_reward_needs_a_rule(scorer):
    assert scorer().score([])["rollout/reward_errors"] == 0.0
    with pytest.raises(RewardError, match="its episode said no reward, and no rule would"):
        scorer().score([[sample("")]])
