"""Labels that a right answer could not meet are found before a run."""

import pytest

from onpolicy.config.groups import RewardConfig
from onpolicy.errors import ConfigError
from onpolicy.rewards import labels
from onpolicy.rewards.scorer import Scorer
from onpolicy.types import Prompt

TOWER = "9^{9^{9^9}}"
"""SymPy computes it in C, for ever, and lets no signal in."""


def prompts(*labels, **more):
    return [Prompt(index=i, prompt_ids=[1], label=x, text="", **more) for i, x in enumerate(labels)]


def test_a_run_is_told_how_many_labels_cannot_be_met_and_which():
    scorer = Scorer(RewardConfig(rm_type="math"))
    given = prompts("42", r"2\sqrt{3}", r"\frac{1}{2", r"\frac{3}{4", "?!", r"\boxed{", "?!")
    with pytest.raises(ConfigError) as error:
        scorer.check_labels(given, "--prompt-data=a.jsonl")
    assert str(error.value).startswith(
        "--prompt-data=a.jsonl: prompt 2, label='\\\\frac{1}{2': --rm-type="
    )
    for part in (
        r"the response '\\boxed{\\frac{1}{2}' would be wrong; prompt 3, label='\\frac{3}{4'",
        r"the response '\\boxed{\\frac{3}{4}' would be wrong; prompt 4, label='?!'",
        "A right answer to 5 of 7 labels would be scored as wrong. Correct these rows or leave them out",
    ):
        assert part in str(error.value)
    scorer.check_labels(given[:1], "--prompt-data=a.jsonl")


def test_a_label_whose_comparison_hangs_is_found_in_time_and_the_others_are_tried():
    scorer = Scorer(RewardConfig(rm_type="math", rm_time_limit=1.0, rm_workers=1))
    refused = scorer.refused_labels(prompts(r"\sqrt{2}", TOWER, r"\sqrt{3}", r"\frac{1}{2"))
    assert [each.prompt.label for each in refused] == [TOWER, r"\frac{1}{2"]
    assert "--rm-time-limit=1 seconds" in refused[0].reason


def test_labels_that_hang_are_given_up_after_a_few(monkeypatch):
    monkeypatch.setattr(labels, "MOST_LATE", 1)
    monkeypatch.setattr(labels, "_TRIED_AT_ONCE", 1)
    scorer = Scorer(RewardConfig(rm_type="math", rm_time_limit=1.0, rm_workers=1))
    refused = scorer.refused_labels(prompts(r"\sqrt{2}", TOWER, f"1+{TOWER}", f"2+{TOWER}"))
    assert len(refused) == 1


def test_a_rule_that_no_process_can_import_is_not_blamed_on_labels(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("raise SystemExit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of the processes that are started alone
    monkeypatch.syspath_prepend(str(tmp_path))
    scorer = Scorer(RewardConfig(rm_type="math", rm_workers=1))
    with pytest.raises(
        ConfigError, match=r"the rule math ends the process .*no label can be tried"
    ):
        scorer.refused_labels(prompts(r"\sqrt{2}"))


def test_each_rule_is_asked_of_its_own_prompts(monkeypatch):
    monkeypatch.setattr(labels, "Workers", None)  # none is started for labels that need no trial
    scorer = Scorer(RewardConfig(rewards=("exact=0.5", "dapo")))
    mixed = prompts("42", "$", " ") + prompts("?!", rule="math") + prompts("-1.5", rule="math")
    refused = scorer.refused_labels(mixed)
    assert [(each.prompt.label, each.rule) for each in refused] == [
        ("$", "dapo"), (" ", "exact"), (" ", "dapo"), ("?!", "math"),
    ]  # fmt: skip
